/**
 * Live: the monitor's WebSocket. It reconnects automatically, and reports whether the data is live.
 *
 * @typedef {{is: string, text: string, since: number|null, missingRole: string|null}} Liveness
 *   `is`: "live", or the reason why the data is not live: "connecting", "starting", "away" (the server
 *   has lost PostgreSQL), "not_observing" (a rule is missing), "unchecked" (the user's permission is
 *   unknown), "silent" (no frame for 5 s), "lost" (no WebSocket) or "denied" (the page does not reconnect);
 *   `text`: a sentence for the reader; `since`: the start of the present observation without a gap
 */

import { gettext } from "./i18n.js";

const DOCS_URL = "https://psqlmessages.readthedocs.io/en/stable/reference/monitor/";
const SILENT_MS = 5000;
const MIN_WAIT_MS = 300;
const MAX_WAIT_MS = 5000;
const DENIED = {
  4401: gettext("You are logged out."),
  4403: gettext("You no longer have permission to see the monitor."),
};
export const TEXTS = {
  connecting: gettext("Connecting to the server."),
  starting: gettext("The monitor is starting."),
  away: gettext("PostgreSQL cannot be reached. The page updates again when the connection is back."),
  unchecked: gettext("Your permission to see the monitor could not be checked."),
  silent: gettext("The server has not sent anything for some seconds."),
  lost: gettext("The connection to the server is lost. The page reconnects automatically."),
  live: "",
};
// Browsers use this code both for a lost connection and for a failed attempt to connect.
const ABNORMAL_CLOSURE = 1006;

/**
 * Open the monitor's socket.
 *
 * @param {object} options
 * @param {string} [options.path] of the WebSocket, by default /ws/monitor/
 * @param {string|null} [options.topic] the topic to show; null for the list
 * @param {{q?: string, sort?: string, page?: number}} [options.list] filter, order and page of the list
 * @param {(frame: object) => void} options.onframe called with a snapshot, then with updates of it
 * @param {(liveness: Liveness) => void} options.onliveness called at each change
 * @returns {{watch: (topic: string) => void, watchList: (list: object) => void, close: () => void}}
 */
export function connect({ path = "/ws/monitor/", topic = null, list = {}, onframe, onliveness }) {
  let socket = null;
  let state = { is: "starting" };
  let receivedAt = performance.now();
  let wait = MIN_WAIT_MS;
  let retryTimer = 0;
  let isStopped = false;
  let deniedText = "";
  let isFirst = true;
  let hasReceived = false;
  let lostText = "";
  let frameAt = 0;
  let reported = "";

  function liveness() {
    if (deniedText) return { is: "denied", text: deniedText };
    if (socket === null || socket.readyState !== WebSocket.OPEN) {
      return isFirst ? { is: "connecting" } : { is: "lost", text: lostText };
    }
    // Connected again, but without a frame yet: the connection may soon be lost again.
    if (lostText) return { is: "lost", text: lostText };
    if (performance.now() - receivedAt > SILENT_MS) return { is: "silent" };
    return state;
  }

  function report() {
    const { is, text, why, role_without_rule: missingRole = null } = liveness();
    const current = { is, text: text || why || TEXTS[is] || "", since: state.live_since ?? null, missingRole };
    const key = [current.is, current.text, current.since, current.missingRole].join("\n");
    if (key !== reported) {
      reported = key;
      onliveness(current);
    }
  }

  function open() {
    clearTimeout(retryTimer);
    if (isStopped || deniedText) return;
    const address = new URL(path, location.href);
    address.protocol = address.protocol === "https:" ? "wss:" : "ws:";
    if (topic !== null) address.searchParams.set("topic", topic);
    for (const [name, value] of Object.entries(list)) address.searchParams.set(name, value);
    const opened = (socket = new WebSocket(address));
    opened.onopen = () => (receivedAt = performance.now());
    opened.onmessage = (event) => opened === socket && onFrame(JSON.parse(event.data));
    opened.onclose = (event) => opened === socket && onClose(event);
    report();
  }

  function onFrame(frame) {
    receivedAt = performance.now();
    wait = MIN_WAIT_MS;
    hasReceived = true;
    lostText = "";
    if (frame.state) frame.state = state = frame.state.gaps ? frame.state : withGap(frame.state.is);
    frameAt = frame.now ?? frameAt;
    // Show the new data first, so that old data is never marked as live.
    onframe(frame);
    report();
    request({ op: "echo", n: frame.n });
  }

  /** The state after a frame without data: a gap begins at the last frame with data. */
  function withGap(is) {
    const { since = null, gaps = [] } = state;
    return { is, since, gaps: gaps.at(-1)?.[1] === null ? gaps : [...gaps, [frameAt, null]] };
  }

  function onClose({ code, reason }) {
    socket = null;
    isFirst = false;
    deniedText = DENIED[code] ?? "";
    lostText = closeText(code, reason);
    report();
    // A random delay, because all pages reconnect after a restart of the server.
    retryTimer = setTimeout(open, wait * (0.5 + Math.random() / 2));
    wait = Math.min(MAX_WAIT_MS, wait * 2);
  }

  function closeText(code, reason) {
    if (reason) {
      return gettext("The server closed the connection: {reason}. The page reconnects automatically.", { reason });
    }
    if (code !== ABNORMAL_CLOSURE || hasReceived) return TEXTS.lost;
    return gettext("There is no WebSocket at {path}, or the server is down: see {url}. The page retries automatically.", { path, url: DOCS_URL });
  }

  function request(content) {
    if (socket?.readyState === WebSocket.OPEN) socket.send(JSON.stringify(content));
  }

  function onVisible() {
    if (document.visibilityState !== "visible") return;
    if (socket === null) open();
    report();
  }

  const reportTimer = setInterval(report, 500);
  document.addEventListener("visibilitychange", onVisible);
  addEventListener("online", onVisible);
  open();

  return {
    watch(name) {
      topic = name;
      request({ op: "watch", topic });
    },
    watchList(wanted) {
      [topic, list] = [null, wanted];
      request({ op: "list", ...list });
    },
    close() {
      isStopped = true;
      clearInterval(reportTimer);
      clearTimeout(retryTimer);
      document.removeEventListener("visibilitychange", onVisible);
      removeEventListener("online", onVisible);
      socket?.close(1000);
      socket = null;
    },
  };
}
