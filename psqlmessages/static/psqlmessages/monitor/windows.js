/** Windows: equal steps of time. A window that no job counted is unknown, not 0. */

// A running job has counted messages that are older than this.
const DELAY_SECONDS = 3;
// An hour is shown once a minute of it has been counted, a shorter window when it is complete.
const LEAST_SECONDS = 60;

/**
 * The windows of a frame, with their values.
 *
 * @template T
 * @param {{begin: number, now: number, window: number, since: number|null, until: number|null, is_counting: boolean, lag: number}} frame
 *   `since`, `until`: start of the oldest window of any topic, and end of the newest;
 *   `is_counting`: a job is running, and is `lag` seconds behind
 * @param {Map<number, T>} found values by the start of their window
 * @param {T} none the value of a window without messages
 * @returns {{at: number, seconds: number, value: T|null}[]} oldest first; `seconds`: the part
 *   counted so far; `value` is null if it is unknown or the window has only just begun
 */
export function windows(frame, found, none) {
  const { begin, now, window, since, until, is_counting: isCounting } = frame;
  const known = [];
  for (let at = begin; at <= now; at += window) {
    const passed = isCounting ? counted(frame) - at : window;
    const seconds = Math.min(window, passed);
    const isKnown = since !== null && at >= since && (isCounting || at < until);
    const value = found.get(at) ?? (isKnown ? none : null);
    known.push({ at, seconds, value: seconds >= Math.min(window, LEAST_SECONDS) ? value : null });
  }
  return known;
}

/** The number of counted seconds in the frame's range; at least one window. */
export function countedSeconds(frame) {
  const { begin, window, since, until, is_counting: isCounting } = frame;
  if (since === null) return window;
  return Math.max(window, (isCounting ? counted(frame) : until) - Math.max(begin, since));
}

const counted = ({ now, lag }) => now - DELAY_SECONDS - lag;
