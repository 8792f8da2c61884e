/** Topics: the filtered and sorted list of all topics, with health and events. */

import { byId, h, setText, show } from "./dom.js";
import { Events } from "./events.js";
import { age, count, date, rate, size } from "./format.js";
import { Health } from "./health.js";
import { now, start, topicUrl } from "./page.js";
import { BUCKET_SECONDS, draw, sparkline } from "./sparkline.js";

const SHOWN = 200;
const KEPT_BUCKETS = 61;
// Sort at most this often, so that rows can be read before they move.
const SORT_MS = 2000;

/** @type {Map<string, object>} */
const topics = new Map();
/** @type {Map<string, object>} the row of each topic shown so far */
const rows = new Map();
const body = byId("topics");
const health = new Health();
const events = new Events();
const sorting = { by: "topic", isDescending: false, at: 0 };
let state = { since: null, gaps: [] };
let there = 0;
let limit = Infinity;
let isAll = false;
let order = [];

start(null, (frame) => {
  if (frame.op === "snapshot") {
    topics.clear();
    limit = frame.limit;
  }
  state = frame.state ?? state;
  there = frame.topics_there ?? there;
  for (const name of frame.gone ?? []) topics.delete(name);
  for (const row of frame.topics ?? []) take(row);
  health.take(frame);
  events.take(frame);
  render(frame.op === "snapshot" || Boolean(frame.gone?.length));
});

function take(row) {
  const buckets = topics.get(row.topic)?.bucketMap ?? new Map();
  const [first, ...numbers] = row.buckets;
  for (const [place, messages] of numbers.entries()) buckets.set(first + place, messages);
  const oldest = now() / BUCKET_SECONDS - KEPT_BUCKETS;
  for (const bucket of buckets.keys()) if (bucket < oldest) buckets.delete(bucket);
  topics.set(row.topic, { ...row, bucketMap: buckets });
}

// List

function render(isSortedAnew) {
  const isRead = body.matches(":hover, :focus-within");
  const isNew = order.length !== topics.size;
  if (isSortedAnew || isNew || (performance.now() - sorting.at > SORT_MS && !isRead)) sort();
  const wanted = byId("filter").value.trim().toLowerCase();
  const found = order.filter((name) => topics.has(name) && fits(topics.get(name), wanted));
  const shown = isAll ? found : found.slice(0, SHOWN);
  place(shown.map((name) => update(topics.get(name))));
  describe(found.length, shown.length, wanted);
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

function fits(topic, wanted) {
  const names = [topic.topic, ...topic.notifiers, ...topic.listeners];
  return wanted === "" || names.some((name) => name.toLowerCase().includes(wanted));
}

/** Put these rows into the table. Move only rows in a wrong place: a moved row loses the focus. */
function place(elements) {
  const wanted = new Set(elements);
  for (const element of [...body.children]) if (!wanted.has(element)) element.remove();
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
    members(row.notifiers, topic.notifiers, topic.notifier_count);
    members(row.listeners, topic.listeners, topic.listener_count);
    setText(row.rate, rate(topic.rate));
    setText(row.size, size(topic.size_rate));
    row.element.classList.toggle("busy", topic.rate > 0);
  }
  tell(row, topic);
  return row.element;
}

function makeRow(name) {
  const [notifiers, listeners, last] = [h("td", { class: "names" }), h("td", { class: "names" }), h("time")];
  const [rate, size, spark] = [h("td", { class: "number" }), h("td", { class: "number wide" }), sparkline()];
  const element = h(
    "tr", {},
    h("th", { scope: "row" }, h("a", { href: topicUrl(name) }, name)),
    notifiers, listeners, rate, size,
    h("td", { class: "wide" }, spark),
    h("td", { class: "number" }, last),
  );
  return { element, notifiers, listeners, rate, size, spark, last, shown: null };
}

function members(cell, names, number) {
  const more = number > names.length ? `, +${count(number - names.length)}` : "";
  const text = `${number}\n${names.join(", ")}${more}`;
  if (cell.dataset.shown === text) return;
  cell.dataset.shown = text;
  cell.classList.toggle("none", number === 0);
  cell.title = names.join(", ") + more;
  cell.replaceChildren(h("b", {}, count(number)), h("span", {}, names.join(", ") + more));
}

/** Update the cells that change with time only. */
function tell(row, topic) {
  draw(row.spark, topic.bucketMap, now(), state);
  setText(row.last, topic.last ? age(now() - topic.last) : "none");
  row.last.title = topic.last ? date(topic.last) : "none since the monitor started";
}

function describe(found, shown, wanted) {
  const known = topics.size;
  const all = wanted ? `${count(found)} of ${count(known)}` : count(known);
  const over = there > limit ? `, the busiest of ${count(there)}` : "";
  setText(byId("topics-note"), known ? `${all}${over}` : "");
  show(byId("no-topics"), found === 0 && state.is === "live");
  setText(
    byId("no-topics"),
    known ? "No topic matches the filter." : "There are no topics yet. Add a rule that names a topic to create it.",
  );
  show(byId("more"), shown < found);
  setText(byId("more-button"), `Show all ${count(found)}`);
  for (const name of rows.keys()) if (!topics.has(name)) rows.delete(name);
}

// User input

byId("filter").addEventListener("input", () => render(true));
byId("more-button").addEventListener("click", () => {
  isAll = true;
  render(true);
});
for (const button of document.querySelectorAll("[data-sort]")) {
  button.addEventListener("click", () => {
    const by = button.dataset.sort;
    // Numbers sort from the largest by default.
    sorting.isDescending = sorting.by === by ? !sorting.isDescending : by !== "topic";
    sorting.by = by;
    for (const head of document.querySelectorAll("th[aria-sort]")) head.removeAttribute("aria-sort");
    button.closest("th").setAttribute("aria-sort", sorting.isDescending ? "descending" : "ascending");
    render(true);
  });
}
setInterval(() => {
  if (document.documentElement.classList.contains("stale")) return;
  for (const row of rows.values()) if (row.element.isConnected) tell(row, row.shown);
}, 1000);
