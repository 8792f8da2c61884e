/** Panels: charts one above the other with a common time axis, in SVG. */

import { h, svg } from "./dom.js";
import { date } from "./format.js";
import { gettext } from "./i18n.js";

const NARROW_PIXELS = 560;
const AXIS_PIXELS = 34;
const TITLE_PIXELS = 28;
// An unknown period that is narrower than this gets no label, which would not fit.
const MIN_LABELLED_PIXELS = 96;
// A line with more points has no dots.
const MAX_DOTS = 120;
// Name and colour of the 50th, 95th and 99th percentile.
const PERCENTILES = [[gettext("half"), "accent"], ["95 %", "second"], ["99 %", "third"]];
const PREFIXES = [[1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""], [1e-3, "m"], [1e-6, "µ"]];
const DAY = 86400;
const TICK_SECONDS = [1, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 10800, 21600, 43200, DAY, 2 * DAY, 5 * DAY, 10 * DAY, 30 * DAY];
const dayFormat = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", timeZone: "UTC" });

// Axis formats: 1500 bytes are 1.5 kB, 0.2 seconds are 200 ms.
export const SECONDS = (number) => withPrefix(number, "s");
export const BYTES = (number) => withPrefix(number, "B");
const PLAIN = (number) => (number < 1 ? `${significant(number)}` : withPrefix(number, ""));

/**
 * @typedef {{name: string, values: (number|null)[], texts: string[], colour: string, from?: number[]}} Line
 *   `colour`: the name of a CSS variable; null values are gaps; `from`: the lower edge, if it is not 0
 * @typedef {{title: string, minAxisMax: number, axis?: (number: number) => string, isStep?: boolean, isStacked?: boolean, lines: Line[]}} Panel
 *   `minAxisMax`: lowest maximum of the axis; `axis`: formats its numbers; `isStep`: draw filled areas, each value as wide as its window
 */

/**
 * Draw panels into an element; draw them again whenever its width changes.
 *
 * @param {HTMLElement} element
 * @param {number[]} times the starts of equal windows, as Unix times
 * @param {number} window their length in seconds
 * @param {Panel[]} panels
 * @param {(unix: number) => string} formatTime formats a time as `2000-12-31T12:00:00`, in the zone to show
 * @param {string} unknownText the label of periods whose values are unknown; "": do not shade them
 */
export function draw(element, times, window, panels, formatTime = localTime, unknownText = "") {
  drawingOf(element).show({ times, window, panels, formatTime, unknownText });
}

/**
 * Draw stacked layers: their sum, and the share of each.
 *
 * @param {HTMLElement} element
 * @param {number[]} times
 * @param {number} window
 * @param {Line[]} layers from bottom to top
 * @param {(unix: number) => string} formatTime
 */
export function drawStacked(element, times, window, layers, formatTime = localTime) {
  let sums = times.map(() => 0);
  const lines = layers.map((layer) => {
    const from = sums;
    sums = from.map((sum, index) => sum + layer.values[index]);
    return { ...layer, from, values: sums };
  });
  draw(element, times, window, [{ title: gettext("messages/s"), minAxisMax: 0, isStep: true, isStacked: true, lines }], formatTime);
}

/** A panel with a line for each percentile. `read` returns the percentile with an index from a step's value. */
export function percentilesPanel(title, axis, minAxisMax, steps, read, describe) {
  const lines = PERCENTILES.map(([name, colour], index) => ({
    name, colour,
    values: steps.map(({ value }) => read(value, index)),
    texts: steps.map(({ label, value }) => `${label}: ${name} ${describe(read(value, index) ?? 0)}`),
  }));
  return { title, axis, minAxisMax, lines };
}

/** A Unix time in the reader's zone, as text without a zone. */
export function localTime(unix) {
  const offset = new Date(unix * 1000).getTimezoneOffset() * 60;
  return new Date((unix - offset) * 1000).toISOString().slice(0, 19);
}

const drawings = new WeakMap();

function drawingOf(element) {
  if (!drawings.has(element)) drawings.set(element, new Drawing(element));
  return drawings.get(element);
}

/** The chart of an element. Its tooltip describes the window under the pointer, and stays if the chart is drawn again. */
class Drawing {
  #element;
  #tooltip = h("p", { class: "tooltip", hidden: "" });
  #chart = null;
  #width = 0;
  #pointer = null;

