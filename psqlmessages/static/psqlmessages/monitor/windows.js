/** Windows: equal steps of time; where nobody counted, nothing is known, and that is no 0. */

// What was published so long ago has been counted, where a job counts.
const DELAY_SECONDS = 3;
// Of an hour the beginning says something; of shorter windows only the whole.
const LEAST_SECONDS = 60;

/**
 * The windows that a frame is about, with what is known of each.
 *
 * @template T
 * @param {{begin: number, now: number, window: number, since: number|null, until: number|null, is_counting: boolean, lag: number}} frame
 *   `since`, `until`: where the oldest window of any topic begins, and the newest ends;
 *   `is_counting`: a job counts now, and is `lag` seconds behind
 * @param {Map<number, T>} found by the beginning of the window
 * @param {T} none what stands for a window in which nothing was published
 * @returns {{at: number, seconds: number, value: T|null}[]} oldest first; `seconds`: how much of it
 *   has passed; null where it is not known, or has hardly begun
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

/** How many seconds of the frame's time were counted; at least one window's. */
export function countedSeconds(frame) {
  const { begin, window, since, until, is_counting: isCounting } = frame;
  if (since === null) return window;
  return Math.max(window, (isCounting ? counted(frame) : until) - Math.max(begin, since));
}

const counted = ({ now, lag }) => now - DELAY_SECONDS - lag;
