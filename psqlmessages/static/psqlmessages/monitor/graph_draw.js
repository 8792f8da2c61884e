/**
 * Graph drawing: an SVG of queues and exchanges. It is drawn again only if its width, nodes or edges
 * change; new numbers and states update its elements in place, so that the focus stays.
 *
 * @typedef {{id: string, kind: "queue"|"exchange", name: string, note: string, label: string,
 *   url: string, isIdle: boolean}} Node `label` is for screen readers, `isIdle`: drawn with a dashed outline
 * @typedef {{id: string, from: string, to: string, kind: "take"|"copy"|"unrouted", text: string,
 *   label: string, isBusy: boolean, isInCycle: boolean}} Edge
 */

import { setText, svg } from "./dom.js";
import { layout } from "./graph_layout.js";
import { gettext } from "./i18n.js";

const HEIGHT = 46;
const MARGIN = 12;
const ARROW = 7;
const WIDE = { width: 156, gap: 84, characters: 19 };
const NARROW = { width: 112, gap: 48, characters: 13 };
const NARROW_PIXELS = 560;
// The smallest scale at which a graph is readable; a wider graph scrolls.
const MIN_SCALE = 0.8;

/** The graph, drawn into an element. */
export class Graph {
  #box;
  #drawn = "";
  #arguments = [[], []];
  #nodes = new Map();
  #edges = new Map();

