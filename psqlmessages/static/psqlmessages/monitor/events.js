/** Events: system events as sentences, newest first. */

import { byId, h, show } from "./dom.js";
import { clock, count, date } from "./format.js";
import { gettext, ngettext } from "./i18n.js";

const MAX_EVENTS = 60;
const RESTARTED = "restarted";
// For each event: its kind, which sets the colour, and its sentence.
const SENTENCES = {
  connect: ["joins", gettext("NODE connected")],
  disconnect: ["leaves", gettext("NODE disconnected")],
  crash: ["fails", gettext("NODE crashed: its connection ended")],
  topic_notify: ["joins", gettext("NODE sends to TOPIC")],
  topic_unnotify: ["leaves", gettext("NODE stopped sending to TOPIC")],
  topic_none_notify: ["leaves", gettext("TOPIC has no senders left")],
  topic_listen: ["joins", gettext("NODE listens to TOPIC")],
  topic_unlisten: ["leaves", gettext("NODE stopped listening to TOPIC")],
  topic_none_listen: ["leaves", gettext("TOPIC has no listeners left")],
  connection_lost: ["fails", gettext("the monitor lost PostgreSQL")],
  reconnected: ["joins", gettext("the monitor reached PostgreSQL again")],
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

  /** Add the events of a frame; those of a snapshot replace the list. */
  update(frame) {
    if (frame.op === "snapshot") {
      this.#newest = 0;
      this.#list.replaceChildren();
    }
    for (const event of frame.events ?? []) {
      if (event.number <= this.#newest) continue;
      this.#newest = event.number;
      if (event.event === RESTARTED) this.#removeCrashes(event.at);
      if (this.#topic === null || event.topic === this.#topic || !(event.topic || event.ident)) {
        this.#list.prepend(line(event));
      }
    }
    while (this.#list.children.length > MAX_EVENTS) this.#list.lastChild.remove();
    show(this.#empty, this.#list.children.length === 0);
  }

  /** Remove the crashes since this restart of PostgreSQL, and the earlier line about the restart. */
  #removeCrashes(at) {
    for (const item of [...this.#list.children]) {
      if (["crash", RESTARTED].includes(item.dataset.event) && Number(item.dataset.at) >= at) item.remove();
    }
  }
}

const restartText = ({ nodes: number }) => ngettext(
  "PostgreSQL was restarted: {number} node lost its connection",
  "PostgreSQL was restarted: {number} nodes lost their connections", number, { number: count(number) });

function line(event) {
  const [kind, sentence] = event.event === RESTARTED ? ["fails", restartText(event)] : SENTENCES[event.event] ?? ["leaves", `${event.event} NODE TOPIC`];
  const parts = sentence.split(/(NODE|TOPIC)/).map((part) => {
    if (part === "NODE") return h("b", {}, h("bdi", {}, event.ident));
    return part === "TOPIC" ? h("b", {}, h("bdi", {}, event.topic)) : part;
  });
  const time = h("time", { datetime: new Date(event.at * 1000).toISOString(), title: date(event.at) }, clock(event.at));
  return h("li", { "data-kind": kind, "data-event": event.event, "data-at": event.at }, time, h("span", {}, ...parts));
}
