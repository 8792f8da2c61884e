/** Panels: stacked charts with a common time axis, drawn by plotly. */

const CONFIG = { displayModeBar: false, responsive: true, doubleClick: false };
const NARROW = "(max-width: 40rem)";
const isNarrow = () => matchMedia(NARROW).matches;
// The gap between two panels, as a share of the height.
const GAP = 0.1;
// An unknown period with more values than this gets a label: in a shorter one it does not fit.
const MIN_LABELLED = 90;
// A line with more points has no dots.
const MAX_DOTS = 120;
// Name and colour of the 50th, 95th and 99th percentile.
const PERCENTILES = [["half", "accent"], ["95 %", "second"], ["99 %", "third"]];
// Axis formats of plotly, with SI prefixes: 1500 bytes are 1.5kB, 0.2 seconds are 200ms.
export const SECONDS = { tickformat: "~s", ticksuffix: "s" };
export const BYTES = { tickformat: "~s", ticksuffix: "B" };

/**
 * @typedef {{name: string, values: (number|null)[], texts: string[], colour: string, dash?: string}} Line
 *   `colour` is the name of a CSS variable; null values are gaps
 * @typedef {{title: string, minAxisMax: number, axis?: object, isStep?: boolean, lines: Line[]}} Panel
 *   `minAxisMax`: lowest maximum of the axis; `isStep`: filled, each value as wide as its window
 */

/**
 * Draw panels into an element.
 *
 * @param {HTMLElement} element
 * @param {number[]} times the starts of equal windows, as Unix times
 * @param {number} window their length in seconds
 * @param {Panel[]} panels
 * @param {(unix: number) => string} formatTime formats a time as `2000-12-31T12:00:00`, in the zone to show
 * @param {string} unknownText the label of periods whose values are unknown; "": do not shade them
 */
export function draw(element, times, window, panels, formatTime = localTime, unknownText = "") {
  const colours = readColours(element);
  const x = [...times, times.at(-1) + window].map(formatTime);
  const traces = panels.flatMap((panel, index) => panel.lines.flatMap((line) => tracesOf(line, panel, axisName(index), x, colours)));
  // If the width of the page changes, plotly redraws the chart with the height of the element.
  element.style.height = `${heightOf(panels.length)}px`;
  const layout = layoutOf(panels, x, colours);
  if (unknownText) shadeUnknown(layout, panels, x, unknownText, colours);
  globalThis.Plotly.react(element, traces, layout, CONFIG);
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
export function stacked(element, times, window, layers, formatTime = localTime) {
  const colours = readColours(element);
  const x = [...times, times.at(-1) + window].map(formatTime);
  const sums = times.map((_, index) => layers.reduce((sum, { values }) => sum + values[index], 0));
  const panel = { title: "messages/s", minAxisMax: Math.max(0, ...sums), lines: [] };
  element.style.height = `${heightOf(1) + 60}px`;
  const traces = layers.map(({ name, colour, values, texts }) => ({
    name, x, y: [...values, values.at(-1)], customdata: [...texts, texts.at(-1)], hovertemplate: "%{customdata}<extra></extra>",
    mode: "lines", stackgroup: "one", fillcolor: `${colours.of(colour)}99`, line: { color: colours.of(colour), width: 1, shape: "hv" },
  }));
  globalThis.Plotly.react(element, traces, { ...layoutOf([panel], x, colours), hovermode: "x unified" }, CONFIG);
}

/** A panel with a line for each percentile. `read` returns it, given a value and its index. */
export function percentilesPanel(title, axis, minAxisMax, steps, read, describe) {
  const lines = PERCENTILES.map(([name, colour], index) => ({
    name, colour,
    values: steps.map(({ value }) => read(value, index)),
    texts: steps.map(({ label, value }) => `${label}: ${name} ${describe(read(value, index) ?? 0)}`),
  }));
  return { title, axis, minAxisMax, lines };
}

/** Call `redraw` when the colour scheme or the class of page width has changed. */
export function onRedrawNeeded(redraw) {
  for (const query of ["(prefers-color-scheme: dark)", NARROW]) matchMedia(query).addEventListener("change", redraw);
}

const heightOf = (panels) => (isNarrow() ? 170 : 200) * panels + 36;

const axisName = (index) => (index ? `y${index + 1}` : "y");

function tracesOf(line, { isStep }, yaxis, x, colours) {
  const colour = colours[line.colour];
  const common = { name: line.name, yaxis, hovertemplate: "%{customdata}<extra></extra>", mode: "lines" };
  if (!isStep) {
    const dots = { size: 4, color: colour };
    return [{
      ...common, x: x.slice(0, -1), y: line.values, customdata: line.texts, connectgaps: false,
      mode: line.values.length > MAX_DOTS ? "lines" : "lines+markers", marker: dots, line: { color: colour, width: 1.5, dash: line.dash ?? "solid" },
    }];
  }
  // A separate area for each period with data: plotly would fill the gaps within one area.
  const known = spans(line.values, (value) => value !== null);
  // Without any line, plotly would omit the axis.
  if (!known.length) return [{ ...common, x, y: x.map(() => null) }];
  return known.map(([from, to]) => ({
    ...common, x: x.slice(from, to + 1), y: [...line.values.slice(from, to), line.values[to - 1]],
    customdata: [...line.texts.slice(from, to), line.texts[to - 1]],
    fill: "tozeroy", fillcolor: `${colour}26`, line: { color: colour, width: 1.5, shape: "hv" },
  }));
}

function layoutOf(panels, x, colours) {
  const { text, muted, line, surface } = colours;
  const axis = { gridcolor: line, zerolinecolor: line, fixedrange: true, color: muted, nticks: 4, rangemode: "tozero" };
  const layout = {
    autosize: true,
    margin: { l: isNarrow() ? 48 : 68, r: isNarrow() ? 12 : 24, t: 12, b: 52 },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: text, size: 12, family: "system-ui, sans-serif" },
    showlegend: false, hovermode: "x", dragmode: false,
    hoverlabel: { bgcolor: surface, bordercolor: line, font: { color: text } },
    xaxis: {
      ...axis, type: "date", range: [x[0], x.at(-1)], ticks: "outside", ticklen: 6, tickcolor: line, nticks: isNarrow() ? 4 : 8,
      anchor: axisName(panels.length - 1), hoverformat: " ",
    },
    annotations: panels.flatMap((panel, index) => annotationsOf(panel, index, panels.length, colours)),
  };
  const height = (1 - GAP * (panels.length - 1)) / panels.length;
  panels.forEach((panel, index) => {
    const top = 1 - index * (height + GAP);
    const max = Math.max(panel.minAxisMax, ...panel.lines.flatMap(({ values }) => values.map((value) => value ?? 0)));
    layout[index ? `yaxis${index + 1}` : "yaxis"] = {
      ...axis, ...panel.axis, domain: [Math.max(0, top - height), top - 0.03], range: [0, max * 1.1],
    };
  });
  return layout;
}

