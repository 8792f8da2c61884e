/** Chart: messages and bytes per second over the last 10 minutes, as panels. */

import { byId, setText } from "./dom.js";
import { clock, count, messagesText, rate, size } from "./format.js";
import { gettext } from "./i18n.js";
import { BYTES, draw, localTime } from "./panels.js";
import { wasObserved } from "./sparkline.js";

const SECONDS = 600;

/** The chart of one topic. */
export class Chart {
  #element = byId("chart");
  #seconds = new Map();
  #drawnAt = 0;

  /** Add the seconds of a frame; those of a snapshot replace all others. */
  update(frame) {
    if (frame.op === "snapshot") this.#seconds.clear();
    for (const [second, messages, bytes] of frame.topic?.seconds ?? []) {
      this.#seconds.set(second, { messages, bytes });
    }
  }

  /** Draw at most once per second, and only if the page is visible. */
  draw(now, state) {
    const second = Math.floor(now);
    if (second === this.#drawnAt || document.hidden) return;
    this.#drawnAt = second;
    for (const at of this.#seconds.keys()) if (at <= second - SECONDS) this.#seconds.delete(at);
    // Without the newest second, which is still incomplete.
    const times = Array.from({ length: SECONDS - 2 }, (_, index) => second - SECONDS + 1 + index);
    const points = times.map((at) => this.#seconds.get(at) ?? emptySecond(at, state));
    const line = (name, colour, describe) => ({
      name, colour,
      values: points.map((point) => point[name]),
      texts: points.map((point, index) => `${clock(times[index])}: ${describe(point[name])}`),
    });
    draw(this.#element, times, 1, [
      { title: gettext("messages/s"), minAxisMax: 5, isStep: true, lines: [line("messages", "accent", messagesText)] },
      { title: gettext("bytes/s"), minAxisMax: 100, isStep: true, axis: BYTES, lines: [line("bytes", "second", size)] },
    ], localTime, gettext("not observed"));
    showTotals(points);
  }
}

/** The values of a second without messages; unless it was fully observed, they are unknown. */
function emptySecond(at, state) {
  return wasObserved(state, at, at + 1) ? { messages: 0, bytes: 0 } : { messages: null, bytes: null };
}

function showTotals(points) {
  const known = points.filter(({ messages }) => messages !== null);
  const max = Math.max(0, ...known.map(({ messages }) => messages));
  const total = known.reduce((sum, { messages }) => sum + messages, 0);
  const totalBytes = known.reduce((sum, { bytes }) => sum + bytes, 0);
  const mean = total / Math.max(1, known.length);
  setText(
    byId("chart-note"),
    gettext("{messages}, {size}; mean {mean}/s, max {max} in a second", {
      messages: messagesText(total), size: size(totalBytes), mean: rate(mean), max: count(max),
    }),
  );
}
