/** Sparkline: messages of the last 10 minutes in steps of 10 s, as SVG polylines. */

import { svg } from "./dom.js";
import { count } from "./format.js";

export const BUCKET_SECONDS = 10;
const BUCKETS = 60;
const HEIGHT = 20;

/** Whether the whole period was observed; `from` and `to` are Unix times. */
export function wasObserved(state, from, to) {
  if (!state.since || from < state.since) return false;
  return !state.gaps.some(([begin, end]) => from < (end ?? Infinity) && to > begin);
}

/**
 * Draw a topic's sparkline.
 *
 * @param {SVGElement} element
 * @param {Map<number, number>} buckets messages by bucket; empty buckets are missing
 * @param {number} now Unix time
 * @param {{since: number|null, gaps: Array}} state periods without observation are not drawn as 0
 */
export function draw(element, buckets, now, state) {
  const newest = Math.floor(now / BUCKET_SECONDS) - 1;
  const most = Math.max(1, ...buckets.values());
  const lines = [[]];
  let total = 0;
  for (let place = 0; place < BUCKETS; place += 1) {
    const bucket = newest - BUCKETS + 1 + place;
    const messages = buckets.get(bucket) ?? 0;
    // A bucket without observation is a gap, not 0; a partly observed bucket shows its count.
    if (!messages && !wasObserved(state, bucket * BUCKET_SECONDS, (bucket + 1) * BUCKET_SECONDS)) {
      lines.push([]);
      continue;
    }
    total += messages;
    lines.at(-1).push(`${place},${(HEIGHT - 1.5 - (messages / most) * (HEIGHT - 3)).toFixed(1)}`);
  }
  const key = lines.map((line) => line.join(" ")).join("|");
  if (element.dataset.drawn === key) return;
  element.dataset.drawn = key;
  element.setAttribute("aria-label", `${count(total)} messages`);
  element.replaceChildren(
    ...lines.filter((line) => line.length > 1).map((line) => svg("polyline", { points: line.join(" ") })),
  );
}

/** Create an empty sparkline. */
export function sparkline() {
  return svg("svg", {
    class: "spark", role: "img", viewBox: `0 0 ${BUCKETS - 1} ${HEIGHT}`, preserveAspectRatio: "none",
  });
}
