/** Chart: messages and bytes per second over the last 10 minutes, drawn by plotly. */

import { byId, setText } from "./dom.js";
import { clock, count, rate, size } from "./format.js";
import { axisStyle, CONFIG, isNarrow, layoutStyle, onRedrawNeeded, readColours, spans } from "./panels.js";
import { wasObserved } from "./sparkline.js";

const SECONDS = 600;
const TICKS = [-600, -480, -360, -240, -120, 0];

/** The chart of one topic. */
export class Chart {
  #element = byId("chart");
  #seconds = new Map();
  #isDrawn = false;
  #drawnAt = 0;

  constructor() {
    onRedrawNeeded(() => (this.#drawnAt = 0));
  }

  /** Add the seconds of a frame; a snapshot replaces them. */
  update(frame) {
    if (frame.op === "snapshot") this.#seconds.clear();
    for (const [second, messages, bytes] of frame.topic?.seconds ?? []) {
      this.#seconds.set(second, [messages, bytes]);
    }
  }

  /** Draw at most once per second, and only if the page is visible. */
  draw(now, state) {
    const second = Math.floor(now);
    if (second === this.#drawnAt || !window.Plotly || document.hidden) return;
    this.#drawnAt = second;
    for (const at of this.#seconds.keys()) if (at <= second - SECONDS) this.#seconds.delete(at);
    const points = this.#points(second, state);
    if (!this.#isDrawn) this.#element.replaceChildren();
    this.#isDrawn = true;
    const layout = { ...this.#layout(points), ...this.#gaps(points) };
    window.Plotly.react(this.#element, this.#traces(points), layout, CONFIG);
    showTotals(points);
  }

  #points(second, state) {
    const points = { x: [], messages: [], bytes: [], at: [] };
    // The newest second is still incomplete.
    for (let back = SECONDS - 1; back >= 2; back -= 1) {
      const at = second - back;
      // A second without observation is a gap, not 0; a partly observed second shows its count.
      const silent = wasObserved(state, at, at + 1) ? [0, 0] : [null, null];
      const known = this.#seconds.get(at) ?? silent;
      points.x.push(-back);
      points.messages.push(known[0]);
      points.bytes.push(known[1]);
      points.at.push(clock(at));
    }
    return points;
  }

  /** Draw one area per observed period: plotly would fill the gaps of a single area. */
  #traces(points) {
    return spans(points.messages, (known) => known !== null).flatMap(([from, to]) => {
      const part = (values) => values.slice(from, to);
      return this.#areas({
        x: [...part(points.x), points.x[to - 1] + 1], at: part(points.at),
        messages: repeatLast(part(points.messages)), bytes: repeatLast(part(points.bytes)),
      });
    });
  }

  #areas({ x, messages, bytes, at }) {
    const { accent, second } = readColours(this.#element);
    const trace = { x, customdata: [...at, at.at(-1)], mode: "lines", fill: "tozeroy" };
    return [
      {
        ...trace, y: messages, name: "messages", line: { color: accent, width: 1.5, shape: "hv" },
        fillcolor: faint(accent), hovertemplate: "%{customdata}: %{y:,} messages<extra></extra>",
      },
      {
        ...trace, y: bytes, name: "bytes", yaxis: "y2", line: { color: second, width: 1.5, shape: "hv" },
        fillcolor: faint(second), hovertemplate: "%{customdata}: %{y:.3s}B<extra></extra>",
      },
    ];
  }

  #layout({ messages, bytes }) {
    const colours = readColours(this.#element);
    const axis = axisStyle(colours);
    const title = (text) => ({ text: isNarrow() ? "" : text, font: { size: 12 }, standoff: 8 });
    return {
      ...layoutStyle(colours),
      height: isNarrow() ? 240 : 320,
      margin: { l: isNarrow() ? 40 : 64, r: 24, t: 8, b: 32 },
      xaxis: {
        ...axis, range: [-SECONDS, 0], ticks: "outside", ticklen: 6, tickcolor: colours.line, tickvals: TICKS, anchor: "y2",
        ticktext: TICKS.map((back) => (back ? `${-back / 60} min ago` : "now")),
        ...(isNarrow() ? { tickvals: [-600, -300, 0], ticktext: ["10 min", "5 min", "now"] } : {}),
      },
      yaxis: { ...axis, domain: [0.46, 1], title: title("messages/s"), range: [0, axisMax(messages, 5)] },
      yaxis2: { ...axis, domain: [0, 0.36], title: title("bytes/s"), range: [0, axisMax(bytes, 100)], tickformat: "~s" },
    };
  }

  /** Shade the periods without observation, with a label if there is space. */
  #gaps({ x, messages }) {
    const { muted } = readColours(this.#element);
    const gaps = spans(messages, (known) => known === null).map(([from, to]) => [x[from], x[to - 1] + 1]);
    const place = (axis) => ({ yref: `${axis} domain`, y0: 0, y1: 1 });
    return {
      shapes: gaps.flatMap(([x0, x1]) =>
        ["y", "y2"].map((axis) => ({
          type: "rect", x0, x1, ...place(axis), line: { width: 0 }, fillcolor: `${muted}12`, layer: "below",
        })),
      ),
      annotations: gaps.filter(([x0, x1]) => x1 - x0 > 90).map(([x0, x1]) => ({
        x: (x0 + x1) / 2, yref: "y domain", y: 0.5, text: "not observed", showarrow: false, font: { color: muted },
      })),
    };
  }
}

/** Repeat the last value, so that the last second is as wide as the others. */
const repeatLast = (values) => [...values, values.at(-1)];

const axisMax = (values, minMax) => Math.max(minMax, ...values) * 1.1;

/** A colour of the form #rrggbb, nearly transparent. */
const faint = (colour) => `${colour}26`;

function showTotals({ messages, bytes }) {
  const max = Math.max(0, ...messages);
  const total = messages.reduce((sum, each) => sum + each, 0);
  const mean = total / Math.max(1, messages.filter((each) => each !== null).length);
  const totalBytes = bytes.reduce((sum, each) => sum + each, 0);
  setText(
    byId("chart-note"),
    `${count(total)} messages, ${size(totalBytes)}; mean ${rate(mean)}/s, max ${count(max)} in a second`,
  );
}
