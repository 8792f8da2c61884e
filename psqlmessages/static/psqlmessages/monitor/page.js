/** Page: common parts of the live pages: banner, connection status, server clock, topic URLs. */

import { byId, h, setText, show } from "./dom.js";
import { clock } from "./format.js";
import { gettext } from "./i18n.js";
import { connect } from "./live.js";

const PILLS = {
  live: gettext("live"),
  connecting: gettext("connecting"),
  starting: gettext("starting"),
  not_observing: gettext("not observing"),
  not_counting: gettext("the job is not running"),
  denied: gettext("closed"),
};
const TITLES = {
  not_observing: gettext("Not observing."),
  denied: gettext("This page is not live."),
};

/** The data attributes of the element #live. */
export const settings = byId("live").dataset;

let clockOffset = 0;
let hasData = false;

/** The server's time, as Unix time. */
export const now = () => Date.now() / 1000 + clockOffset;

/**
 * Start to receive frames, and show whether the data is live.
 *
 * @param {string|null} topic the topic to show; null for the list
 * @param {(frame: object) => void} onframe
 * @param {(options: object) => any} [open] by default opens the WebSocket
 * @param {object} [list] the filter, order and page of the list of topics
 * @returns {any} the result of open
 */
export function start(topic, onframe, open = connect, list = {}) {
  return open({
    path: settings.socket,
    topic,
    list,
    onframe(frame) {
      if (frame.now) clockOffset = frame.now - Date.now() / 1000;
      hasData = true;
      onframe(frame);
    },
    onliveness: showLiveness,
  });
}

/** The URL of a topic's page. */
export function topicUrl(name) {
  const parts = name.split("/");
  if (name.includes("\n") || parts.some((part) => ["", ".", ".."].includes(part))) {
    return `${settings.topicsUrl}?${new URLSearchParams({ name })}`;
  }
  return `${settings.topicsUrl}${parts.map(encodeURIComponent).join("/")}/`;
}

function showLiveness(liveness) {
  // The data is up to date, even if no job counts new messages.
  const isLive = ["live", "not_counting"].includes(liveness.is);
  const pill = byId("pill");
  pill.dataset.is = liveness.is;
  const hasStart = liveness.is === "live" && liveness.since;
  const text = PILLS[liveness.is] ?? gettext("not live");
  setText(pill, hasStart ? gettext("live since {time}", { time: clock(liveness.since) }) : text);
  document.documentElement.classList.toggle("stale", !isLive);
  byId("banner").dataset.is = liveness.is;
  showBanner(liveness, isLive);
}

function showBanner({ is, text, missingRole }, isLive) {
  // Connecting and starting are not errors.
  show(byId("banner"), !isLive && is !== "connecting" && is !== "starting");
  setText(byId("banner-title"), isLive ? "" : (TITLES[is] ?? gettext("Not live.")));
  const sentence = byId("banner-text");
  setText(sentence, missingRole ? describeRule(missingRole) : withWarning(is, text));
  if (is === "denied") sentence.append(" ", h("a", { href: settings.loginUrl }, gettext("Log in again")));
  show(byId("missing-rule"), Boolean(missingRole));
}

function withWarning(is, text) {
  const isOutdated = hasData && is !== "live" && is !== "not_observing";
  return isOutdated ? `${text} ${gettext("The numbers are out of date.")}` : text;
}

/** Insert the role into the form that adds the rule; return a sentence about the rule. */
function describeRule(role) {
  const fields = byId("missing-rule").querySelector("form")?.elements;
  if (fields) fields.role.value = role;
  return gettext("A rule is missing: role {role}, node {node}, type Topic, destination *, mode O (observe).", { role, node: settings.ruleIdent });
}
