/**
 * Live: the monitor's WebSocket. It returns by itself, and says whether what it brought is live.
 *
 * @typedef {{is: string, text: string, since: number|null, missingRole: string|null}} Liveness
 *   is: "live", or why not: "connecting", "starting", "away" (PostgreSQL), "not_observing",
 *   "unchecked", "silent" (nothing came for 5 s), "lost" (the socket), "denied" (it will not return).
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
// Of a connection that broke, and of one that never was: browsers tell no more of it.
const NO_SOCKET = 1006;

/**
 * Open the monitor's socket.
 *
 * @param {object} options
 * @param {string} [options.path] of the WebSocket, /ws/monitor/ unless given
 * @param {string|null} [options.topic] the one to show; null for the list
 * @param {(frame: object) => void} options.onframe a snapshot, or an update of what came before
 * @param {(liveness: Liveness) => void} options.onliveness told at each change
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
    // Open again, but without a frame yet: it may break at once, for the same reason.
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
    // First what is new, so that nothing old is ever called live.
    onframe(frame);
    tell();
    if (socket.readyState === WebSocket.OPEN) socket.send(JSON.stringify({ op: "echo", n: frame.n }));
  }

  /** Only the state is told: nothing is known of the time since the last whole frame. */
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
    // Not all at the same moment: a server that returns meets every page at once.
    retry = setTimeout(open, wait * (0.5 + Math.random() / 2));
    wait = Math.min(MOST_WAIT_MS, wait * 2);
  }

  function why(code, reason) {
    if (reason) return `The server closed the connection: ${reason}. The page reconnects automatically.`;
    if (code !== NO_SOCKET || hasHeard) return TEXTS.lost;
    return `There is no WebSocket at ${path}, or the server is gone: see docs/monitor.md. The page keeps trying.`;
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