  /** @param {HTMLElement} box scrolls if the graph is larger */
  constructor(box) {
    this.#box = box;
    new ResizeObserver(() => this.draw(...this.#arguments)).observe(box);
  }

  /**
   * Show nodes and edges.
   *
   * @param {Node[]} nodes
   * @param {Edge[]} edges
   */
  draw(nodes, edges) {
    this.#arguments = [nodes, edges];
    const isNarrow = this.#box.clientWidth < NARROW_PIXELS;
    const shape = JSON.stringify([
      this.#box.clientWidth,
      nodes.map(({ id, kind, name, url }) => [id, kind, name, url]),
      edges.map(({ id, from, to, kind }) => [id, from, to, kind]),
    ]);
    if (shape !== this.#drawn) {
      this.#drawn = shape;
      this.#layOut(nodes, edges, isNarrow);
    }
    for (const node of nodes) updateNode(this.#nodes.get(node.id), node);
    for (const edge of edges) updateEdge(this.#edges.get(edge.id), edge);
  }

  #layOut(nodes, edges, isNarrow) {
    const focused = document.activeElement?.closest?.("[data-node]")?.dataset.node;
    const { width, gap, characters } = isNarrow ? NARROW : WIDE;
    const [length, breadth] = isNarrow ? [HEIGHT, width] : [width, HEIGHT];
    const sized = nodes.map(({ id }) => ({ id, length, breadth }));
    const { centers, routes, along, across } = layout(sized, edges, gap);
    const toPoint = (point) =>
      isNarrow
        ? { x: point.across + MARGIN, y: point.along + MARGIN }
        : { x: point.along + MARGIN, y: point.across + MARGIN };
    const end = toPoint({ along: along + MARGIN, across: across + MARGIN });
    this.#nodes = new Map(nodes.map((node) => [node.id, makeNode(node, toPoint(centers.get(node.id)), width, characters)]));
    this.#edges = new Map(edges.map((edge) => [edge.id, makeEdge(edge, routes.get(edge.id).map(toPoint), isNarrow)]));
    const scale = Math.min(1, Math.max(MIN_SCALE, (this.#box.clientWidth - 2 * MARGIN) / end.x));
    const picture = svg(
      "svg",
      {
        class: "graph", role: "group", "aria-label": gettext("Queues and exchanges; the tables below show the same data"),
        width: end.x * scale, height: end.y * scale, viewBox: `0 0 ${end.x} ${end.y}`,
      },
      svg("g", {}, ...[...this.#edges.values()].map(({ element }) => element)),
      svg("g", {}, ...[...this.#nodes.values()].map(({ element }) => element)),
    );
    for (const [id, { element }] of this.#nodes) this.#highlight(id, element, edges);
    this.#box.replaceChildren(picture);
    if (focused) this.#nodes.get(focused)?.element.focus();
  }

  /** Highlight the edges of the node that has the focus or the mouse. */
  #highlight(id, element, edges) {
    const ownEdges = edges.filter(({ from, to }) => from === id || to === id);
    const highlight = (isHighlighted) => () => {
      for (const edge of ownEdges) this.#edges.get(edge.id)?.element.classList.toggle("highlighted", isHighlighted);
    };
    for (const name of ["focus", "mouseenter"]) element.addEventListener(name, highlight(true));
    for (const name of ["blur", "mouseleave"]) element.addEventListener(name, highlight(false));
  }
}

function makeNode({ id, kind, name, url }, { x, y }, width, characters) {
  const radius = kind === "exchange" ? HEIGHT / 2 : 8;
  const title = svg("title");
  const note = svg("text", { class: "count", x, y: y + 14 });
  const place = { x: x - width / 2, y: y - HEIGHT / 2, width, height: HEIGHT, rx: radius };
  const parts = [
    title,
    svg("rect", place),
    svg("text", { class: "name", x, y: y - 3 }, shorten(name, characters)),
    note,
  ];
  // A node without a link can get the focus too, to highlight its edges.
  const element = url
    ? svg("a", { href: url, class: kind, "data-node": id }, ...parts)
    : svg("g", { tabindex: 0, role: "img", class: kind, "data-node": id }, ...parts);
  return { element, title, note, characters };
}

function updateNode({ element, title, note, characters }, node) {
  setText(title, node.label);
  setText(note, shorten(node.note, characters + 3));
  if (element.getAttribute("aria-label") !== node.label) element.setAttribute("aria-label", node.label);
  element.classList.toggle("idle", node.isIdle);
}

function makeEdge({ id, kind }, points, isNarrow) {
  const title = svg("title");
  const place = labelPlace(points, kind, isNarrow);
  const text = svg("text", { x: place.x, y: place.y, "text-anchor": isNarrow ? "start" : "middle" });
  const element = svg(
    "g", { class: `edge ${kind}`, "data-edge": id },
    title,
    svg("path", { class: "line", d: curve(points, isNarrow) }),
    svg("path", { class: "flow", d: curve(points, isNarrow) }),
    svg("path", { class: "arrow", d: arrow(points, isNarrow) }),
    text,
  );
  return { element, title, text };
}

function updateEdge({ element, title, text }, edge) {
  setText(title, edge.label);
  setText(text, edge.text);
  element.classList.toggle("busy", edge.isBusy);
  element.classList.toggle("cycle", edge.isInCycle);
}

function curve(points, isNarrow) {
  const [first, ...rest] = points;
  let from = first;
  const parts = [`M${first.x},${first.y}`];
  for (const to of rest) {
    const middle = isNarrow ? (from.y + to.y) / 2 : (from.x + to.x) / 2;
    parts.push(
      isNarrow
        ? `C${from.x},${middle} ${to.x},${middle} ${to.x},${to.y}`
        : `C${middle},${from.y} ${middle},${to.y} ${to.x},${to.y}`,
    );
    from = to;
  }
  return parts.join("");
}

function arrow(points, isNarrow) {
  const [before, end] = points.slice(-2);
  const sign = Math.sign(isNarrow ? end.y - before.y : end.x - before.x) || 1;
  const [back, side] = [-sign * ARROW, ARROW * 0.6];
  return isNarrow
    ? `M${end.x},${end.y}l${-side},${back}h${2 * side}z`
    : `M${end.x},${end.y}l${back},${-side}v${2 * side}z`;
}

/** The place of an edge's label: nearer to the queue, where edges are further apart. */
function labelPlace(points, kind, isNarrow) {
  const [from, to] = kind === "take" ? points.slice(0, 2).reverse() : points.slice(-2);
  const t = 0.64; // the point of the Bézier curve, from 0 (from) to 1 (to)
  const bend = 3 * t * t - 2 * t * t * t;
  const mix = (a, b, share) => a + (b - a) * share;
  return isNarrow
    ? { x: mix(from.x, to.x, bend) + 4, y: mix(from.y, to.y, t) }
    : { x: mix(from.x, to.x, t), y: mix(from.y, to.y, bend) - 5 };
}

function shorten(text, characters) {
  const letters = [...text.replace(/\s/gu, " ")];
  return letters.length > characters ? `${letters.slice(0, characters - 1).join("")}…` : letters.join("");
}
