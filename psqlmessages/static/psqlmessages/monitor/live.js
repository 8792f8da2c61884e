/**
 * Live: the monitor's WebSocket. It reconnects automatically, and reports whether the data is live.
 *
 * @typedef {{is: string, text: string, since: number|null, missingRole: string|null}} Liveness
 *   is: "live", or the reason why not: "connecting", "starting", "away" (PostgreSQL), "not_observing",
 *   "unchecked", "silent" (no frame for 5 s), "lost" (the socket), "denied" (it does not reconnect).
 */

const SILENT_MS = 5000;
const LEAST_WAIT_MS = 300;
const MOST_WAIT_MS = 5000;
const DENIED = {
  4401: "You are logged out.",
  4403: "You no longer have permission to see the monitor.",
};
const TEXTS = {
  connecting: "Connecting to the server.",
  starting: "The monitor is starting.",
  away: "PostgreSQL cannot be reached. The page updates again when the connection is back.",
  unchecked: "Your permission to see the monitor could not be checked.",
  silent: "The server has not sent anything for some seconds.",
  lost: "The connection to the server is lost. The page reconnects automatically.",
  live: "",
};
// Browsers use this code both for a broken connection and for a failed attempt to connect.
const NO_SOCKET = 1006;

/**
 * Open the monitor's socket.
 *
 * @param {object} options
 * @param {string} [options.path] of the WebSocket, by default /ws/monitor/
 * @param {string|null} [options.topic] the topic to show; null for the list
 * @param {(frame: object) => void} options.onframe called with a snapshot, or with an update of earlier frames
 * @param {(liveness: Liveness) => void} options.onliveness called at each change
 * @returns {{watch: (topic: string|null) => void, close: () => void}}
 */
export function connect({ path = "/ws/monitor/", topic = null, onframe, onliveness }) {
  let socket = null;
  let state = { is: "starting" };
  let heardAt = performance.now();
  let wait = LEAST_WAIT_MS;
  let retry = 0;
  let isOver = false;
  let denied = "";
  let isFirst = true;
  let hasHeard = false;
  let broken = "";
  let at = 0;
  let told = "";

  function liveness() {
    if (denied) return { is: "denied", text: denied };
    if (socket === null || socket.readyState !== WebSocket.OPEN) {
      return isFirst ? { is: "connecting" } : { is: "lost", text: broken };
    }
    // Reconnected, but without a frame yet: it may break again for the same reason.
    if (broken) return { is: "lost", text: broken };
    if (performance.now() - heardAt > SILENT_MS) return { is: "silent" };
    return state;
  }

  function tell() {
    const now = liveness();
    const whole = {
      is: now.is,
      text: now.text || now.why || TEXTS[now.is] || "",
      since: state.since ?? null,
      missingRole: now.missing_role ?? null,
    };
    const key = [whole.is, whole.text, whole.since, whole.missingRole].join("\n");
    if (key !== told) {
      told = key;
      onliveness(whole);
    }
  }

  function open() {
    clearTimeout(retry);
    if (isOver || denied) return;
    const address = new URL(path, location.href);
    address.protocol = address.protocol === "https:" ? "wss:" : "ws:";
    if (topic !== null) address.searchParams.set("topic", topic);
    const opened = (socket = new WebSocket(address));
    opened.onopen = () => (heardAt = performance.now());
    opened.onmessage = (event) => opened === socket && heard(JSON.parse(event.data));
    opened.onclose = (event) => opened === socket && closed(event);
    tell();
  }

  function heard(frame) {
    heardAt = performance.now();
    wait = LEAST_WAIT_MS;
    [hasHeard, broken] = [true, ""];
    if (frame.state) frame.state = state = frame.state.gaps ? frame.state : withheld(frame.state.is);
    at = frame.now ?? at;
    // Show the new data first, so that old data is never marked as live.
    onframe(frame);
    tell();
    if (socket.readyState === WebSocket.OPEN) socket.send(JSON.stringify({ op: "echo", n: frame.n }));
  }

  /** The frame has only the state: add a gap since the last complete frame. */
  function withheld(is) {
    const { since = null, gaps = [] } = state;
    return { is, since, gaps: gaps.at(-1)?.[1] === null ? gaps : [...gaps, [at, null]] };
  }

  function closed({ code, reason }) {
    socket = null;
    isFirst = false;
    denied = DENIED[code] ?? "";
    broken = why(code, reason);
    tell();
    // Random delay: after a restart of the server all pages reconnect.
    retry = setTimeout(open, wait * (0.5 + Math.random() / 2));
    wait = Math.min(MOST_WAIT_MS, wait * 2);
  }

  function why(code, reason) {
    if (reason) return `The server closed the connection: ${reason}. The page reconnects automatically.`;
    if (code !== NO_SOCKET || hasHeard) return TEXTS.lost;
    return `There is no WebSocket at ${path}, or the server is down: see docs/monitor.md. The page retries automatically.`;
  }

  function soon() {
    if (document.visibilityState !== "visible") return;
    if (socket === null) open();
    tell();
  }

  const watching = setInterval(tell, 500);
  document.addEventListener("visibilitychange", soon);
  addEventListener("online", soon);
  open();

  return {
    watch(name) {
      topic = name;
      if (socket?.readyState === WebSocket.OPEN) {
        socket.send(JSON.stringify({ op: "watch", topic }));
      }
    },
    close() {
      isOver = true;
      clearInterval(watching);
      clearTimeout(retry);
      document.removeEventListener("visibilitychange", soon);
      removeEventListener("online", soon);
      socket?.close(1000);
      socket = null;
    },
  };
}