  constructor(element) {
    this.#element = element;
    new ResizeObserver(() => this.#chart && this.#innerWidth() !== this.#width && this.#draw()).observe(element);
    element.addEventListener("pointermove", (event) => {
      const { left, top } = element.firstElementChild.getBoundingClientRect();
      this.#pointAt({ x: event.clientX - left, y: event.clientY - top });
    });
    element.addEventListener("pointerleave", () => this.#pointAt(null));
  }

  show(chart) {
    this.#chart = chart;
    this.#draw();
  }

  #innerWidth() {
    const { paddingLeft, paddingRight } = getComputedStyle(this.#element);
    return Math.floor(this.#element.clientWidth - parseFloat(paddingLeft) - parseFloat(paddingRight));
  }

  #draw() {
    this.#width = this.#innerWidth();
    if (this.#width <= 0) return;
    const area = layOut(this.#chart, this.#width);
    const parts = [...timeAxis(this.#chart, area), ...this.#chart.panels.flatMap((panel, index) => panelParts(panel, this.#chart, area.at(index)))];
    const { width, height } = area;
    const drawn = svg("svg", { class: "plot", width, height, viewBox: `0 0 ${width} ${height}` }, ...parts);
    this.#element.replaceChildren(drawn, this.#tooltip);
    this.#pointAt(this.#pointer);
  }

  #pointAt(pointer) {
    this.#pointer = pointer;
    const drawn = this.#element.firstElementChild;
    drawn?.querySelector(".pointer")?.remove();
    this.#tooltip.hidden = true;
    if (pointer === null || !this.#chart) return;
    const { times, panels, unknownText } = this.#chart;
    const area = layOut(this.#chart, this.#width);
    const index = Math.floor(((pointer.x - area.left) / (area.right - area.left)) * times.length);
    const number = Math.min(panels.length - 1, Math.floor(pointer.y / area.panelHeight));
    if (!(index in times) || !(number in panels)) return;
    const texts = panels[number].lines.filter(({ values }) => values[index] !== null).map(({ texts }) => texts[index]);
    if (!texts.length && unknownText) texts.push(`${date(times[index])}: ${unknownText}`);
    if (!texts.length) return;
    const { top, bottom } = area.at(number);
    const x = area.x(index + 0.5);
    drawn.append(svg("line", { class: "pointer", x1: x, x2: x, y1: top, y2: bottom }));
    this.#tooltip.textContent = texts.join("\n");
    this.#tooltip.hidden = false;
    const left = x > area.width / 2 ? x - this.#tooltip.offsetWidth - 8 : x + 16;
    this.#tooltip.style.left = `${Math.max(0, left)}px`;
    this.#tooltip.style.top = `${top}px`;
  }
}

/** The positions of the panels in a chart of this width. */
function layOut({ times, panels }, width) {
  const isNarrow = width < NARROW_PIXELS;
  const panelHeight = (isNarrow ? 170 : 200) + (panels[0]?.isStacked ? 60 : 0);
  const [left, right] = [isNarrow ? 48 : 64, width - (isNarrow ? 8 : 16)];
  return {
    width, left, right, panelHeight, isNarrow, height: panelHeight * panels.length + AXIS_PIXELS,
    x: (index) => left + ((right - left) * index) / times.length,
    at(index) {
      const top = index * panelHeight + TITLE_PIXELS;
      return { ...this, top, bottom: (index + 1) * panelHeight };
    },
  };
}

function timeAxis({ times, window, panels, formatTime }, area) {
  const [begin, end] = [times[0], times.at(-1) + window];
  const maxTicks = area.isNarrow ? 4 : 8;
  const step = TICK_SECONDS.find((seconds) => (end - begin) / seconds <= maxTicks) ?? TICK_SECONDS.at(-1);
  // Ticks are at round times of the zone.
  const offset = Date.parse(`${formatTime(begin)}Z`) / 1000 - Math.floor(begin);
  const bottom = panels.length * area.panelHeight;
  const ticks = [];
  for (let at = Math.ceil((begin + offset) / step) * step - offset; at <= end; at += step) {
    const x = area.left + ((area.right - area.left) * (at - begin)) / (end - begin);
    const anchor = x > area.right - 16 ? "end" : "middle";
    ticks.push(svg("line", { class: "tick", x1: x, x2: x, y1: bottom, y2: bottom + 5 }));
    ticks.push(svg("text", { x, y: bottom + 19, "text-anchor": anchor }, tickText(formatTime(at), step)));
  }
  return ticks;
}

function tickText(time, step) {
  if (step >= DAY || (step >= 3600 && time.endsWith("T00:00:00"))) return dayFormat.format(Date.parse(`${time}Z`));
  return time.slice(11, step < 60 ? 19 : 16);
}

function panelParts(panel, { unknownText }, area) {
  const { left, right, top, bottom } = area;
  const known = panel.lines.flatMap(({ values }) => values.filter((value) => value !== null));
  const max = known.reduce((most, value) => Math.max(most, value), panel.minAxisMax) * 1.1 || 1;
  const y = (value) => round(bottom - ((bottom - top) * Math.max(0, value)) / max);
  const grid = axisNumbers(max).flatMap((number) => [
    svg("line", { class: "grid", x1: left, x2: right, y1: y(number), y2: y(number) }),
    svg("text", { x: left - 8, y: y(number) + 4, "text-anchor": "end" }, (panel.axis ?? PLAIN)(number)),
  ]);
  const unknown = unknownText ? spans(panel.lines[0].values, (value) => value === null) : [];
  const partsOf = panel.isStep ? areaParts : lineParts;
  return [...unknown.flatMap((span) => shade(span, unknownText, area)), ...grid, ...titleParts(panel, area), ...panel.lines.flatMap((line) => partsOf(line, panel, area, y))];
}

/** The shade of a period without values, with a label if there is space. */
function shade([from, to], text, { x, top, bottom }) {
  const [left, right] = [x(from), x(to)];
  const rectangle = svg("rect", { class: "unknown", x: left, width: right - left, y: top, height: bottom - top });
  if (right - left < MIN_LABELLED_PIXELS) return [rectangle];
  return [rectangle, svg("text", { x: (left + right) / 2, y: (top + bottom) / 2, "text-anchor": "middle" }, text)];
}

/** The title and the legend above a panel, which fit on a narrow page too. */
function titleParts({ title, lines, isStacked }, { left, right, top }) {
  const names = lines.length > 1 && !isStacked ? [...lines].reverse() : [];
  let x = right;
  const legend = names.map(({ name, colour }) => {
    const text = svg("text", { x, y: top - 8, "text-anchor": "end", fill: `var(--${colour})` }, name);
    x -= 16 + 7 * name.length;
    return text;
  });
  return [svg("text", { x: left, y: top - 8 }, title), ...legend];
}

/** A line, with gaps between the periods with values. */
function lineParts({ values, colour }, _, { x }, y) {
  const point = (index) => `${round(x(index))},${y(values[index])}`;
  const paint = `var(--${colour})`;
  return spans(values, (value) => value !== null).flatMap(([from, to]) => {
    const points = Array.from({ length: to - from }, (_, index) => point(from + index));
    const line = svg("polyline", { class: "line", points: points.join(" "), stroke: paint });
    if (values.length > MAX_DOTS && points.length > 1) return [line];
    return [line, ...points.map((each) => svg("circle", { cx: each.split(",")[0], cy: each.split(",")[1], r: 2, fill: paint }))];
  });
}

/** A filled area for each period with values; each value is as wide as its window. */
function areaParts({ values, colour, from: lower }, { isStacked }, { x }, y) {
  const paint = `var(--${colour})`;
  return spans(values, (value) => value !== null).flatMap(([from, to]) => {
    const indexes = Array.from({ length: to - from }, (_, index) => from + index);
    const upperEdge = indexes.map((index) => `V${y(values[index])}H${round(x(index + 1))}`).join("");
    const lowerEdge = lower ? indexes.reverse().map((index) => `V${y(lower[index])}H${round(x(index))}`).join("") : `V${y(0)}`;
    const start = `${round(x(from))},${y(values[from])}`;
    return [
      svg("path", { class: isStacked ? "area stacked" : "area", d: `M${start}${upperEdge}${lowerEdge}${lower ? "" : `H${round(x(from))}`}Z`, fill: paint }),
      svg("path", { class: "line", d: `M${start}${upperEdge}`, stroke: paint }),
    ];
  });
}

/** At most five round numbers from 0 up to the maximum. */
function axisNumbers(max) {
  const power = 10 ** Math.floor(Math.log10(max));
  const step = [0.2, 0.5, 1, 2].map((factor) => factor * power).find((size) => max / size < 5) ?? power;
  return Array.from({ length: Math.floor(max / step) + 1 }, (_, index) => index * step);
}

/** The ranges of consecutive values that match, as [start, end), by index. */
function spans(values, isMatch) {
  const result = [];
  for (const [index, value] of values.entries()) {
    if (!isMatch(value)) continue;
    if (result.at(-1)?.[1] === index) result.at(-1)[1] = index + 1;
    else result.push([index, index + 1]);
  }
  return result;
}

const round = (pixels) => Math.round(pixels * 10) / 10;
const significant = (number) => Number(number.toPrecision(3));

function withPrefix(number, unit) {
  const [factor, prefix] = PREFIXES.find(([factor]) => number >= factor * 0.9995) ?? [1, ""];
  return `${significant(number / factor)}${unit && " "}${prefix}${unit}`;
}
