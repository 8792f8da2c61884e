/**
 * Fragments: requests the fragments of a page every two seconds, and updates them in place, so that
 * focus, selection, scroll positions, checked boxes and open details stay.
 *
 * A fragment is an element with the attribute data-fragment.
 */

import { setText } from "./dom.js";
import { dateWithZone } from "./format.js";
import { polling } from "./poll.js";

const find = (name) => document.querySelector(`[data-fragment="${CSS.escape(name)}"]`);

function fragmentUrls() {
  return [...document.querySelectorAll("[data-fragment]")].map(({ dataset }) => {
    const url = new URL(location.href);
    url.hash = "";
    url.searchParams.set("fragment", dataset.fragment);
    return url.href;
  });
}

async function readFragments(responses) {
  const texts = await Promise.all(responses.map((response) => response.text()));
  const fragments = texts.map((text) => new DOMParser().parseFromString(text, "text/html").body.firstElementChild);
  // A proxy may have answered with another page.
  if (fragments.some((fragment) => !fragment?.dataset.fragment)) throw new SyntaxError("not a fragment");
  return { now: Date.now() / 1000, fragments };
}

/** Update the fragments of the page in place. */
export function showFragments({ fragments }) {
  for (const fragment of fragments) {
    const shown = find(fragment.dataset.fragment);
    if (shown) update(shown, fragment);
  }
  showLocalTimes();
  document.dispatchEvent(new Event("refreshed"));
}

/** Show each <time datetime> in the reader's time zone. */
function showLocalTimes() {
  for (const element of document.querySelectorAll("time[datetime]")) {
    setText(element, dateWithZone(Date.parse(element.dateTime) / 1000));
  }
}

/** Make a shown node equal to the wanted one, and keep as many nodes below it as possible. */
function update(shown, wanted) {
  if (shown.isEqualNode(wanted)) return;
  if (shown.nodeType !== Node.ELEMENT_NODE) {
    if (shown.data !== wanted.data) shown.data = wanted.data;
    return;
  }
  for (const { name } of [...shown.attributes]) {
    // The reader opens and closes details.
    if (name !== "open" && !wanted.hasAttribute(name)) shown.removeAttribute(name);
  }
  for (const { name, value } of wanted.attributes) {
    if (shown.getAttribute(name) !== value) shown.setAttribute(name, value);
  }
  updateChildren(shown, wanted);
}

function updateChildren(shown, wanted) {
  const byKey = new Map([...shown.children].filter(keyOf).map((child) => [keyOf(child), child]));
  let next = shown.firstChild;
  for (const child of [...wanted.childNodes]) {
    const key = keyOf(child);
    while (!key && next && keyOf(next)) next = next.nextSibling;
    const match = key ? byKey.get(key) : next && next.nodeName === child.nodeName ? next : null;
    byKey.delete(key);
    if (!match) {
      shown.insertBefore(child, next);
      continue;
    }
    // Move only nodes in a wrong place: a moved node loses the focus.
    if (match === next) next = next.nextSibling;
    else shown.insertBefore(match, next);
    update(match, child);
  }
  for (const child of byKey.values()) {
    if (child === next) next = next.nextSibling;
    child.remove();
  }
  while (next) {
    const following = next.nextSibling;
    if (!keyOf(next)) next.remove();
    next = following;
  }
}

const keyOf = (node) => node.dataset?.key;

/** Request the fragments while the page is visible; see poll.js. */
export const pollFragments = polling(fragmentUrls, readFragments);

showLocalTimes();

// Selecting rows. Without this script, the buttons are enabled, and the server rejects an empty selection.

/** Enable the buttons of each form with data-needs-selection only while one of its boxes is checked. */
function enableButtons() {
  for (const form of document.querySelectorAll("form[data-needs-selection]")) {
    const hasSelection = form.querySelector("input:checked:not([data-select-all])") !== null;
    for (const button of form.querySelectorAll("button")) button.disabled = !hasSelection;
  }
}

document.addEventListener("change", ({ target }) => {
  // A box with data-select-all checks those with the name in this attribute.
  const name = target.dataset.selectAll;
  if (name) for (const box of document.querySelectorAll(`input[type=checkbox][name="${name}"]`)) box.checked = target.checked;
  enableButtons();
});
// The browser restores the boxes when the reader goes back to the page.
addEventListener("pageshow", enableButtons);
enableButtons();
