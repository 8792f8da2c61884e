/** Exchanges: queues and exchanges with their rates, as a graph and as tables. */

import { byId, setText, show } from "./dom.js";
import { count, date, elapsed, rate, UNKNOWN } from "./format.js";
import { Graph } from "./graph_draw.js";
import { gettext, ngettext } from "./i18n.js";
import { settings, start } from "./page.js";
import { polling } from "./poll.js";
import { Table } from "./table.js";

const OUTCOMES = ["ok", "no_route", "discarded", "too_many_hops", "failed"];
// The queue for elements with one of these outcomes; shown if it was used.
const UNROUTED = { no_route: "__no_route__", too_many_hops: "__too_many_hops__" };

const WINDOW_SECONDS = 10;
// After a longer gap, drop the samples before it: a hidden page requests no data.
const GAP_SECONDS = 20;

/** Samples of the counters in the last seconds, and the growth of each counter. */
class Rates {
  /** @type {{at: number, counts: Map<string, number>}[]} oldest first */
  #samples = [];

  /** Add the counters of a frame; ignore a frame that was already added. */
  update({ now, exchanges }) {
    if (this.#samples.at(-1)?.at === now) return;
    if (this.#samples.at(-1)?.at < now - GAP_SECONDS) this.#samples = [];
    const counts = new Map();
    for (const { id, counts: outcomes, destinations } of exchanges) {
      for (const outcome of OUTCOMES) {
        counts.set(`${id} ${outcome}`, outcomes[outcome] ?? 0);
      }
      destinations.forEach((destination, position) => counts.set(`${id} ${position}`, destination.count));
    }
    this.#samples.push({ at: now, counts });
    // The oldest sample stays if the next one is newer than the start of the window.
    while (this.#samples.length > 2 && this.#samples[1].at <= now - WINDOW_SECONDS) this.#samples.shift();
  }

  /** The growth of a counter per second; null while it is unknown. */
  of(key) {
    const [last, first] = [this.#samples.at(-1), this.#samples.find(({ counts }) => counts.has(key))];
    if (!last || !first || first === last || !last.counts.has(key)) return null;
    const growth = last.counts.get(key) - first.counts.get(key);
    // The counter was reset, so its growth is unknown.
    return growth < 0 ? null : growth / (last.at - first.at);
  }

  /** The sum of several rates; null while one of them is unknown. */
  sum(keys) {
    const all = keys.map((key) => this.of(key));
    return all.includes(null) ? null : all.reduce((total, each) => total + each, 0);
  }
}

const graph = new Graph(byId("graph"));
const rates = new Rates();
const tables = Object.fromEntries(["exchanges", "copies", "queues"].map((name) => [name, new Table(byId(name))]));
let home = "default";
let now = 0;
let queues = new Map();

start(
  null,
  (frame) => {
    ({ home, now } = frame);
    queues = new Map(frame.queues.map((queue) => [queueKey(queue), queue]));
    rates.update(frame);
    const edges = frame.exchanges.flatMap(edgesOf);
    showCounts(frame);
    graph.draw([...frame.queues.map((queue) => queueNode(queue, frame.max_listed)), ...frame.exchanges.map(exchangeNode)], edges);
    tables.exchanges.fill(frame.exchanges, ({ id }) => id, exchangeRow);
    tables.copies.fill(frame.exchanges.flatMap(copiesOf), ({ key }) => key, copyRow);
    tables.queues.fill(frame.queues, queueKey, (queue) => queueRow(queue, frame.max_listed));
  },
  polling(settings.url),
);

// Graph

const queueId = (ref) => `q ${JSON.stringify(ref)}`;
const exchangeId = ({ id }) => `x ${id}`;
const queueKey = ({ ns, queue }) => JSON.stringify([ns, queue]);
const takeRateOf = ({ id }) => rates.sum(OUTCOMES.map((outcome) => `${id} ${outcome}`));
const queueName = ([ns, queue]) => (ns === home ? queue : `${ns}/${queue}`);

function queueNode({ ns, queue, id, sizes, is_paused: isPaused }, max) {
  const total = sizes === null ? 0 : sizes[0] + sizes[1] + sizes[2];
  const waiting = sizes === null ? UNKNOWN : countText(total, Math.max(...sizes) > max, max);
  const note = isPaused ? gettext("{number}, paused", { number: waiting }) : waiting;
  const size = sizes === null ? gettext("number of elements unknown") : ngettext("{number} element", "{number} elements", total, { number: waiting });
  const label = gettext("Queue {queue}: {size}", { queue: queueName([ns, queue]), size });
  return {
    id: queueId([ns, queue]), kind: "queue", name: queueName([ns, queue]), note,
    label: isPaused ? `${label}, ${gettext("paused")}` : label,
    url: pageUrl(settings.queueUrl, ns === home ? id : null),
    isIdle: isPaused || sizes === null,
  };
}

function exchangeNode(exchange) {
  const state = stateOf(exchange);
  const takeRate = takeRateOf(exchange);
  const isBlocked = exchange.missing_rules.length > 0;
  const isFailing = exchange.failing_since !== null;
  const isIdle = !exchange.is_running || !exchange.workers || isBlocked || isFailing;
  // These state texts are too long for the box in the graph.
  const failure = isBlocked ? gettext("blocked") : gettext("failing");
  const idleNote = isBlocked || isFailing ? failure : state;
  const note = isIdle ? idleNote : perSecond(takeRate);
  return {
    id: exchangeId(exchange), kind: "exchange", name: exchange.name, note,
    label: gettext("Exchange {name}: {state}, {rate} taken", { name: exchange.name, state, rate: perSecond(takeRate) }),
    url: pageUrl(settings.exchangeUrl, exchange.id),
    isIdle,
  };
}

function edgesOf(exchange) {
  const exchangeNodeId = exchangeId(exchange);
  const edges = [
    edge(`${exchangeNodeId} from`, queueId(exchange.source), exchangeNodeId, "take", takeRateOf(exchange), gettext("taken from {queue} by {exchange}", { queue: queueName(exchange.source), exchange: exchange.name })),
    ...exchange.destinations.map(({ to, is_in_cycle: isInCycle }, position) =>
      edge(`${exchangeNodeId} ${position}`, exchangeNodeId, queueId(to), "copy", rates.of(`${exchange.id} ${position}`), gettext("copies by {exchange} to {queue}", { exchange: exchange.name, queue: queueName(to) }), isInCycle)),
  ];
  for (const [outcome, queue] of Object.entries(UNROUTED)) {
    if (!exchange.counts[outcome]) continue;
    const ref = [exchange.source[0], queue];
    edges.push(edge(`${exchangeNodeId} ${outcome}`, exchangeNodeId, queueId(ref), "unrouted", rates.of(`${exchange.id} ${outcome}`), gettext("from {exchange} to {queue}", { exchange: exchange.name, queue })));
  }
  edges[0].isInCycle = exchange.destinations.some((each) => each.is_in_cycle);
  return edges;
}

function edge(id, from, to, kind, speed, description, isInCycle = false) {
  const cycle = isInCycle ? `, ${gettext("in a cycle")}` : "";
  return {
    id, from, to, kind, isInCycle,
    text: speed === null ? "" : `${rate(speed)}/s`,
    label: `${perSecond(speed)} ${description}${cycle}`,
    isBusy: speed > 0,
  };
}

// Tables

function exchangeRow(exchange) {
  const { id, counts, source } = exchange;
  return [
    link(exchange.name, pageUrl(settings.exchangeUrl, id)),
    queueName(source),
    stateOf(exchange),
    ...OUTCOMES.map((outcome) => [count(counts[outcome] ?? 0), perSecond(rates.of(`${id} ${outcome}`))].join(", ")),
  ];
}

function copiesOf(exchange) {
  return exchange.destinations.map((destination, position) => ({ key: `${exchange.id} ${position}`, exchange, ...destination }));
}

function copyRow({ key, exchange, to, selector, count: copies, is_in_cycle: isInCycle }) {
  return [
    link(exchange.name, pageUrl(settings.exchangeUrl, exchange.id)),
    queueName(to),
    selector || gettext("always"),
    perSecond(rates.of(key)),
    count(copies),
    isInCycle ? gettext("yes") : "",
  ];
}

function queueRow({ ns, queue, id, sizes, is_paused: isPaused }, max) {
  return [
    link(queueName([ns, queue]), pageUrl(settings.queueUrl, ns === home ? id : null)),
    ...[0, 1, 2].map((kind) => (sizes === null ? UNKNOWN : countText(sizes[kind], sizes[kind] > max, max))),
    isPaused ? gettext("paused") : "",
  ];
}

const link = (text, url) => ({ text, url });

/** The URL of an object's page, derived from the URL of object 0; "" if there is none. */
function pageUrl(pattern, id) {
  return pattern && id !== null ? pattern.replace(/\b0\b/, id) : "";
}

function stateOf(exchange) {
  const { is_running: isRunning, workers, missing_rules: missingRules, failing_since: since } = exchange;
  if (!isRunning) return gettext("stopped");
  if (workers === 0) return gettext("no process");
  const failed = failedText(exchange);
  const time = since === null ? "" : date(since);
  if (missingRules.length) {
    const rules = missingRules.map((rule) => gettext("missing rule in {rule}", { rule })).join(" ");
    return (time ? gettext("blocked since {time}", { time }) : gettext("blocked")) + `${failed}: ${rules}`;
  }
  if (time) return gettext("failing since {time}{failed}: read the logs of its processes", { time, failed });
  return ngettext("{number} process", "{number} processes", workers, { number: count(workers) }) + failed;
}

/** Failed elements that wait in the source, and when the first is tried again; "" without any. */
function failedText({ source: [ns, queue] }) {
  const { failed, next_try_at: nextTryAt } = queues.get(queueKey({ ns, queue }));
  if (!failed) return "";
  const time = elapsed(Math.max(0, nextTryAt - now));
  return `, ${ngettext("{number} element failed, next try in {time}", "{number} elements failed, next try in {time}", failed, { number: count(failed), time })}`;
}

const perSecond = (speed) => (speed === null ? gettext("measuring") : `${rate(speed)}/s`);

const countText = (number, isOverMax, max) => (isOverMax ? gettext("over {number}", { number: count(max) }) : count(number));

function showCounts(frame) {
  const { exchanges } = frame;
  const running = exchanges.filter((exchange) => exchange.is_running);
  show(byId("no-exchanges"), exchanges.length === 0);
  show(byId("drawn"), exchanges.length > 0);
  show(byId("graph"), exchanges.length > 0);
  show(byId("no-runner"), running.length > 0 && running.every(({ workers }) => workers === 0));
  show(byId("cycle-note"), exchanges.some(({ destinations }) => destinations.some((each) => each.is_in_cycle)));
  const number = ngettext("{number} exchange", "{number} exchanges", exchanges.length, { number: count(exchanges.length) });
  const shown = frame.has_more ? gettext("the first {number} exchanges by name", { number: count(frame.max_exchanges) }) : number;
  setText(byId("graph-note"), exchanges.length ? `${shown}; ${gettext("rates are of the last 10 s")}` : "");
}
