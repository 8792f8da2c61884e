/** Exchanges: queues and exchanges with their rates, as a graph and as tables. */

import { byId, setText, show } from "./dom.js";
import { count, rate } from "./format.js";
import { Graph } from "./graph_draw.js";
import { settings, start } from "./page.js";
import { polling } from "./poll.js";
import { Rates } from "./rates.js";
import { Table } from "./table.js";

const OUTCOMES = ["ok", "no_route", "too_many_hops", "failed"];
// Queues for elements without a destination, shown once they have been used.
const ASTRAY = { no_route: "__no_route__", too_many_hops: "__too_many_hops__" };
const UNKNOWN = "unknown";

const graph = new Graph(byId("graph"));
const rates = new Rates();
const tables = Object.fromEntries(["exchanges", "copies", "queues"].map((name) => [name, new Table(byId(name))]));
let home = "default";

start(
  null,
  (frame) => {
    home = frame.home;
    rates.take(frame);
    const edges = frame.exchanges.flatMap(edgesOf);
    describe(frame);
    graph.draw([...frame.queues.map((queue) => queueNode(queue, frame.most)), ...frame.exchanges.map(exchangeNode)], edges);
    tables.exchanges.fill(frame.exchanges, ({ id }) => id, exchangeRow);
    tables.copies.fill(frame.exchanges.flatMap(copiesOf), ({ key }) => key, copyRow);
    tables.queues.fill(frame.queues, placeOf, (queue) => queueRow(queue, frame.most));
  },
  polling(settings.figuresUrl),
);

// Graph

const queueId = (place) => `q ${JSON.stringify(place)}`;
const exchangeId = ({ id }) => `x ${id}`;
const placeOf = ({ ns, queue }) => JSON.stringify([ns, queue]);
const named = ([ns, queue]) => (ns === home ? queue : `${ns}/${queue}`);

function queueNode({ ns, queue, id, sizes, is_paused: isPaused }, most) {
  const waiting = sizes === null ? UNKNOWN : numberOf(sizes[0] + sizes[1] + sizes[2], Math.max(...sizes) > most, most);
  const note = isPaused ? `${waiting}, paused` : waiting;
  const what = sizes === null ? "number of elements unknown" : `${waiting} elements`;
  return {
    id: queueId([ns, queue]), kind: "queue", name: named([ns, queue]), note,
    label: `Queue ${named([ns, queue])}: ${what}${isPaused ? ", paused" : ""}`,
    url: pageOf(settings.queueUrl, ns === home ? id : null),
    isIdle: isPaused || sizes === null,
  };
}

function exchangeNode(exchange) {
  const state = stateOf(exchange);
  const taken = rates.sum(OUTCOMES.map((outcome) => `${exchange.id} ${outcome}`));
  const note = exchange.is_running && exchange.workers ? perSecond(taken) : state;
  return {
    id: exchangeId(exchange), kind: "exchange", name: exchange.name, note,
    label: `Exchange ${exchange.name}: ${state}, ${perSecond(taken)} taken`,
    url: pageOf(settings.exchangeUrl, exchange.id),
    isIdle: !exchange.is_running || !exchange.workers,
  };
}

function edgesOf(exchange) {
  const middle = exchangeId(exchange);
  const taken = rates.sum(OUTCOMES.map((outcome) => `${exchange.id} ${outcome}`));
  const edges = [
    edge(`${middle} from`, queueId(exchange.source), middle, "take", taken, `taken from ${named(exchange.source)} by ${exchange.name}`),
    ...exchange.destinations.map(({ to, is_in_cycle: isInCycle }, position) =>
      edge(`${middle} ${position}`, middle, queueId(to), "copy", rates.of(`${exchange.id} ${position}`), `copies by ${exchange.name} to ${named(to)}`, isInCycle)),
  ];
  for (const [outcome, queue] of Object.entries(ASTRAY)) {
    if (!exchange.counts[outcome]) continue;
    const place = [exchange.source[0], queue];
    edges.push(edge(`${middle} ${outcome}`, middle, queueId(place), "astray", rates.of(`${exchange.id} ${outcome}`), `from ${exchange.name} to ${queue}`));
  }
  edges[0].isInCycle = exchange.destinations.some((each) => each.is_in_cycle);
  return edges;
}

function edge(id, from, to, kind, speed, what, isInCycle = false) {
  const cycle = isInCycle ? ", in a cycle" : "";
  return {
    id, from, to, kind, isInCycle,
    text: speed === null ? "" : `${rate(speed)}/s`,
    label: `${perSecond(speed)} ${what}${cycle}`,
    isBusy: speed > 0,
  };
}

// Tables

function exchangeRow(exchange) {
  const { id, counts, source } = exchange;
  return [
    linked(exchange.name, pageOf(settings.exchangeUrl, id)),
    named(source),
    stateOf(exchange),
    ...OUTCOMES.map((outcome) => [count(counts[outcome] ?? 0), perSecond(rates.of(`${id} ${outcome}`))].join(", ")),
  ];
}

function copiesOf(exchange) {
  return exchange.destinations.map((destination, position) => ({ key: `${exchange.id} ${position}`, exchange, ...destination }));
}

function copyRow({ key, exchange, to, selector, count: copies, is_in_cycle: isInCycle }) {
  return [
    linked(exchange.name, pageOf(settings.exchangeUrl, exchange.id)),
    named(to),
    selector || "always",
    perSecond(rates.of(key)),
    count(copies),
    isInCycle ? "yes" : "",
  ];
}

function queueRow({ ns, queue, id, sizes, is_paused: isPaused }, most) {
  return [
    linked(named([ns, queue]), pageOf(settings.queueUrl, ns === home ? id : null)),
    ...[0, 1, 2].map((kind) => (sizes === null ? UNKNOWN : numberOf(sizes[kind], sizes[kind] > most, most))),
    isPaused ? "paused" : "",
  ];
}

const linked = (text, url) => ({ text, url });

/** The page URL of an object, from the URL of object 0; "" if there is none. */
function pageOf(pattern, id) {
  return pattern && id !== null ? pattern.replace(/\b0\b/, id) : "";
}

function stateOf({ is_running: isRunning, workers }) {
  if (!isRunning) return "stopped";
  if (workers === 0) return "no process";
  return workers === 1 ? "1 process" : `${count(workers)} processes`;
}

const perSecond = (speed) => (speed === null ? "measuring" : `${rate(speed)}/s`);

const numberOf = (number, isOver, most) => (isOver ? `over ${count(most)}` : count(number));

function describe(frame) {
  const { exchanges } = frame;
  const running = exchanges.filter((exchange) => exchange.is_running);
  show(byId("no-exchanges"), exchanges.length === 0);
  show(byId("drawn"), exchanges.length > 0);
  show(byId("graph"), exchanges.length > 0);
  show(byId("no-runner"), running.length > 0 && running.every(({ workers }) => workers === 0));
  show(byId("cycle-note"), exchanges.some(({ destinations }) => destinations.some((each) => each.is_in_cycle)));
  const more = frame.has_more ? `, the first ${count(frame.limit)} by name` : "";
  setText(byId("graph-note"), exchanges.length ? `${count(exchanges.length)} exchanges${more}; rates are of the last 10 s` : "");
}
