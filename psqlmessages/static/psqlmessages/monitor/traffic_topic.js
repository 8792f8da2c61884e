/** Traffic of a topic: charts of its windows, and its senders. */

import { byId, h, setText, show } from "./dom.js";
import { clock, count, date, duration, messagesText, percent, rate, size } from "./format.js";
import { gettext, ngettext } from "./i18n.js";
import { settings, start } from "./page.js";
import { BYTES, draw as drawPanels, percentilesPanel, SECONDS } from "./panels.js";
import { polling } from "./poll.js";
import { Table } from "./table.js";
import { countedSeconds, windows } from "./windows.js";

const NONE = { count: 0, bytes: 0, latency: [null, null, null], size: [null, null, null] };

const table = new Table(byId("senders"), ["", "number", "number", "number wide", "number", "number wide"]);
let drawnKey = "";

start(null, draw, polling(settings.url, undefined, ({ is_counting: isCounting }) => (isCounting ? "live" : "not_counting")));

function draw(frame) {
  drawTotals(frame);
  show(byId("senders-box"), frame.senders.length > 0);
  show(byId("no-senders"), frame.senders.length === 0);
  setText(byId("senders-note"), frame.has_more ? gettext("the {number} with the most messages", { number: count(frame.limit) }) : "");
  table.fill(frame.senders, ({ sender }) => sender, (entry) => senderRow(entry, frame.total));
  // Redraw charts only if their data has changed, so that a tooltip stays open.
  const { now, jobs, ...data } = frame;
  const key = JSON.stringify([data, Math.floor(now / frame.window)]);
  if (key !== drawnKey) drawCharts(frame);
  drawnKey = key;
}

function senderRow({ sender, count: messages, bytes, latency, size: sizes }, total) {
  return [sender, count(messages), percent(messages / total.count), size(bytes), duration(latency[1] / 1000), size(sizes[1])];
}

const perSecond = (number) => gettext("{rate} msg/s", { rate: rate(number) });

function drawTotals(frame) {
  const { total, window } = frame;
  const period = countedSeconds(frame);
  const max = Math.max(0, ...frame.windows.map(([, { count: messages }]) => messages));
  const entries = [
    [gettext("Messages"), total ? count(total.count) : "0", total ? size(total.bytes) : ""],
    [gettext("Mean"), perSecond((total?.count ?? 0) / period), `${size((total?.bytes ?? 0) / period)}/s`],
    [gettext("Maximum"), perSecond(max / window), gettext("in a single window")],
    [gettext("Latency p95"), total ? duration(total.latency[1] / 1000) : "-", total ? gettext("half within {time}", { time: duration(total.latency[0] / 1000) }) : ""],
    [gettext("Size p95"), total ? size(total.size[1]) : "-", total ? gettext("half at most {size}", { size: size(total.size[0]) }) : ""],
  ];
  byId("totals").replaceChildren(
    ...entries.map(([name, value, note]) =>
      h("div", {}, h("dt", {}, name), h("dd", { class: "value" }, value), h("dd", { class: "note" }, note)),
    ),
  );
  const number = frame.windows.length;
  const text = ngettext("{number} window with messages", "{number} windows with messages", number, { number: count(number) });
  const state = frame.is_counting ? "" : gettext("the job “traffic” is not running: later messages are not counted");
  setText(byId("rates-note"), [text, state].filter(Boolean).join("; "));
}

function drawCharts(frame) {
  const formatTime = frame.window < 3600 ? clock : date;
  const steps = windows(frame, new Map(frame.windows), NONE).map((step) => ({ ...step, label: formatTime(step.at) }));
  const times = steps.map(({ at }) => at);
  const line = (name, field, colour, describe) => ({
    name, colour,
    values: steps.map(({ value, seconds }) => (value === null ? null : value[field] / seconds)),
    texts: steps.map(({ label, value }) => (value === null ? "" : `${label}: ${describe(value)}`)),
  });
  drawPanels(byId("rates"), times, frame.window, [
    { title: gettext("messages/s"), minAxisMax: 1, isStep: true, lines: [line("messages", "count", "accent", (value) => messagesText(value.count))] },
    { title: gettext("bytes/s"), minAxisMax: 100, isStep: true, axis: BYTES, lines: [line("bytes", "bytes", "second", (value) => size(value.bytes))] },
  ]);
  const latency = (value, index) => (value === null || value.latency[index] === null ? null : value.latency[index] / 1000);
  drawPanels(byId("shares"), times, frame.window, [
    percentilesPanel(gettext("latency until the pipeline"), SECONDS, 0.1, steps, latency, (value) => gettext("within {time}", { time: duration(value) })),
    percentilesPanel(gettext("size of bodies"), BYTES, 100, steps, (value, index) => value?.size[index] ?? null, (value) => gettext("at most {size}", { size: size(value) })),
  ]);
}
