/** Report: the charts and the graph of a standalone page. Names come from JSON, and are inserted as text. */

import { byId, h } from "../monitor/dom.js";
import { count, duration, rate, size } from "../monitor/format.js";
import { BYTES, draw, drawStacked, percentilesPanel, SECONDS } from "../monitor/panels.js";
import { Graph } from "../monitor/graph_draw.js";

const PRINTED_WIDTH = "680px";

const data = JSON.parse(byId("data").textContent);
const amounts = new Map(data.steps);
const times = [];
for (let at = Math.floor(data.begin / data.step) * data.step; at < data.end; at += data.step) times.push(at);

const utc = (unix) => new Date(unix * 1000).toISOString().slice(0, 19);
/** Whether this step was counted; otherwise its value is unknown, not 0. */
const isKnown = (at) => !data.counted || (at >= data.counted[0] && at < data.counted[1]);

function drawCharts() {
  const steps = times.map((at) => ({ at, label: utc(at).replace("T", " "), value: amounts.get(at) ?? null }));
  const line = (name, field, colour, describe) => ({
    name, colour,
    values: steps.map(({ at, value }) => (isKnown(at) ? (value?.[field] ?? 0) / data.step : null)),
    texts: steps.map(({ label, value }) => `${label}: ${describe(value?.[field] ?? 0)}`),
  });
  draw(byId("rates"), times, data.step, [
    { title: "messages/s", minAxisMax: 0, isStep: true, lines: [line("messages", "count", "accent", (number) => `${count(number)} messages`)] },
    { title: "bytes/s", minAxisMax: 0, isStep: true, axis: BYTES, lines: [line("bytes", "bytes", "second", size)] },
  ], utc);
  const hasLatency = data.steps.some(([, amount]) => amount.latency);
  const seconds = (amount, index) => (amount?.latency?.[index] == null ? null : amount.latency[index] / 1000);
  const latencies = percentilesPanel("latency until the pipeline", SECONDS, 0, steps, seconds, (value) => `within ${duration(value)}`);
  const sizes = percentilesPanel("size of bodies", BYTES, 0, steps, (amount, index) => amount?.size?.[index] ?? null, (value) => `at most ${size(value)}`);
  draw(byId("shares"), times, data.step, hasLatency ? [latencies, sizes] : [sizes], utc);
  drawStacked(byId("busiest"), times, data.step, busiestLayers(), utc);
}

/** The layers of the busiest topics, and one for the sum of all other topics. Also writes their key. */
function busiestLayers() {
  const rest = new Map(times.map((at) => [at, amounts.get(at)?.count ?? 0]));
  const busiest = data.points.map(([name, points], index) => {
    const counts = new Map(points);
    for (const [at, number] of counts) rest.set(at, rest.get(at) - number);
    return layer(name, `t${index}`, (at) => counts.get(at) ?? 0);
  });
  const others = layer("others", "t8", (at) => rest.get(at));
  const all = others.values.some(Boolean) ? [...busiest, others] : busiest;
  byId("busiest-key").replaceChildren(
    ...all.map(({ name, colour }) => {
      const entry = h("li", {}, name);
      entry.style.setProperty("--of", `var(--${colour})`);
      return entry;
    }),
  );
  return all;
}

const layer = (name, colour, countAt) => ({
  name, colour, values: times.map((at) => countAt(at) / data.step),
  texts: times.map((at) => `${shorten(name)}: ${rate(countAt(at) / data.step)}/s`),
});

/** A short name for a tooltip. */
const shorten = (name) => {
  const letters = [...name];
  return letters.length > 40 ? `${letters.slice(0, 39).join("")}…` : name;
};

function drawGraph() {
  const queueName = ([ns, queue]) => (ns === "default" ? queue : `${ns}/${queue}`);
  const queueId = (ref) => `q ${JSON.stringify(ref)}`;
  const refs = data.exchanges.flatMap(({ source, destinations }) => [source, ...destinations.map(({ to }) => to)]);
  const queues = [...new Map(refs.map((ref) => [queueId(ref), queueName(ref)]))].map(([id, name]) =>
    ({ id, kind: "queue", name, note: "queue", label: `Queue ${name}`, url: "", isIdle: false }));
  const exchanges = data.exchanges.map(({ name, counts }) => {
    const elements = Object.entries(counts).reduce((sum, [outcome, number]) => sum + (outcome === "bad_selector" ? 0 : number), 0);
    return { id: `x ${name}`, kind: "exchange", name, note: count(elements), label: `Exchange ${name}: ${count(elements)} elements`, url: "", isIdle: false, elements };
  });
  const edges = data.exchanges.flatMap(({ name, source, destinations }, index) => [
    edge(`${name} from`, queueId(source), `x ${name}`, "take", exchanges[index].elements, `elements taken from ${queueName(source)} by ${name}`),
    ...destinations.map(({ to, copies }, position) =>
      edge(`${name} ${position}`, `x ${name}`, queueId(to), "copy", copies, `copies by ${name} to ${queueName(to)}`)),
  ]);
  new Graph(byId("graph")).draw([...queues, ...exchanges], edges);
}

function edge(id, from, to, kind, number, description) {
  return { id, from, to, kind, text: count(number), label: `${count(number)} ${description}`, isBusy: number > 0, isInCycle: false };
}

if (data.steps.length) {
  drawCharts();
  // Print charts in the width of the paper and in the light colour scheme.
  const redraw = (isPrinting) => () => {
    for (const chart of document.querySelectorAll(".chart")) chart.style.width = isPrinting ? PRINTED_WIDTH : "";
    drawCharts();
  };
  addEventListener("beforeprint", redraw(true));
  addEventListener("afterprint", redraw(false));
}
if (data.exchanges.length) drawGraph();
