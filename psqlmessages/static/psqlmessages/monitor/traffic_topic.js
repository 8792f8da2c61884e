/** Traffic of a topic: charts of its windows, and its senders. */

import { byId, h, setText, show } from "./dom.js";
import { clock, count, date, duration, percent, rate, size } from "./format.js";
import { settings, start } from "./page.js";
import { BYTES, draw as drawPanels, onlook, SECONDS } from "./panels.js";
import { polling } from "./poll.js";
import { Table } from "./table.js";
import { countedSeconds, windows } from "./windows.js";

const PARTS = [["half", "accent"], ["95 %", "second"], ["99 %", "third"]];
const NONE = { count: 0, bytes: 0, latency: [null, null, null], size: [null, null, null] };

const table = new Table(byId("senders"), ["", "number", "number", "number wide", "number", "number wide"]);
let last = null;
let drawn = "";

start(null, (frame) => draw((last = frame)), polling(settings.figuresUrl));
onlook(() => last && drawCharts(last));

function draw(frame) {
  drawTotals(frame);
  show(byId("senders-box"), frame.senders.length > 0);
  show(byId("no-senders"), frame.senders.length === 0);
  setText(byId("senders-note"), frame.has_more ? `the ${count(frame.limit)} with the most messages` : "");
  table.fill(frame.senders, ({ sender }) => sender, (entry) => senderRow(entry, frame.total));
  // Redraw charts only if their data has changed, so that a tooltip stays open.
  const { now, jobs, ...figures } = frame;
  const key = JSON.stringify([figures, Math.floor(now / frame.window)]);
  if (key !== drawn) drawCharts(frame);
  drawn = key;
}

function senderRow({ sender, count: messages, bytes, latency, size: sizes }, total) {
  return [sender, count(messages), percent(messages / total.count), size(bytes), duration(latency[1] / 1000), size(sizes[1])];
}

function drawTotals(frame) {
  const { total, window } = frame;
  const counted = countedSeconds(frame);
  const most = Math.max(0, ...frame.windows.map(([, { count: messages }]) => messages));
  const entries = [
    ["Messages", total ? count(total.count) : "0", total ? size(total.bytes) : ""],
    ["Mean", `${rate((total?.count ?? 0) / counted)} msg/s`, `${size((total?.bytes ?? 0) / counted)}/s`],
    ["Maximum", `${rate(most / window)} msg/s`, "in a single window"],
    ["Latency p95", total ? duration(total.latency[1] / 1000) : "-", total ? `half within ${duration(total.latency[0] / 1000)}` : ""],
    ["Size p95", total ? size(total.size[1]) : "-", total ? `half at most ${size(total.size[0])}` : ""],
  ];
  byId("totals").replaceChildren(
    ...entries.map(([name, value, note]) =>
      h("div", {}, h("dt", {}, name), h("dd", { class: "value" }, value), h("dd", { class: "note" }, note)),
    ),
  );
  const state = frame.is_counting ? "" : "; the job “traffic” is not running: later messages are not counted";
  setText(byId("rates-note"), `${count(frame.windows.length)} windows with messages${state}`);
}

function drawCharts(frame) {
  if (!globalThis.Plotly) return;
  const found = windows(frame, new Map(frame.windows), NONE);
  const times = found.map(({ at }) => at);
  const name = frame.window < 3600 ? clock : date;
  const hover = (say) => found.map(({ at, value }) => (value === null ? "" : `${name(at)}: ${say(value)}`));
  const values = (read) => found.map(({ value, seconds }) => (value === null ? null : read(value, seconds)));
  drawPanels(byId("rates"), times, frame.window, [
    {
      title: "messages/s", least: 1, isStep: true,
      lines: [{ name: "messages", colour: "accent", values: values((each, seconds) => each.count / seconds), texts: hover((each) => `${count(each.count)} messages`) }],
    },
    {
      title: "bytes/s", least: 100, isStep: true, axis: BYTES,
      lines: [{ name: "bytes", colour: "second", values: values((each, seconds) => each.bytes / seconds), texts: hover((each) => size(each.bytes)) }],
    },
  ]);
  drawPanels(byId("shares"), times, frame.window, [
    {
      title: "latency until the pipeline", least: 0.1, axis: SECONDS,
      lines: PARTS.map(([part, colour], place) => ({
        name: part, colour,
        values: values((each) => (each.latency[place] === null ? null : each.latency[place] / 1000)),
        texts: hover((each) => `${part} within ${duration((each.latency[place] ?? 0) / 1000)}`),
      })),
    },
    {
      title: "size of bodies", least: 100, axis: BYTES,
      lines: PARTS.map(([part, colour], place) => ({
        name: part, colour, values: values((each) => each.size[place]),
        texts: hover((each) => `${part} at most ${size(each.size[place] ?? 0)}`),
      })),
    },
  ]);
}
