/** Tail: the last messages of a topic, newest first, with a filter and a pause button. */

import { byId, h, setText, show } from "./dom.js";
import { clock, date, size } from "./format.js";
import { gettext } from "./i18n.js";
import { fieldFilter, isPath } from "./json_path.js";

// The server sends the last 50 messages when the page opens; an open page keeps more.
const MAX_MESSAGES = 1000;

/** The list of messages. */
export class Tail {
  #list = byId("tail");
  #button = byId("pause");
  #filter = byId("tail-filter");
  /** Whether the filter shows a message with this sender and body; null if the filter is invalid. */
  #matches = matcher("");
  #newest = 0;
  /** The messages that have arrived during the pause; null if the list is not paused. */
  #waiting = null;

  constructor() {
    this.#button.addEventListener("click", () => this.#setPaused(this.#waiting === null));
    this.#filter.addEventListener("input", () => this.#readFilter());
  }

  /** Add the messages of a frame; those of a snapshot replace the list. */
  update(frame) {
    const isSnapshot = frame.op === "snapshot";
    if (this.#waiting !== null) {
      if (isSnapshot) this.#waiting = [];
      this.#waiting = [...this.#waiting, ...frame.topic.tail].slice(-MAX_MESSAGES);
    } else {
      this.#add(frame.topic.tail, isSnapshot);
    }
  }

  #add(messages, isSnapshot) {
    if (isSnapshot) {
      this.#newest = 0;
      this.#list.replaceChildren();
    }
    for (const message of messages) {
      if (message.number <= this.#newest) continue;
      this.#newest = message.number;
      const added = item(message);
      this.#list.prepend(added);
      this.#applyFilter([added]);
    }
    while (this.#list.children.length > MAX_MESSAGES) this.#list.lastChild.remove();
    this.#showWhetherEmpty();
  }

  #readFilter() {
    this.#matches = matcher(this.#filter.value.trim());
    const isValid = this.#matches !== null;
    this.#filter.setAttribute("aria-invalid", String(!isValid));
    setText(byId("no-match"), isValid ? gettext("No message matches the filter.") : gettext("Not a JSON path. Write $.order.id or $.items[0].id = 42."));
    this.#applyFilter([...this.#list.children]);
  }

  /** Show those of the given messages that match the filter; hide the others. */
  #applyFilter(items) {
    for (const each of items) {
      const [sender, body] = ["b", "pre"].map((name) => each.querySelector(name)?.textContent ?? "");
      show(each, this.#matches !== null && this.#matches(sender, body));
    }
    this.#showWhetherEmpty();
  }

  #showWhetherEmpty() {
    show(byId("no-tail"), this.#list.children.length === 0);
    show(byId("no-match"), this.#list.children.length > 0 && !this.#list.querySelector("li:not([hidden])"));
  }

  #setPaused(isPaused) {
    const messages = this.#waiting ?? [];
    this.#waiting = isPaused ? [] : null;
    this.#button.setAttribute("aria-pressed", String(isPaused));
    setText(this.#button, isPaused ? gettext("Paused at {time}: resume", { time: clock(Date.now() / 1000) }) : gettext("Pause"));
    this.#list.classList.toggle("paused", isPaused);
    if (!isPaused) this.#add(messages, false);
  }
}

/** Read a filter: a field of JSON bodies, or text in senders and bodies. */
function matcher(text) {
  if (isPath(text)) {
    const hasField = fieldFilter(text);
    return hasField && ((sender, body) => hasField(body));
  }
  const wanted = text.toLowerCase();
  return (...parts) => parts.some((part) => part.toLowerCase().includes(wanted));
}

function item(message) {
  const time = h("time", { datetime: new Date(message.at * 1000).toISOString(), title: date(message.at) }, clock(message.at));
  const head = h("p", {}, time, h("b", {}, h("bdi", {}, message.from)), h("span", { class: "size" }, size(message.size)));
  for (const [label, title] of labels(message)) head.append(h("span", { class: "label", title }, label));
  return h("li", {}, head, message.body === undefined ? null : h("pre", {}, message.body + (message.is_cut ? " …" : "")));
}

function labels({ enc, wants_answer: wantsAnswer, is_large: isLarge }) {
  return [
    enc === "json" ? ["JSON", gettext("the body is a JSON value")] : null,
    enc === "b64" ? ["base64", gettext("the body is bytes, written as base64")] : null,
    wantsAnswer ? [gettext("reply"), gettext("the sender expects replies")] : null,
    isLarge ? [gettext("large"), gettext("the body exceeds the NOTIFY limit and is not fetched for this page")] : null,
  ].filter(Boolean);
}
