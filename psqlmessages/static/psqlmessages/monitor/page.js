/** Page: common parts of the live pages: banner, connection status, server clock, topic URLs. */

import { byId, h, setText, show } from "./dom.js";
import { clock } from "./format.js";
import { connect } from "./live.js";

const PILLS = {
  live: "live",
  connecting: "connecting",
  starting: "starting",
  not_observing: "not observing",
  denied: "closed",
};
const TITLES = {
  not_observing: "Not observing.",
  denied: "This page is not live.",
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
 * @returns {any} the result of open
 */
export function start(topic, onframe, open = connect) {
  byId("add-rule")?.addEventListener("submit", addRule);
  return open({
    path: settings.socket,
    topic,
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
  const isLive = liveness.is === "live";
  const pill = byId("pill");
  pill.dataset.is = liveness.is;
  const since = isLive && liveness.since ? ` since ${clock(liveness.since)}` : "";
  setText(pill, (PILLS[liveness.is] ?? "not live") + since);
  document.documentElement.classList.toggle("stale", !isLive);
  byId("banner").dataset.is = liveness.is;
  showBanner(liveness, isLive);
}

function showBanner({ is, text, missingRole }, isLive) {
  // Connecting and starting are not errors.
  show(byId("banner"), !isLive && is !== "connecting" && is !== "starting");
  setText(byId("banner-title"), isLive ? "" : (TITLES[is] ?? "Not live."));
  const sentence = byId("banner-text");
  setText(sentence, missingRole ? ruleText(missingRole) : withAge(is, text));
  if (is === "denied") sentence.append(" ", h("a", { href: settings.loginUrl }, "Log in again"));
  show(byId("missing-rule"), Boolean(missingRole));
}

function withAge(is, text) {
  const isOutdated = hasData && is !== "live" && is !== "not_observing";
  return isOutdated ? `${text} The numbers are out of date.` : text;
}

function ruleText(role) {
  return (
    `A rule is missing: role ${role}, ident ${settings.ruleIdent}, type Topic, destination *,` +
    " mode O (observe)."
  );
}

async function addRule(event) {
  event.preventDefault();
  const form = event.target;
  const button = form.querySelector("button");
  button.disabled = true;
  try {
    const response = await fetch(form.action, { method: "POST", body: new FormData(form) });
    const isJson = response.headers.get("Content-Type")?.startsWith("application/json");
    const error = isJson ? (await response.json()).error : `The server answered ${response.status}.`;
    setText(byId("add-rule-error"), error);
  } catch {
    setText(byId("add-rule-error"), "The server cannot be reached.");
  } finally {
    button.disabled = false;
  }
}
