/** Sparkline: a small line chart without axes, in SVG, with gaps for unknown values. */

import { svg } from "./dom.js";

export const BUCKET_SECONDS = 10;
const BUCKETS = 60;
const HEIGHT = 20;

/** Whether the whole period was observed; `from` and `to` are Unix times. */
export function wasObserved(state, from, to) {
  if (!state.since || from < state.since) return false;
  return !state.gaps.some(([begin, end]) => from < (end ?? Infinity) && to > begin);
}

/**
 * The message counts of the last 10 minutes in buckets of 10 s; null if a count is unknown.
 *
 * @param {Map<number, number>} buckets message counts by bucket; empty buckets are missing
 * @param {number} now Unix time
 * @param {{since: number|null, gaps: Array}} state
 * @returns {(number|null)[]}
 */
export function lastBuckets(buckets, now, state) {
  const newest = Math.floor(now / BUCKET_SECONDS) - 1;
  return Array.from({ length: BUCKETS }, (_, index) => {
    const bucket = newest - BUCKETS + 1 + index;
    const messages = buckets.get(bucket) ?? 0;
    // A partly observed bucket shows its count. If that is 0, the count is unknown.
    return messages || (wasObserved(state, bucket * BUCKET_SECONDS, (bucket + 1) * BUCKET_SECONDS) ? 0 : null);
  });
}

/** Create an empty sparkline. */
export const sparkline = () => svg("svg", { class: "spark", role: "img", preserveAspectRatio: "none" });

/**
 * Draw values into a sparkline.
 *
 * @param {SVGElement} element
 * @param {(number|null)[]} values
 * @param {string} label for screen readers
 */
export function drawSparkline(element, values, label) {
  const key = JSON.stringify(values);
  if (element.dataset.drawn === key) return;
  element.dataset.drawn = key;
  element.setAttribute("viewBox", `0 0 ${Math.max(1, values.length - 1)} ${HEIGHT}`);
  element.setAttribute("aria-label", label);
  const max = Math.max(1e-9, ...values);
  const lines = [[]];
  values.forEach((value, index) => {
    if (value === null) lines.push([]);
    else lines.at(-1).push(`${index},${(HEIGHT - 1.5 - (value / max) * (HEIGHT - 3)).toFixed(1)}`);
  });
  element.replaceChildren(
    ...lines.filter((line) => line.length).map((line) =>
      // A line with a single point is invisible, so draw a dot.
      svg("polyline", { points: (line.length === 1 ? [...line, ...line] : line).join(" "), class: line.length === 1 ? "dot" : null }),
    ),
  );
}
