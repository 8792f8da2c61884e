/**
 * Refresh: keeps the fragments of a page of the monitor up to date.
 *
 * A form with data-filter, or a link with data-list-link, changes the URL and only requests the fragments.
 */

import { pollFragments, showFragments } from "./fragments.js";
import { start } from "./page.js";

// The fragments are requested this long after the last input in a filter.
const TYPING_MS = 250;

const request = start(null, showFragments, pollFragments);

// Filter, sort and page

function changeQuery(search) {
  history.replaceState(null, "", search || location.pathname);
  request();
}

function filter(form) {
  const values = [...new FormData(form)].filter(([, value]) => value !== "");
  const query = new URLSearchParams(values).toString();
  changeQuery(query && `?${query}`);
}

let typingTimer = 0;
document.addEventListener("input", ({ target }) => {
  const form = target.closest("form[data-filter]");
  clearTimeout(typingTimer);
  if (form) typingTimer = setTimeout(filter, TYPING_MS, form);
});
document.addEventListener("submit", (event) => {
  if (!event.target.matches("form[data-filter]")) return;
  event.preventDefault();
  clearTimeout(typingTimer);
  filter(event.target);
});
document.addEventListener("click", (event) => {
  const link = event.target.closest("a[data-list-link]");
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
  event.preventDefault();
  changeQuery(link.getAttribute("href"));
});
