/** Poll: requests data every two seconds. A replacement for live.js with the same callbacks. */

import { TEXTS as LIVE_TEXTS } from "./live.js";

const INTERVAL_MS = 2000;
const TIMEOUT_MS = 6000;
// A page that becomes visible again reports "silent" if its last answer is older than this.
const SILENT_MS = 8000;
const TEXTS = { ...LIVE_TEXTS, connecting: "", lost: "The server cannot be reached. The page retries automatically." };
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
    let isRequesting = false;
    let receivedAt = performance.now();
    let since = null;

    function report(is, text = TEXTS[is] ?? "") {
      if (is !== "live") since = null;
      onliveness({ is, text, since, missingRole: null });
    }

    async function request() {
      clearTimeout(timer);
      if (isRequesting || document.visibilityState !== "visible") return;
      isRequesting = true;
      let isDenied = false;
      try {
        isDenied = await fetchFrame();
      } finally {
        isRequesting = false;
        if (!isDenied) timer = setTimeout(request, INTERVAL_MS);
      }
    }

    /** Request a frame; return whether access is denied, which ends polling. */
    async function fetchFrame() {
      try {
        const options = { cache: "no-store", redirect: "error", signal: AbortSignal.timeout(TIMEOUT_MS) };
        const response = await fetch(path, options);
        if (DENIED[response.status]) {
          report("denied", DENIED[response.status]);
          return true;
        }
        if (!response.ok) {
          report(response.status === 503 ? "away" : "lost");
          return false;
        }
        const frame = await response.json();
        receivedAt = performance.now();
        since ??= frame.now;
        onframe(frame);
        report("live");
      } catch (error) {
        // A SyntaxError: a proxy may have answered with a page that is not JSON.
        if (![TypeError, DOMException, SyntaxError].some((kind) => error instanceof kind)) throw error;
        report("lost");
      }
      return false;
    }

    document.addEventListener("visibilitychange", () => {
      if (document.visibilityState !== "visible") return;
      if (performance.now() - receivedAt > SILENT_MS) report("silent");
      request();
    });
    addEventListener("online", request);
    report("connecting");
    request();
  };
}
