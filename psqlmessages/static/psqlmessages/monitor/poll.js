/** Poll: requests data every two seconds, and reports whether it is live, as live.js does. */

const EVERY_MS = 2000;
const PATIENCE_MS = 6000;
// Without an answer for this long, the server has lost its database or hangs.
const SILENT_MS = 8000;
const TEXTS = {
  lost: "The server cannot be reached. The page retries automatically.",
  away: "PostgreSQL cannot be reached. The page updates again when the connection is back.",
  silent: "The server has not sent anything for some seconds.",
};
const DENIED = {
  401: "You are logged out.",
  403: "You no longer have permission to see the monitor.",
};

/**
 * Request JSON from a URL while the page is visible.
 *
 * @param {string} path
 * @returns {(options: {onframe: (frame: object) => void, onliveness: (liveness: object) => void}) => void}
 */
export function polling(path) {
  return ({ onframe, onliveness }) => {
    let timer = 0;
    let isAsking = false;
    let heardAt = performance.now();
    let since = null;

    function tell(is, text = TEXTS[is] ?? "") {
      if (is !== "live") since = null;
      onliveness({ is, text, since, missingRole: null });
    }

    async function ask() {
      clearTimeout(timer);
      if (isAsking || document.visibilityState !== "visible") return;
      isAsking = true;
      let isOver = false;
      try {
        isOver = await answered();
      } finally {
        isAsking = false;
        if (!isOver) timer = setTimeout(ask, EVERY_MS);
      }
    }

    /** Return whether polling is over. */
    async function answered() {
      try {
        const options = { cache: "no-store", redirect: "error", signal: AbortSignal.timeout(PATIENCE_MS) };
        const response = await fetch(path, options);
        if (DENIED[response.status]) {
          tell("denied", DENIED[response.status]);
          return true;
        }
        if (!response.ok) {
          tell(response.status === 503 ? "away" : "lost");
          return false;
        }
        const frame = await response.json();
        heardAt = performance.now();
        since ??= frame.now;
        onframe(frame);
        tell("live");
      } catch (error) {
        // A proxy may answer in place of the server, with a page that is not JSON.
        const isLost = [TypeError, DOMException, SyntaxError].some((kind) => error instanceof kind);
        if (isLost) tell("lost");
        else throw error;
      }
      return false;
    }

    document.addEventListener("visibilitychange", () => {
      if (document.visibilityState !== "visible") return;
      if (performance.now() - heardAt > SILENT_MS) tell("silent");
      ask();
    });
    addEventListener("online", ask);
    tell("connecting");
    ask();
  };
}
