/**
 * Topic status: live senders and listeners of a topic, and its rules.
 *
 * To embed it, a page needs this module and `<section data-topic="NAME">`, whose content it replaces.
 * Optional attributes: `data-socket`, the path of the WebSocket, by default /ws/monitor/;
 * `data-rule-url`, the URL of the rule with id 0, from which it derives those of all rules.
 */

import { h, nameList, setText } from "./dom.js";
import { age, count, rate, size } from "./format.js";
import { gettext } from "./i18n.js";
import { connect } from "./live.js";

const COLUMNS = [
  {
    field: "senders", modes: ["W", "RW"], title: gettext("Senders"), now: gettext("Senders now"),
    none: gettext("No node sends now."), may: gettext("May send:"), nobody: gettext("No rule allows anyone to send."),
  },
  {
    field: "listeners", modes: ["R", "RW"], title: gettext("Listeners"), now: gettext("Listeners now"),
    none: gettext("No node listens now."), may: gettext("May listen:"), nobody: gettext("No rule allows anyone to listen."),
  },
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
    const { senders, listeners, rules, sender_count: n, listener_count: l } = this.#topic;
    const key = JSON.stringify([senders, listeners, rules, n, l]);
    if (key === this.#drawn) return;
    this.#drawn = key;
    this.#element.replaceChildren(
      h("div", { class: "status" }, ...COLUMNS.map((column) => this.#column(column))),
      ...this.#notes(),
    );
  }

  #column({ field, modes, title, now, none, may, nobody }) {
    const names = this.#topic[field];
    const rules = (this.#topic.rules ?? []).filter((rule) => modes.includes(rule.mode));
    const number = this.#topic[`${field.slice(0, -1)}_count`];
    const heading = h("h3", {}, title, " ", h("span", { class: "count" }, count(number)));
    const list = h("ul", { class: "present", "aria-label": now });
    list.append(...names.map((name) => h("li", {}, h("span", { class: "dot" }), h("bdi", {}, name))));
    if (number > names.length) list.append(h("li", {}, gettext("and {number} more", { number: count(number - names.length) })));
    return h(
      "div", { "data-kind": field },
      heading,
      number ? list : h("p", { class: "nobody" }, none),
      this.#topic.rules === null ? null : this.#rules(rules, names, may, nobody),
    );
  }

  #rules(rules, names, may, nobody) {
    if (rules.length === 0) return h("p", { class: "allowed" }, nobody);
    const list = h("ul", { class: "rules" }, ...rules.map((rule) => this.#rule(rule, names)));
    return h("div", { class: "allowed" }, h("p", {}, may), list);
  }

  #rule(rule, names) {
    const connected = names.filter((name) => matches(name, rule.ident)).length;
    const text = h("bdi", {}, rule.ident);
    const name = this.#ruleUrl ? h("a", { href: this.#ruleUrl.replace(/\b0\b/, rule.id) }, text) : h("span", {}, text);
    const { role, dest } = rule;
    return h(
      "li", { class: connected ? "connected" : null },
      name,
      h("span", { class: "state" }, stateText(connected, rule)),
      h("span", { class: "role" }, dest === this.#topic.name ? gettext("as role {role}", { role }) : gettext("as role {role}, rule for {dest}", { role, dest })),
    );
  }

  #notes() {
    const { rules, has_more_rules: hasMore, is_there: exists } = this.#topic;
    const observers = (rules ?? []).filter((rule) => rule.mode === "O").map((rule) => rule.ident);
    const [before, after = ""] = gettext("May observe, without counting as a listener: {nodes}.").split("{nodes}");
    return [
      observers.length ? [before, ...nameList(observers), after] : null,
      rules === null ? gettext("Loading the rules.") : null,
      hasMore ? gettext("There are more rules than shown.") : null,
      exists ? null : gettext("No topic has this name yet."),
    ].filter(Boolean).map((note) => h("p", { class: "aside" }, ...[note].flat()));
  }
}

function matches(name, pattern) {
  return pattern.endsWith("*") ? name.startsWith(pattern.slice(0, -1)) : name === pattern;
}

function stateText(connected, rule) {
  if (!connected) return gettext("not connected");
  return rule.ident.endsWith("*") ? gettext("{number} connected", { number: count(connected) }) : gettext("connected");
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
    const last = topic.last ? age(Date.now() / 1000 + clockOffset - topic.last) : gettext("none since the monitor started");
    setText(rateText, gettext("{rate} messages/s, {size}/s; last message: {last}", { rate: rate(topic.rate), size: size(topic.size_rate), last }));
  };
  connect({
    path: section.dataset.socket,
    topic: section.dataset.topic,
    onframe(frame) {
      if (frame.now) clockOffset = frame.now - Date.now() / 1000;
      if (frame.state) isLive = frame.state.is === "live";
      if (!frame.topic) return;
      status.update(frame.topic, isLive);
      // Without PostgreSQL no message arrives, so that the rate would fall.
      if (!isLive) return;
      if (topic === null) section.replaceChildren(live, rateText, content);
      topic = frame.topic;
      showRate();
    },
    onliveness({ is, text }) {
      live.dataset.is = is;
      section.classList.toggle("stale", is !== "live");
      setText(live, is === "live" ? gettext("live") : `${gettext("Not live.")} ${text}`);
      if (topic === null && is === "denied") section.append(live);
    },
  });
  setInterval(() => section.classList.contains("stale") || showRate(), 1000);
}

for (const section of document.querySelectorAll("section[data-topic]")) embedStatus(section);
