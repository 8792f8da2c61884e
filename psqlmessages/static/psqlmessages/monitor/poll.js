/** Poll: requests data every two seconds, for pages without a WebSocket. Calls the callbacks of live.js. */

import { gettext } from "./i18n.js";
import { TEXTS as LIVE_TEXTS } from "./live.js";

const INTERVAL_MS = 2000;
const TIMEOUT_MS = 6000;
// A page that becomes visible again reports "silent" if its last answer is older than this.
const SILENT_MS = 8000;
const TEXTS = { ...LIVE_TEXTS, connecting: "", lost: gettext("The server cannot be reached. The page retries automatically.") };
const DENIED = {
  401: gettext("You are logged out."),
  403: gettext("You no longer have permission to see the monitor."),
};

/**
 * Request data from URLs while the page is visible.
 *
 * @param {string|(() => string[])} source one URL, or a function that returns the present URLs
 * @param {(responses: Response[]) => Promise<object>} [read] reads a frame from the answers
 * @param {(frame: object) => string} [stateOf] the state of the page after a frame
 * @returns {(options: {onframe: (frame: object) => void, onliveness: (liveness: object) => void}) => () => void}
 *   starts to poll, and returns a function that requests the data immediately
 */
export function polling(source, read = ([response]) => response.json(), stateOf = () => "live") {
  const urls = typeof source === "string" ? () => [source] : source;
  return ({ onframe, onliveness }) => {
    let timer = 0;
    let isRequesting = false;
    let receivedAt = performance.now();
    let since = null;

    function report(is, text = TEXTS[is] ?? "") {
      if (is !== "live" && is !== "not_counting") since = null;
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
        const requested = urls();
        const responses = await Promise.all(requested.map((url) => fetch(url, options)));
        const failed = responses.find((response) => !response.ok);
        if (DENIED[failed?.status]) {
          report("denied", DENIED[failed.status]);
          return true;
        }
        if (failed) {
          report(failed.status === 503 ? "away" : "lost");
          return false;
        }
        const frame = await read(responses);
        // The reader has filtered or sorted meanwhile, so this frame is outdated.
        if (requested.join("\n") !== urls().join("\n")) return await fetchFrame();
        receivedAt = performance.now();
        since ??= frame.now;
        onframe(frame);
        report(stateOf(frame));
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
    return request;
  };
}
