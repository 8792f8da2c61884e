/** Windows: equal periods of time. The value of a window that no job has counted is unknown, not 0. */

// A running job without lag has counted all messages that are older than this.
const DELAY_SECONDS = 3;
// Show the value of a window after this many of its seconds are counted. A shorter window must be complete.
const MIN_SECONDS = 60;

/**
 * The windows of a frame, with their values.
 *
 * @template T
 * @param {{begin: number, now: number, window: number, since: number|null, until: number|null, is_counting: boolean, lag: number}} frame
 *   `since`: the start of the oldest counted window of any topic; `until`: the end of the newest one;
 *   `is_counting`: whether a job is running; `lag`: how many seconds it is behind
 * @param {Map<number, T>} values by the start of their window
 * @param {T} empty the value of a window without messages
 * @returns {{at: number, seconds: number, value: T|null}[]} oldest first; `seconds`: the part
 *   counted so far; `value` is null if it is unknown, or if the window has just begun
 */
export function windows(frame, values, empty) {
  const { begin, now, window, since, until, is_counting: isCounting } = frame;
  const result = [];
  for (let at = begin; at <= now; at += window) {
    const available = isCounting ? countedUntil(frame) - at : window;
    const seconds = Math.min(window, available);
    const isKnown = since !== null && at >= since && (isCounting || at < until);
    const value = values.get(at) ?? (isKnown ? empty : null);
    result.push({ at, seconds, value: seconds >= Math.min(window, MIN_SECONDS) ? value : null });
  }
  return result;
}

/** The number of counted seconds in the frame's range; at least one window. */
export function countedSeconds(frame) {
  const { begin, window, since, until, is_counting: isCounting } = frame;
  if (since === null) return window;
  return Math.max(window, (isCounting ? countedUntil(frame) : until) - Math.max(begin, since));
}

const countedUntil = ({ now, lag }) => now - DELAY_SECONDS - lag;
