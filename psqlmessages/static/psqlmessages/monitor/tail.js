/** Tail: the last messages of a topic, newest first, with a pause button. */

import { byId, h, setText, show } from "./dom.js";
import { clock, date, size } from "./format.js";

const SHOWN = 50;

/** The list of messages. */
export class Tail {
  #list = byId("tail");
  #button = byId("hold");
  #newest = 0;
  #held = null;

  constructor() {
    this.#button.addEventListener("click", () => this.#hold(this.#held === null));
  }

  /** Add the messages of a frame; a snapshot replaces them. */
  take(frame) {
    const isAll = frame.op === "snapshot";
    if (this.#held !== null) {
      if (isAll) this.#held = [];
      this.#held = [...this.#held, ...frame.topic.tail].slice(-SHOWN);
    } else {
      this.#add(frame.topic.tail, isAll);
    }
  }

  #add(messages, isAll) {
    if (isAll) {
      this.#newest = 0;
      this.#list.replaceChildren();
    }
    for (const message of messages) {
      if (message.number <= this.#newest) continue;
      this.#newest = message.number;
      this.#list.prepend(item(message));
    }
    while (this.#list.children.length > SHOWN) this.#list.lastChild.remove();
    show(byId("no-tail"), this.#list.children.length === 0);
  }

  #hold(isHeld) {
    const waiting = this.#held ?? [];
    this.#held = isHeld ? [] : null;
    this.#button.setAttribute("aria-pressed", String(isHeld));
    setText(this.#button, isHeld ? `Paused at ${clock(Date.now() / 1000)}: resume` : "Pause");
    this.#list.classList.toggle("held", isHeld);
    if (!isHeld) this.#add(waiting, false);
  }
}

function item(message) {
  const time = h("time", { datetime: new Date(message.at * 1000).toISOString(), title: date(message.at) });
  time.textContent = clock(message.at);
  const head = h("p", {}, time, h("b", {}, message.from), h("span", { class: "size" }, size(message.size)));
  for (const [label, title] of labels(message)) head.append(h("span", { class: "label", title }, label));
  return h("li", {}, head, message.body === undefined ? null : h("pre", {}, message.body + (message.is_cut ? " …" : "")));
}

function labels({ enc, wants_answer: asks, is_kept: isKept }) {
  return [
    enc === "json" ? ["JSON", "the body is a JSON value"] : null,
    enc === "b64" ? ["base64", "the body is bytes, written as base64"] : null,
    asks ? ["asks", "the sender expects answers"] : null,
    isKept ? ["large", "the body exceeds the NOTIFY limit and is not fetched for this page"] : null,
  ].filter(Boolean);
}
