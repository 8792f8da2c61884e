/** Trend: a small line of equal steps, as SVG polylines with gaps for unknown values. */

import { svg } from "./dom.js";

const HEIGHT = 20;

/**
 * Draw into a cell of a table.
 *
 * @param {HTMLElement} cell
 * @param {(number|null)[]} values
 * @param {string} label for screen readers
 */
export function trend(cell, values, label) {
  const key = JSON.stringify(values);
  let picture = cell.firstElementChild;
  if (!picture) cell.replaceChildren((picture = svg("svg", { class: "spark", role: "img", preserveAspectRatio: "none" })));
  if (picture.dataset.drawn === key) return;
  picture.dataset.drawn = key;
  picture.setAttribute("viewBox", `0 0 ${Math.max(1, values.length - 1)} ${HEIGHT}`);
  picture.setAttribute("aria-label", label);
  const most = Math.max(1e-9, ...values.map((value) => value ?? 0));
  const lines = [[]];
  values.forEach((value, place) => {
    if (value === null) lines.push([]);
    else lines.at(-1).push(`${place},${(HEIGHT - 1.5 - (value / most) * (HEIGHT - 3)).toFixed(1)}`);
  });
  picture.replaceChildren(
    ...lines.filter((line) => line.length).map((line) =>
      // A line with a single point is invisible, so draw a dot.
      svg("polyline", { points: (line.length === 1 ? [...line, ...line] : line).join(" "), class: line.length === 1 ? "dot" : null }),
    ),
  );
}
