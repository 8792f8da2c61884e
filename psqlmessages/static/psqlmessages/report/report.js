/** Report: the charts of a standalone page. Names come as JSON, and are inserted as text. */

import { byId, h } from "../monitor/dom.js";
import { count, duration, rate, size } from "../monitor/format.js";
import { BYTES, draw, onlook, SECONDS, stacked } from "../monitor/panels.js";
import { Graph } from "../monitor/graph_draw.js";

const PARTS = [["half", "accent"], ["95 %", "second"], ["99 %", "third"]];
const PRINTED_WIDTH = "680px";

const data = JSON.parse(byId("data").textContent);
const amounts = new Map(data.steps);
const times = [];
for (let at = Math.floor(data.begin / data.step) * data.step; at < data.end; at += data.step) times.push(at);

const utc = (unix) => new Date(unix * 1000).toISOString().slice(0, 19);
/** Whether a job counted this step; otherwise its value is unknown, not 0. */
const isKnown = (at) => !data.counted || (at >= data.counted[0] && at < data.counted[1]);
const spoken = (unix) => utc(unix).replace("T", " ");

function drawCharts() {
  const found = times.map((at) => [at, amounts.get(at) ?? null]);
  const texts = (say) => found.map(([at, amount]) => `${spoken(at)}: ${say(amount)}`);
  draw(byId("rates"), times, data.step, [
    {
      title: "messages/s", least: 0, isStep: true,
      lines: [{ name: "messages", colour: "accent", values: found.map(([at, amount]) => (isKnown(at) ? (amount?.count ?? 0) / data.step : null)), texts: texts((amount) => `${count(amount?.count ?? 0)} messages`) }],
    },
    {
      title: "bytes/s", least: 0, isStep: true, axis: BYTES,
      lines: [{ name: "bytes", colour: "second", values: found.map(([at, amount]) => (isKnown(at) ? (amount?.bytes ?? 0) / data.step : null)), texts: texts((amount) => size(amount?.bytes ?? 0)) }],
    },
  ], utc);
  const hasLatency = data.steps.some(([, amount]) => amount.latency);
  const sizes = sharesPanel("size of bodies", found, "size", BYTES, 1, (value) => `at most ${size(value)}`);
  const latencies = sharesPanel("latency until the pipeline", found, "latency", SECONDS, 1000, (value) => `within ${duration(value / 1000)}`);
  draw(byId("shares"), times, data.step, hasLatency ? [latencies, sizes] : [sizes], utc);
  stacked(byId("busiest"), times, data.step, layers(found), utc);
}

function sharesPanel(title, found, what, axis, divisor, say) {
  const value = (amount, place) => amount?.[what]?.[place] ?? null;
  return {
    title, axis, least: 0,
    lines: PARTS.map(([name, colour], place) => ({
      name, colour,
      values: found.map(([, amount]) => (value(amount, place) === null ? null : value(amount, place) / divisor)),
      texts: found.map(([at, amount]) => `${spoken(at)}: ${name} ${say(value(amount, place) ?? 0)}`),
    })),
  };
}

/** The busiest topics, and the sum of the others. */
function layers(found) {
  const rest = new Map(found.map(([at, amount]) => [at, amount?.count ?? 0]));
  const drawn = data.points.map(([name, points], place) => {
    const own = new Map(points);
    for (const [at, number] of own) rest.set(at, rest.get(at) - number);
    return layer(name, `t${place % 7}`, (at) => own.get(at) ?? 0);
  });
  const others = layer("others", "t7", (at) => rest.get(at));
  const all = others.values.some(Boolean) ? [...drawn, others] : drawn;
  byId("busiest-key").replaceChildren(
    ...all.map(({ name, colour }) => {
      const entry = h("li", {}, name);
      entry.style.setProperty("--of", `var(--${colour})`);
      return entry;
    }),
  );
  return all;
}

const layer = (name, colour, of) => ({
  name, colour, values: times.map((at) => of(at) / data.step),
  texts: times.map((at) => `${shortened(name)}: ${rate(of(at) / data.step)}/s`),
});

/** A name for a plotly label, escaped because plotly interprets tags. */
const shortened = (name) => {
  const letters = [...name];
  const text = letters.length > 40 ? `${letters.slice(0, 39).join("")}…` : name;
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
};

function drawGraph() {
  const named = ([ns, queue]) => (ns === data.home ? queue : `${ns}/${queue}`);
  const queueId = (place) => `q ${JSON.stringify(place)}`;
  const places = new Map(data.exchanges.flatMap(({ source, destinations }) => [source, ...destinations.map(({ to }) => to)]).map((place) => [queueId(place), place]));
  const queues = [...places].map(([id, place]) => ({ id, kind: "queue", name: named(place), note: "queue", label: `Queue ${named(place)}`, url: "", isIdle: false }));
  const flows = data.exchanges.map(({ name, counts }) => {
    const all = Object.entries(counts).reduce((sum, [outcome, number]) => sum + (outcome === "bad_selector" ? 0 : number), 0);
    return { id: `x ${name}`, kind: "exchange", name, note: count(all), label: `Exchange ${name}: ${count(all)} elements`, url: "", isIdle: false, all };
  });
  const edges = data.exchanges.flatMap(({ name, source, destinations }, place) => [
    edge(`${name} from`, queueId(source), `x ${name}`, "take", flows[place].all, `elements taken from ${named(source)} by ${name}`),
    ...destinations.map(({ to, copies }, at) => edge(`${name} ${at}`, `x ${name}`, queueId(to), "copy", copies, `copies by ${name} to ${named(to)}`)),
  ]);
  new Graph(byId("graph")).draw([...queues, ...flows], edges);
}

function edge(id, from, to, kind, number, what) {
  return { id, from, to, kind, text: count(number), label: `${count(number)} ${what}`, isBusy: number > 0, isInCycle: false };
}

if (data.steps.length) {
  drawCharts();
  onlook(drawCharts);
  // Print charts in the width of the paper and in the light colour scheme.
  const print = (isPrinting) => () => {
    for (const chart of document.querySelectorAll(".chart")) chart.style.width = isPrinting ? PRINTED_WIDTH : "";
    drawCharts();
    for (const chart of document.querySelectorAll(".chart")) globalThis.Plotly.Plots.resize(chart);
  };
  addEventListener("beforeprint", print(true));
  addEventListener("afterprint", print(false));
}
if (data.exchanges.length) drawGraph();
