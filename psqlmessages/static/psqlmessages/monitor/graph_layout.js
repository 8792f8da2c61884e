/**
 * Graph layout: positions for the nodes of a directed graph, in layers. Pure functions, no DOM.
 *
 * Edges lead along the main axis from one layer to a later one; one edge of each cycle leads back.
 *
 * @typedef {{id: string, length: number, breadth: number}} Node `length` is its size along the main
 *   axis, `breadth` across it
 * @typedef {{id: string, from: string, to: string}} Edge
 * @typedef {{along: number, across: number}} Point
 */

const SWEEPS = 8;
const NODE_GAP = 22;
// Space for an edge that passes through a layer.
const LANE_BREADTH = 14;
// Space between two connected parts of the graph.
const PART_GAP = 40;

/**
 * Compute the positions of nodes and edges.
 *
 * @param {Node[]} nodes
 * @param {Edge[]} edges between these nodes
 * @param {number} gap between two layers
 * @returns {{centers: Map<string, Point>, routes: Map<string, Point[]>, along: number, across: number}}
 *   a route leads from the side of its first node to the side of its last
 */
export function layout(nodes, edges, gap) {
  const graph = { centers: new Map(), routes: new Map(), along: 0, across: 0 };
  for (const part of splitParts(nodes, edges)) {
    const result = placePart(part.nodes, part.edges, gap);
    const offset = graph.across ? graph.across + PART_GAP : 0;
    const move = ({ along, across }) => ({ along, across: across + offset });
    for (const [id, point] of result.centers) graph.centers.set(id, move(point));
    for (const [id, points] of result.routes) graph.routes.set(id, points.map(move));
    graph.along = Math.max(graph.along, result.along);
    graph.across = offset + result.across;
  }
  return graph;
}

/** Split the graph into connected parts, the largest first. */
function splitParts(nodes, edges) {
  const neighbours = groupBy([...edges, ...edges.map(({ from, to }) => ({ from: to, to: from }))], (edge) => edge.from, (edge) => edge.to);
  const partOf = new Map();
  const result = [];
  for (const { id } of nodes) {
    if (partOf.has(id)) continue;
    const part = { nodes: [], edges: [] };
    result.push(part);
    const pending = [id];
    partOf.set(id, part);
    while (pending.length) {
      for (const next of neighbours.get(pending.pop()) ?? []) {
        if (partOf.has(next)) continue;
        partOf.set(next, part);
        pending.push(next);
      }
    }
  }
  for (const node of nodes) partOf.get(node.id).nodes.push(node);
  for (const edge of edges) partOf.get(edge.from).edges.push(edge);
  return result.sort((a, b) => b.nodes.length - a.nodes.length);
}

function placePart(nodes, edges, gap) {
  const forward = reverseBackEdges(nodes, edges);
  const layers = assignLayers(nodes, forward);
  const { rows, lanes } = addLanes(nodes, forward, layers);
  reorder(rows, lanes.pairs);
  return computePositions(rows, lanes, forward, gap);
}

/** Reverse the edges that lead back, found by a depth-first search from the sources. */
function reverseBackEdges(nodes, edges) {
  const outgoing = groupBy(edges, (edge) => edge.from);
  const state = new Map();
  const back = new Set();
  for (const { id } of sortSourcesFirst(nodes, edges)) visit(id);
  return edges.map((edge) =>
    back.has(edge) ? { ...edge, from: edge.to, to: edge.from, isBack: true } : { ...edge, isBack: false },
  );

  // Not recursive, because a path may contain all nodes.
  function visit(start) {
    if (state.has(start)) return;
    state.set(start, "open");
    const path = [{ id: start, rest: [...(outgoing.get(start) ?? [])] }];
    while (path.length) {
      const { id, rest } = path.at(-1);
      const edge = rest.shift();
      if (!edge) {
        state.set(id, "done");
        path.pop();
      } else if (state.get(edge.to) === "open") {
        back.add(edge);
      } else if (!state.has(edge.to)) {
        state.set(edge.to, "open");
        path.push({ id: edge.to, rest: [...(outgoing.get(edge.to) ?? [])] });
      }
    }
  }
}

function sortSourcesFirst(nodes, edges) {
  const reached = new Set(edges.map((edge) => edge.to));
  return [...nodes.filter(({ id }) => !reached.has(id)), ...nodes.filter(({ id }) => reached.has(id))];
}

/** The layer of each node: the first one after the layers of all its predecessors. */
function assignLayers(nodes, edges) {
  const outgoing = groupBy(edges, (edge) => edge.from);
  const predecessors = new Map(nodes.map(({ id }) => [id, 0]));
  for (const edge of edges) predecessors.set(edge.to, predecessors.get(edge.to) + 1);
  const layers = new Map();
  const ready = nodes.filter(({ id }) => predecessors.get(id) === 0).map(({ id }) => id);
  for (const id of ready) layers.set(id, 0);
  for (let index = 0; index < ready.length; index += 1) {
    for (const { to } of outgoing.get(ready[index]) ?? []) {
      layers.set(to, Math.max(layers.get(to) ?? 0, layers.get(ready[index]) + 1));
      predecessors.set(to, predecessors.get(to) - 1);
      if (predecessors.get(to) === 0) ready.push(to);
    }
  }
  return layers;
}

