/**
 * Topic status: live senders and listeners of a topic, and its rules.
 *
 * A page that includes this module needs only `<section data-topic="NAME">`. Optional attributes:
 * `data-socket`, the path of the WebSocket, by default /ws/monitor/; `data-rule-url`, the page of
 * rule 0. Live data replaces the content of the section.
 */

import { h, setText } from "./dom.js";
import { age, count, rate, size } from "./format.js";
import { connect } from "./live.js";

const KINDS = [
  ["notifiers", "notifier_count", "Notifiers", "send", ["W", "RW"]],
  ["listeners", "listener_count", "Listeners", "listen", ["R", "RW"]],
];

/** The status of one topic, drawn into an element. */
export class TopicStatus {
  #element;
  #ruleUrl;
  #known = {};
  #drawn = "";

  /**
   * @param {HTMLElement} element
   * @param {string} [ruleUrl] the page of rule 0; without it rules are not links
   */
  constructor(element, ruleUrl = "") {
    this.#element = element;
    this.#ruleUrl = ruleUrl;
  }

  /** Update from a frame's topic; draw it once the monitor is live. */
  take(topic, isLive) {
    Object.assign(this.#known, topic);
    if (!isLive && !this.#drawn) return;
    const { notifiers, listeners, rules, notifier_count: n, listener_count: l } = this.#known;
    const shown = JSON.stringify([notifiers, listeners, rules, n, l]);
    if (shown === this.#drawn) return;
    this.#drawn = shown;
    this.#element.replaceChildren(
      h("div", { class: "status" }, ...KINDS.map((kind) => this.#column(...kind))),
      ...this.#notes(),
    );
  }

  #column(field, counted, title, verb, modes) {
    const present = this.#known[field];
    const rules = (this.#known.rules ?? []).filter((rule) => modes.includes(rule.mode));
    const number = this.#known[counted];
    const heading = h("h3", {}, title, " ", h("span", { class: "count" }, count(number)));
    const now = h("ul", { class: "present", "aria-label": `${title} now` });
    now.append(...present.map((ident) => h("li", {}, h("span", { class: "dot" }), ident)));
    if (number > present.length) now.append(h("li", {}, `and ${count(number - present.length)} more`));
    return h(
      "div", { "data-kind": field },
      heading,
      number ? now : h("p", { class: "nobody" }, `No node ${verb === "send" ? "sends" : "listens"} now.`),
      this.#known.rules === null ? null : this.#authorized(rules, present, verb),
    );
  }

  #authorized(rules, present, verb) {
    if (rules.length === 0) return h("p", { class: "may" }, `No rule allows anyone to ${verb}.`);
    const list = h("ul", { class: "rules" }, ...rules.map((rule) => this.#rule(rule, present)));
    return h("div", { class: "may" }, h("p", {}, `May ${verb}:`), list);
  }

  #rule(rule, present) {
    const { length } = present.filter((ident) => isMeant(ident, rule.ident));
    const isPattern = rule.ident.endsWith("*");
    const state = length ? (isPattern ? `${count(length)} connected` : "connected") : "not connected";
    const name = this.#ruleUrl
      ? h("a", { href: this.#ruleUrl.replace(/\b0\b/, rule.id) }, rule.ident)
      : h("span", {}, rule.ident);
    const dest = rule.dest === this.#known.name ? "" : `, by ${rule.dest}`;
    return h(
      "li", { class: length ? "here" : "away" },
      name,
      h("span", { class: "is" }, state),
      h("span", { class: "role" }, `as role ${rule.role}${dest}`),
    );
  }

  #notes() {
    const notes = [];
    const observing = (this.#known.rules ?? []).filter((rule) => rule.mode === "O");
    if (observing.length) {
      const idents = observing.map((rule) => rule.ident).join(", ");
      notes.push(h("p", { class: "aside" }, `May observe, without counting as a listener: ${idents}.`));
    }
    if (this.#known.rules === null) notes.push(h("p", { class: "aside" }, "Loading the rules."));
    if (this.#known.has_more_rules) notes.push(h("p", { class: "aside" }, "There are more rules than shown."));
    if (!this.#known.is_there) notes.push(h("p", { class: "aside" }, "No topic has this name yet."));
    return notes;
  }
}

function isMeant(ident, pattern) {
  return pattern.endsWith("*") ? ident.startsWith(pattern.slice(0, -1)) : ident === pattern;
}

/** Keep a section current, on a page without another socket. */
function embed(section) {
  const [live, figures, box] = [h("p", { class: "is-live", role: "status" }), h("p", { class: "now" }), h("div")];
  const status = new TopicStatus(box, section.dataset.ruleUrl);
  let topic = null;
  let ahead = 0;
  let isLive = false;
  const tell = () => {
    if (!topic) return;
    const last = topic.last ? age(Date.now() / 1000 + ahead - topic.last) : "none since the monitor started";
    setText(figures, `${rate(topic.rate)} messages/s, ${size(topic.size_rate)}/s; last message: ${last}`);
  };
  connect({
    path: section.dataset.socket,
    topic: section.dataset.topic,
    onframe(frame) {
      if (frame.now) ahead = frame.now - Date.now() / 1000;
      if (frame.state) isLive = frame.state.is === "live";
      if (!frame.topic) return;
      status.take(frame.topic, isLive);
      if (topic === null && !isLive) return;
      if (topic === null) section.replaceChildren(live, figures, box);
      topic = frame.topic;
      tell();
    },
    onliveness({ is, text }) {
      live.dataset.is = is;
      section.classList.toggle("stale", is !== "live");
      setText(live, is === "live" ? "live" : `Not live. ${text}`);
      if (topic === null && is === "denied") section.append(live);
    },
  });
  setInterval(() => section.classList.contains("stale") || tell(), 1000);
}

for (const section of document.querySelectorAll("section[data-topic]")) embed(section);
