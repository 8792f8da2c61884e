/** Events: system events as sentences, newest first. */

import { byId, h, show } from "./dom.js";
import { clock, date } from "./format.js";

const MAX_EVENTS = 60;
// The kind of an event, for its colour, and its sentence.
const SENTENCES = {
  connect: ["joins", "IDENT connected"],
  disconnect: ["leaves", "IDENT disconnected"],
  crash: ["fails", "IDENT crashed: its connection ended"],
  topic_notify: ["joins", "IDENT sends to TOPIC"],
  topic_unnotify: ["leaves", "IDENT stopped sending to TOPIC"],
  topic_none_notify: ["leaves", "TOPIC has no senders left"],
  topic_listen: ["joins", "IDENT listens to TOPIC"],
  topic_unlisten: ["leaves", "IDENT stopped listening to TOPIC"],
  topic_none_listen: ["leaves", "TOPIC has no listeners left"],
  connection_lost: ["fails", "the monitor lost PostgreSQL"],
  reconnected: ["joins", "the monitor reached PostgreSQL again"],
};

/** The list of events, optionally of one topic only. */
export class Events {
  #list = byId("events");
  #empty = byId("no-events");
  #newest = 0;
  #topic;

  constructor(topic = null) {
    this.#topic = topic;
  }

  /** Add the events of a frame; a snapshot replaces them. */
  update(frame) {
    if (frame.op === "snapshot") {
      this.#newest = 0;
      this.#list.replaceChildren();
    }
    for (const event of frame.events ?? []) {
      if (event.number <= this.#newest) continue;
      this.#newest = event.number;
      if (this.#topic === null || event.topic === this.#topic || !(event.topic || event.ident)) {
        this.#list.prepend(line(event));
      }
    }
    while (this.#list.children.length > MAX_EVENTS) this.#list.lastChild.remove();
    show(this.#empty, this.#list.children.length === 0);
  }
}

function line(event) {
  const [kind, sentence] = SENTENCES[event.event] ?? ["leaves", `${event.event} IDENT TOPIC`];
  const parts = sentence.split(/(IDENT|TOPIC)/).map((part) => {
    if (part === "IDENT") return h("b", {}, event.ident);
    return part === "TOPIC" ? h("b", {}, event.topic) : part;
  });
  const time = h("time", { datetime: new Date(event.at * 1000).toISOString(), title: date(event.at) });
  time.textContent = clock(event.at);
  return h("li", { "data-kind": kind }, time, h("span", {}, ...parts));
}