/** The rows of items, one per layer. Items are nodes, and lanes: an edge has a lane in each layer that it passes. */
function addLanes(nodes, edges, layers) {
  const depth = Math.max(-1, ...layers.values()) + 1;
  const rows = Array.from({ length: depth }, () => []);
  const items = new Map();
  for (const node of nodes) {
    const item = { ...node, along: 0, across: 0 };
    items.set(node.id, item);
    rows[layers.get(node.id)].push(item);
  }
  const [chains, pairs] = [new Map(), []];
  for (const edge of edges) {
    const chain = [items.get(edge.from)];
    for (let layer = layers.get(edge.from) + 1; layer < layers.get(edge.to); layer += 1) {
      const lane = { id: null, length: 0, breadth: LANE_BREADTH, along: 0, across: 0 };
      rows[layer].push(lane);
      chain.push(lane);
    }
    chain.push(items.get(edge.to));
    chains.set(edge.id, chain);
    for (let index = 1; index < chain.length; index += 1) pairs.push([chain[index - 1], chain[index]]);
  }
  return { rows, lanes: { chains, pairs } };
}

/** Sort each row by the mean place of connected items, in a few sweeps, so that fewer edges cross. */
function reorder(rows, pairs) {
  const before = groupBy(pairs, ([, to]) => to, ([from]) => from);
  const after = groupBy(pairs, ([from]) => from, ([, to]) => to);
  const places = new Map();
  const setPlaces = (row) => row.forEach((item, index) => places.set(item, index));
  rows.forEach(setPlaces);
  for (let sweep = 0; sweep < SWEEPS; sweep += 1) {
    const isDown = sweep % 2 === 0;
    for (const row of isDown ? rows : [...rows].reverse()) {
      const neighbours = isDown ? before : after;
      const wanted = new Map(row.map((item) => [item, mean(neighbours.get(item), (each) => places.get(each)) ?? places.get(item)]));
      row.sort((a, b) => wanted.get(a) - wanted.get(b));
      setPlaces(row);
    }
  }
}

/** Compute positions close to connected items, in the order of each row, and the routes of edges. */
function computePositions(rows, { chains, pairs }, edges, gap) {
  const neighbours = groupBy([...pairs, ...pairs.map(([a, b]) => [b, a])], ([from]) => from, ([, to]) => to);
  let along = 0;
  for (const row of rows) {
    const length = Math.max(0, ...row.map((item) => item.length));
    for (const item of row) item.along = along + length / 2;
    along += length + gap;
    spread(row, row.map(() => 0));
  }
  for (let sweep = 0; sweep < SWEEPS; sweep += 1) {
    for (const row of sweep % 2 === 0 ? rows : [...rows].reverse()) {
      spread(row, row.map((item) => mean(neighbours.get(item), (each) => each.across) ?? item.across));
    }
  }
  const items = rows.flat();
  const min = Math.min(0, ...items.map((item) => item.across - item.breadth / 2));
  for (const item of items) item.across -= min;
  return {
    centers: new Map(items.filter(({ id }) => id !== null).map(({ id, along, across }) => [id, { along, across }])),
    routes: computeRoutes(edges, chains),
    along: Math.max(0, along - gap),
    across: Math.max(0, ...items.map((item) => item.across + item.breadth / 2)),
  };
}

/** Move the items of a row to their wanted positions, in order and without overlap. */
function spread(row, wanted) {
  let nextFree = -Infinity;
  row.forEach((item, index) => {
    item.across = Math.max(wanted[index], nextFree + item.breadth / 2);
    nextFree = item.across + item.breadth / 2 + NODE_GAP;
  });
  // Items are only pushed in one direction: shift the row back.
  const shift = mean(row.map((item, index) => item.across - wanted[index]), (each) => each) ?? 0;
  for (const item of row) item.across -= shift;
}

/** The points of each edge: its start, lanes and end. */
function computeRoutes(edges, chains) {
  const result = new Map();
  const [outgoing, incoming] = [new Map(), new Map()];
  for (const edge of edges) {
    const chain = chains.get(edge.id);
    put(outgoing, chain[0], { edge, towards: chain[1].across });
    put(incoming, chain.at(-1), { edge, towards: chain.at(-2).across });
  }
  const [starts, ends] = [computePorts(outgoing), computePorts(incoming)];
  for (const edge of edges) {
    const chain = chains.get(edge.id);
    const [first, last] = [chain[0], chain.at(-1)];
    const points = [
      { along: first.along + first.length / 2, across: starts.get(edge) },
      ...chain.slice(1, -1).map(({ along, across }) => ({ along, across })),
      { along: last.along - last.length / 2, across: ends.get(edge) },
    ];
    result.set(edge.id, edge.isBack ? points.reverse() : points);
  }
  return result;
}

/** The position of each edge at the side of its item: the edges of an item are evenly distributed. */
function computePorts(sides) {
  const result = new Map();
  for (const [item, uses] of sides) {
    uses.sort((a, b) => a.towards - b.towards);
    uses.forEach(({ edge }, index) => {
      result.set(edge, item.across + item.breadth * ((index + 1) / (uses.length + 1) - 0.5));
    });
  }
  return result;
}

function groupBy(entries, key, value = (entry) => entry) {
  const result = new Map();
  for (const entry of entries) put(result, key(entry), value(entry));
  return result;
}

function put(map, key, value) {
  if (map.has(key)) map.get(key).push(value);
  else map.set(key, [value]);
}

function mean(values, read) {
  if (!values?.length) return null;
  return values.reduce((sum, value) => sum + read(value), 0) / values.length;
}
