/** Topics: the filtered and sorted list of all topics, with health and events. */

import { byId, h, setText, show } from "./dom.js";
import { Events } from "./events.js";
import { age, count, date, rate, size } from "./format.js";
import { Health } from "./health.js";
import { now, start, topicUrl } from "./page.js";
import { BUCKET_SECONDS, drawSparkline, lastBuckets, sparkline } from "./sparkline.js";

const MAX_ROWS = 200;
const STORED_BUCKETS = 61;
// Wait this long between sorts, so that users can read a row before it moves.
const SORT_MS = 2000;

/** @type {Map<string, object>} */
const topics = new Map();
/** @type {Map<string, object>} the table rows created so far, by topic */
const rows = new Map();
const body = byId("topics");
const health = new Health();
const events = new Events();
const sorting = { by: "topic", isDescending: false, at: 0 };
let state = { since: null, gaps: [] };
let topicsInDatabase = 0;
let limit = Infinity;
let showsAll = false;
let order = [];

start(null, (frame) => {
  if (frame.op === "snapshot") {
    topics.clear();
    limit = frame.limit;
  }
  state = frame.state ?? state;
  topicsInDatabase = frame.topics_there ?? topicsInDatabase;
  for (const name of frame.gone ?? []) topics.delete(name);
  for (const row of frame.topics ?? []) updateTopic(row);
  health.update(frame);
  events.update(frame);
  render(frame.op === "snapshot" || Boolean(frame.gone?.length));
});

function updateTopic(row) {
  const buckets = topics.get(row.topic)?.bucketMap ?? new Map();
  const [first, ...numbers] = row.buckets;
  for (const [index, messages] of numbers.entries()) buckets.set(first + index, messages);
  const oldest = now() / BUCKET_SECONDS - STORED_BUCKETS;
  for (const bucket of buckets.keys()) if (bucket < oldest) buckets.delete(bucket);
  topics.set(row.topic, { ...row, bucketMap: buckets });
}

// List

function render(mustSort) {
  const isInUse = body.matches(":hover, :focus-within");
  const hasNewTopics = order.length !== topics.size;
  if (mustSort || hasNewTopics || (performance.now() - sorting.at > SORT_MS && !isInUse)) sort();
  const filterText = byId("filter").value.trim().toLowerCase();
  const matching = order.filter((name) => topics.has(name) && matches(topics.get(name), filterText));
  const shown = showsAll ? matching : matching.slice(0, MAX_ROWS);
  arrange(shown.map((name) => update(topics.get(name))));
  showCounts(matching.length, shown.length, filterText);
}

function sort() {
  sorting.at = performance.now();
  const sign = sorting.isDescending ? -1 : 1;
  order = [...topics.values()].sort((a, b) => sign * compare(a, b) || (a.topic < b.topic ? -1 : 1));
  order = order.map((topic) => topic.topic);
}

function compare(a, b) {
  const [first, second] = [a[sorting.by] ?? 0, b[sorting.by] ?? 0];
  return first === second ? 0 : first < second ? -1 : 1;
}

function matches(topic, filterText) {
  const names = [topic.topic, ...topic.notifiers, ...topic.listeners];
  return filterText === "" || names.some((name) => name.toLowerCase().includes(filterText));
}

/** Show these rows in this order. Moves only rows in a wrong place: a moved row loses the focus. */
function arrange(elements) {
  const shown = new Set(elements);
  for (const element of [...body.children]) if (!shown.has(element)) element.remove();
  let next = body.firstChild;
  for (const element of elements) {
    if (element === next) next = next.nextSibling;
    else body.insertBefore(element, next);
  }
}

function update(topic) {
  let row = rows.get(topic.topic);
  if (!row) rows.set(topic.topic, (row = makeRow(topic.topic)));
  if (row.shown !== topic) {
    row.shown = topic;
    showNames(row.senders, topic.notifiers, topic.notifier_count);
    showNames(row.listeners, topic.listeners, topic.listener_count);
    setText(row.rate, rate(topic.rate));
    setText(row.size, size(topic.size_rate));
    row.element.classList.toggle("busy", topic.rate > 0);
  }
  updateTimes(row, topic);
  return row.element;
}

function makeRow(name) {
  const senders = h("td", { class: "names" });
  const listeners = h("td", { class: "names" });
  const rate = h("td", { class: "number" });
  const size = h("td", { class: "number wide" });
  const spark = sparkline();
  const last = h("time");
  const element = h(
    "tr", {},
    h("th", { scope: "row" }, h("a", { href: topicUrl(name) }, name)),
    senders, listeners, rate, size,
    h("td", { class: "wide" }, spark),
    h("td", { class: "number" }, last),
  );
  return { element, senders, listeners, rate, size, spark, last, shown: null };
}

function showNames(cell, names, number) {
  const text = names.join(", ") + (number > names.length ? `, +${count(number - names.length)}` : "");
  const key = `${number}\n${text}`;
  if (cell.dataset.shown === key) return;
  cell.dataset.shown = key;
  cell.classList.toggle("none", number === 0);
  cell.title = text;
  cell.replaceChildren(h("b", {}, count(number)), h("span", {}, text));
}

/** Update the cells that change with time, even without a frame. */
function updateTimes(row, topic) {
  const values = lastBuckets(topic.bucketMap, now(), state);
  drawSparkline(row.spark, values, `${count(values.reduce((sum, value) => sum + value, 0))} messages`);
  setText(row.last, topic.last ? age(now() - topic.last) : "none");
  row.last.title = topic.last ? date(topic.last) : "none since the monitor started";
}

function showCounts(matching, shown, filterText) {
  const known = topics.size;
  const all = filterText ? `${count(matching)} of ${count(known)}` : count(known);
  const limitText = topicsInDatabase > limit ? `, the busiest of ${count(topicsInDatabase)}` : "";
  setText(byId("topics-note"), known ? `${all}${limitText}` : "");
  show(byId("no-topics"), matching === 0 && state.is === "live");
  setText(
    byId("no-topics"),
    known ? "No topic matches the filter." : "There are no topics yet. Add a rule that names a topic to create it.",
  );
  show(byId("more"), shown < matching);
  setText(byId("more-button"), `Show all ${count(matching)}`);
  for (const name of rows.keys()) if (!topics.has(name)) rows.delete(name);
}

// User input

byId("filter").addEventListener("input", () => render(true));
byId("more-button").addEventListener("click", () => {
  showsAll = true;
  render(true);
});
for (const button of document.querySelectorAll("[data-sort]")) {
  button.addEventListener("click", () => {
    const by = button.dataset.sort;
    // The first click on a column of numbers sorts the largest first.
    sorting.isDescending = sorting.by === by ? !sorting.isDescending : by !== "topic";
    sorting.by = by;
    for (const head of document.querySelectorAll("th[aria-sort]")) head.removeAttribute("aria-sort");
    button.closest("th").setAttribute("aria-sort", sorting.isDescending ? "descending" : "ascending");
    render(true);
  });
}
setInterval(() => {
  if (document.documentElement.classList.contains("stale")) return;
  for (const row of rows.values()) if (row.element.isConnected) updateTimes(row, row.shown);
}, 1000);
