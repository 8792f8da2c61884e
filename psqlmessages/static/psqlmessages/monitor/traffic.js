/** Traffic: messages per topic, as counted by the pipeline, and the pipeline's jobs. Has its own filter. */

import { byId, h, setText, show } from "./dom.js";
import { age, count, duration, elapsed, rate, size } from "./format.js";
import { gettext, ngettext } from "./i18n.js";
import { settings, start } from "./page.js";
import { polling } from "./poll.js";
import { drawSparkline, sparkline } from "./sparkline.js";
import { Table } from "./table.js";
import { countedSeconds, windows } from "./windows.js";

const JOB_STATES = {
  starting: gettext("starting"), running: gettext("running"), waiting: gettext("waiting for the database"),
  stopped: gettext("stopped"), failed: gettext("failed"),
};

const jobTable = new Table(byId("jobs"), ["", "", "number", "number", "number wide", "wide", "wide"]);
const topicTable = new Table(byId("topics"), ["", "number", "number", "number wide", "line wide", "number", "number wide"]);
const filter = byId("filter");
let lastFrame = null;

start(null, (frame) => draw((lastFrame = frame)), polling(settings.url, undefined, stateOf));
filter.addEventListener("input", () => lastFrame && draw(lastFrame));

function draw(frame) {
  showJobs(frame);
  const filterText = filter.value.trim().toLowerCase();
  const shown = frame.topics.filter(({ topic }) => topic.toLowerCase().includes(filterText));
  show(byId("traffic-box"), shown.length > 0);
  show(byId("no-traffic"), shown.length === 0);
  setText(byId("no-traffic"), frame.topics.length ? gettext("No topic matches the filter.") : emptyText(frame));
  setText(byId("traffic-note"), note(frame));
  topicTable.fill(shown, ({ topic }) => topic, (entry) => topicRow(entry, frame));
}

function topicRow({ topic, count: messages, bytes, points, latency, size: sizes }, frame) {
  const query = `${new URLSearchParams({ name: topic })}&${settings.query}`;
  const values = windows(frame, new Map(points), 0).map(({ value, seconds }) => (value === null ? null : value / seconds));
  const period = countedSeconds(frame);
  return [
    { text: topic, url: `${settings.topicUrl}?${query}` },
    count(messages),
    rate(messages / period),
    size(bytes / period),
    (cell) => {
      if (!cell.firstElementChild) cell.append(sparkline());
      drawSparkline(cell.firstElementChild, values, gettext("at most {rate} messages per second", { rate: rate(Math.max(0, ...values)) }));
    },
    duration(latency[1] / 1000),
    size(sizes[1]),
  ];
}

/** The state of the page. Without a running job, the numbers in the database are shown but do not grow. */
function stateOf({ is_counting: isCounting }) {
  return isCounting ? "live" : "not_counting";
}

function emptyText({ until, is_counting: isCounting }) {
  if (isCounting) return gettext("No messages were published in this time.");
  if (until === null) return gettext("Nothing has been counted yet. Start the job “traffic”.");
  return gettext("Nothing was counted in this time because the job “traffic” is not running.");
}

function note({ topics, limit, has_more: hasMore, is_counting: isCounting }) {
  const number = ngettext("{number} topic", "{number} topics", topics.length, { number: count(topics.length) });
  const shown = hasMore ? gettext("the busiest {number} topics", { number: count(limit) }) : number;
  const state = isCounting ? "" : gettext("the job “traffic” is not running: new messages are not counted");
  return [topics.length ? shown : "", state].filter(Boolean).join("; ");
}

// Jobs. A job without a heartbeat is not shown as running.

function showJobs({ jobs, now }) {
  show(byId("no-jobs"), jobs.length === 0);
  show(byId("jobs-box"), jobs.length > 0);
  const running = jobs.filter((job) => job.is_alive).length;
  setText(byId("jobs-note"), jobs.length ? gettext("{alive} of {all} alive", { alive: count(running), all: count(jobs.length) }) : "");
  jobTable.fill(jobs, ({ name }) => name, (job) => jobRow(job, now));
}

function jobRow(job, now) {
  const silence = Math.max(0, now - job.seen_at);
  const isOver = job.state === "stopped" || job.state === "failed";
  const isLost = !isOver && !job.is_alive;
  return [
    (cell) => showNameAndError(cell, job),
    { is: isLost ? "lost" : job.state, text: isLost ? gettext("no heartbeat for {time}", { time: elapsed(silence) }) : (JOB_STATES[job.state] ?? job.state) },
    job.is_alive && job.lag_seconds !== null ? lag(job.lag_seconds) : "-",
    job.is_alive ? rate(job.rows_per_second) : "-",
    count(job.rows),
    job.last_batch < 0 ? gettext("none yet") : `${count(job.last_batch)}, ${job.last_batch_at ? age(now - job.last_batch_at) : gettext("at an unknown time")}`,
    age(silence),
  ];
}

function showNameAndError(cell, { name, error }) {
  if (!cell.firstChild) cell.append(h("span"), h("span", { class: "error" }));
  setText(cell.firstChild, name);
  setText(cell.lastChild, error);
  show(cell.lastChild, error !== "");
}

const lag = (seconds) => (seconds === 0 ? gettext("none") : duration(seconds));
