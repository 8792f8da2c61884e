/** Traffic: messages per topic, as counted by the pipeline, and its jobs. */

import { byId, setText, show } from "./dom.js";
import { count, duration, rate, size } from "./format.js";
import { showJobs } from "./jobs.js";
import { settings, start } from "./page.js";
import { polling } from "./poll.js";
import { Table } from "./table.js";
import { trend } from "./trend.js";
import { countedSeconds, windows } from "./windows.js";

const table = new Table(byId("topics"), ["", "number", "number", "number wide", "line wide", "number", "number wide"]);
const filter = byId("filter");
let last = null;

start(null, (frame) => draw((last = frame)), polling(settings.figuresUrl));
filter.addEventListener("input", () => last && draw(last));

function draw(frame) {
  showJobs(frame);
  const wanted = filter.value.trim().toLowerCase();
  const shown = frame.topics.filter(({ topic }) => topic.toLowerCase().includes(wanted));
  show(byId("traffic-box"), shown.length > 0);
  show(byId("no-traffic"), shown.length === 0);
  setText(byId("no-traffic"), frame.topics.length ? "No topic matches the filter." : whyNone(frame));
  setText(byId("traffic-note"), note(frame));
  table.fill(shown, ({ topic }) => topic, (entry) => row(entry, frame));
}

function row({ topic, count: messages, bytes, points, latency, size: sizes }, frame) {
  const query = `${new URLSearchParams({ name: topic })}&${settings.query}`;
  const values = windows(frame, new Map(points), 0).map(({ value, seconds }) => (value === null ? null : value / seconds));
  const counted = countedSeconds(frame);
  return [
    { text: topic, url: `${settings.topicUrl}?${query}` },
    count(messages),
    rate(messages / counted),
    size(bytes / counted),
    (cell) => trend(cell, values, `at most ${rate(Math.max(0, ...values))} messages per second`),
    duration(latency[1] / 1000),
    size(sizes[1]),
  ];
}

function whyNone({ until, is_counting: isCounting }) {
  if (isCounting) return "No messages were published in this time.";
  if (until === null) return "Nothing has been counted yet. Start the job “traffic”.";
  return "Nothing was counted in this time because the job “traffic” is not running.";
}

function note({ topics, limit, has_more: hasMore, is_counting: isCounting }) {
  const more = hasMore ? `, the busiest ${count(limit)}` : "";
  const number = topics.length ? `${count(topics.length)} topics${more}` : "";
  return [number, isCounting ? "" : "the job “traffic” is not running: new messages are not counted"].filter(Boolean).join("; ");
}