/** Shade the unknown values of the first line, with a label if there is space. */
function shadeUnknown(layout, panels, x, text, { muted }) {
  const unknown = spans(panels[0].lines[0].values, (value) => value === null);
  const font = { color: muted };
  layout.shapes = unknown.flatMap(([from, to]) => panels.map((_, index) => ({
    type: "rect", x0: x[from], x1: x[to], yref: `${axisName(index)} domain`, y0: 0, y1: 1,
    line: { width: 0 }, fillcolor: `${muted}12`, layer: "below",
  })));
  for (const [from, to] of unknown.filter(([from, to]) => to - from > MIN_LABELLED)) {
    layout.annotations.push({ x: x[(from + to) >> 1], yref: "y domain", y: 0.5, text, showarrow: false, font });
  }
}

/** The title and the legend above a panel, which fit on a narrow page too. */
function annotationsOf({ title, lines }, index, number, colours) {
  const height = (1 - GAP * (number - 1)) / number;
  const y = 1 - index * (height + GAP) + 0.015;
  const common = { xref: "paper", yref: "paper", yanchor: "middle", y, showarrow: false };
  const annotation = (text, colour) => ({ text, font: { size: 12, color: colours[colour] } });
  const names = lines.length > 1 ? [...lines].reverse() : [];
  return [
    { ...common, ...annotation(title, "muted"), x: 0, xanchor: "left" },
    ...names.map(({ name, colour }, at) => ({ ...common, ...annotation(name, colour), x: 1, xanchor: "right", xshift: -44 * at })),
  ];
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

/** The page's colours, from its CSS variables. */
function readColours(element) {
  const style = getComputedStyle(element);
  const names = ["accent", "second", "third", "text", "muted", "line", "surface"];
  const of = (name) => style.getPropertyValue(`--${name}`).trim();
  return { ...Object.fromEntries(names.map((name) => [name, of(name)])), of };
}

/** A Unix time in the reader's zone, as text without a zone: plotly does not support zones. */
export function localTime(unix) {
  const offset = new Date(unix * 1000).getTimezoneOffset() * 60;
  return new Date((unix - offset) * 1000).toISOString().slice(0, 19);
}

