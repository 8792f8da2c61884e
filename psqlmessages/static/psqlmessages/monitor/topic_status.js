/**
 * Topic status: live senders and listeners of a topic, and its rules.
 *
 * To embed it, a page needs this module and `<section data-topic="NAME">`, whose content it replaces.
 * Optional attributes: `data-socket`, the path of the WebSocket, by default /ws/monitor/;
 * `data-rule-url`, the URL of the rule with id 0, from which it derives those of all rules.
 */

import { h, setText } from "./dom.js";
import { age, count, rate, size } from "./format.js";
import { connect } from "./live.js";

const COLUMNS = [
  ["notifiers", "notifier_count", "Senders", "send", ["W", "RW"]],
  ["listeners", "listener_count", "Listeners", "listen", ["R", "RW"]],
];

/** The status of one topic, drawn into an element. */
export class TopicStatus {
  #element;
  #ruleUrl;
  #topic = {};
  #drawn = "";

  /**
   * @param {HTMLElement} element
   * @param {string} [ruleUrl] the URL of the rule with id 0; without it, rules are not links
   */
  constructor(element, ruleUrl = "") {
    this.#element = element;
    this.#ruleUrl = ruleUrl;
  }

  /** Show the topic of a frame; before the monitor is live for the first time, only store it. */
  update(topic, isLive) {
    Object.assign(this.#topic, topic);
    if (!isLive && !this.#drawn) return;
    const { notifiers, listeners, rules, notifier_count: n, listener_count: l } = this.#topic;
    const key = JSON.stringify([notifiers, listeners, rules, n, l]);
    if (key === this.#drawn) return;
    this.#drawn = key;
    this.#element.replaceChildren(
      h("div", { class: "status" }, ...COLUMNS.map((kind) => this.#column(...kind))),
      ...this.#notes(),
    );
  }

  #column(field, countField, title, verb, modes) {
    const idents = this.#topic[field];
    const rules = (this.#topic.rules ?? []).filter((rule) => modes.includes(rule.mode));
    const number = this.#topic[countField];
    const heading = h("h3", {}, title, " ", h("span", { class: "count" }, count(number)));
    const list = h("ul", { class: "present", "aria-label": `${title} now` });
    list.append(...idents.map((ident) => h("li", {}, h("span", { class: "dot" }), ident)));
    if (number > idents.length) list.append(h("li", {}, `and ${count(number - idents.length)} more`));
    return h(
      "div", { "data-kind": field },
      heading,
      number ? list : h("p", { class: "nobody" }, `No node ${verb === "send" ? "sends" : "listens"} now.`),
      this.#topic.rules === null ? null : this.#rules(rules, idents, verb),
    );
  }

  #rules(rules, idents, verb) {
    if (rules.length === 0) return h("p", { class: "allowed" }, `No rule allows anyone to ${verb}.`);
    const list = h("ul", { class: "rules" }, ...rules.map((rule) => this.#rule(rule, idents)));
    return h("div", { class: "allowed" }, h("p", {}, `May ${verb}:`), list);
  }

  #rule(rule, idents) {
    const connected = idents.filter((ident) => matches(ident, rule.ident)).length;
    const number = rule.ident.endsWith("*") ? `${count(connected)} ` : "";
    const state = connected ? `${number}connected` : "not connected";
    const name = this.#ruleUrl
      ? h("a", { href: this.#ruleUrl.replace(/\b0\b/, rule.id) }, rule.ident)
      : h("span", {}, rule.ident);
    const dest = rule.dest === this.#topic.name ? "" : `, rule for ${rule.dest}`;
    return h(
      "li", { class: connected ? "connected" : null },
      name,
      h("span", { class: "state" }, state),
      h("span", { class: "role" }, `as role ${rule.role}${dest}`),
    );
  }

  #notes() {
    const { rules, has_more_rules: hasMore, is_there: exists } = this.#topic;
    const observers = (rules ?? []).filter((rule) => rule.mode === "O").map((rule) => rule.ident);
    return [
      observers.length ? `May observe, without counting as a listener: ${observers.join(", ")}.` : null,
      rules === null ? "Loading the rules." : null,
      hasMore ? "There are more rules than shown." : null,
      exists ? null : "No topic has this name yet.",
    ].filter(Boolean).map((text) => h("p", { class: "aside" }, text));
  }
}

function matches(ident, pattern) {
  return pattern.endsWith("*") ? ident.startsWith(pattern.slice(0, -1)) : ident === pattern;
}

/** Show the live status in a section of a page that has no other WebSocket of the monitor. */
function embedStatus(section) {
  const [live, rateText, content] = [h("p", { class: "is-live", role: "status" }), h("p", { class: "now" }), h("div")];
  const status = new TopicStatus(content, section.dataset.ruleUrl);
  let topic = null;
  let clockOffset = 0;
  let isLive = false;
  const showRate = () => {
    if (!topic) return;
    const last = topic.last ? age(Date.now() / 1000 + clockOffset - topic.last) : "none since the monitor started";
    setText(rateText, `${rate(topic.rate)} messages/s, ${size(topic.size_rate)}/s; last message: ${last}`);
  };
  connect({
    path: section.dataset.socket,
    topic: section.dataset.topic,
    onframe(frame) {
      if (frame.now) clockOffset = frame.now - Date.now() / 1000;
      if (frame.state) isLive = frame.state.is === "live";
      if (!frame.topic) return;
      status.update(frame.topic, isLive);
      if (topic === null && !isLive) return;
      if (topic === null) section.replaceChildren(live, rateText, content);
      topic = frame.topic;
      showRate();
    },
    onliveness({ is, text }) {
      live.dataset.is = is;
      section.classList.toggle("stale", is !== "live");
      setText(live, is === "live" ? "live" : `Not live. ${text}`);
      if (topic === null && is === "denied") section.append(live);
    },
  });
  setInterval(() => section.classList.contains("stale") || showRate(), 1000);
}

for (const section of document.querySelectorAll("section[data-topic]")) embedStatus(section);
