/** Topics: the list of topics, with health and events. The server filters and sorts, and sends one page of the list. */

import { byId, h, nameList, setText, show } from "./dom.js";
import { Events } from "./events.js";
import { age, count, date, messagesText, rate, size } from "./format.js";
import { Health } from "./health.js";
import { gettext } from "./i18n.js";
import { connect } from "./live.js";
import { now, start, topicUrl } from "./page.js";
import { BUCKET_SECONDS, drawSparkline, lastBuckets, sparkline } from "./sparkline.js";

const STORED_BUCKETS = 61;
const TYPING_MS = 250;
// While the pointer or the focus is in the list, the rows keep their places for this long.
const READING_MS = 10_000;
const DEFAULTS = { q: "", sort: "-rate", page: 1 };

/** @type {Map<string, object>} */
const topics = new Map();
/** @type {Map<string, object>} the table rows created so far, by topic */
const rows = new Map();
const body = byId("topics");
const health = new Health();
const events = new Events();
let state = { since: null, gaps: [] };
let query = readUrl();
/** The shown page of the list: the last one for this query; null until the server has sent it. */
let page = null;
let arrangedAt = 0;

const connection = start(null, onFrame, connect, query);

function onFrame(frame) {
  if (frame.op === "snapshot") topics.clear();
  state = frame.state ?? state;
  for (const row of frame.topics ?? []) updateTopic(row);
  health.update(frame);
  events.update(frame);
  if (frame.list && frame.list.search === query.q.trim() && frame.list.sort === query.sort && frame.list.page === query.page) {
    const isNew = page === null;
    page = frame.list;
    const isInUse = body.matches(":hover, :focus-within") && performance.now() - arrangedAt < READING_MS;
    if (isNew || !isInUse) arrange();
    showCounts();
  }
  for (const row of body.children) update(row.dataset.topic);
}

function updateTopic(row) {
  const buckets = topics.get(row.topic)?.bucketMap ?? new Map();
  const [first, ...numbers] = row.buckets;
  for (const [index, messages] of numbers.entries()) buckets.set(first + index, messages);
  const oldest = now() / BUCKET_SECONDS - STORED_BUCKETS;
  for (const bucket of buckets.keys()) if (bucket < oldest) buckets.delete(bucket);
  topics.set(row.topic, { ...row, bucketMap: buckets });
}

// Rows

/** Show the rows in the order of the page. Moves only rows in a wrong place: a moved row loses the focus. */
function arrange() {
  arrangedAt = performance.now();
  const names = new Set(page.names);
  for (const name of rows.keys()) {
    if (names.has(name)) continue;
    rows.get(name).element.remove();
    rows.delete(name);
    topics.delete(name);
  }
  let next = body.firstChild;
  for (const name of page.names) {
    if (!rows.has(name)) rows.set(name, makeRow(name));
    const { element } = rows.get(name);
    if (element === next) next = next.nextSibling;
    else body.insertBefore(element, next);
  }
}

function update(name) {
  const [row, topic] = [rows.get(name), topics.get(name)];
  if (!topic) return;
  if (row.shown !== topic) {
    row.shown = topic;
    showNames(row.senders, topic.senders, topic.sender_count);
    showNames(row.listeners, topic.listeners, topic.listener_count);
    setText(row.rate, rate(topic.rate));
    setText(row.size, size(topic.size_rate));
    row.element.classList.toggle("busy", topic.rate > 0);
  }
  updateTimes(row, topic);
}

function makeRow(name) {
  const senders = h("td", { class: "names" });
  const listeners = h("td", { class: "names" });
  const rate = h("td", { class: "number" });
  const size = h("td", { class: "number wide" });
  const spark = sparkline();
  const last = h("time");
  const element = h(
    "tr", { "data-topic": name },
    h("th", { scope: "row" }, h("a", { href: topicUrl(name) }, h("bdi", {}, name))),
    senders, listeners, rate, size,
    h("td", { class: "wide" }, spark),
    h("td", { class: "number" }, last),
  );
  return { element, senders, listeners, rate, size, spark, last, shown: null };
}

function showNames(cell, names, number) {
  const more = number > names.length ? `+${count(number - names.length)}` : null;
  // Each name is on a line of its own, where U+202E in one does not reverse the others.
  const text = [...names, more].filter(Boolean).join("\n");
  const key = `${number}\n${text}`;
  if (cell.dataset.shown === key) return;
  cell.dataset.shown = key;
  cell.classList.toggle("none", number === 0);
  cell.title = text;
  cell.replaceChildren(h("b", {}, count(number)), h("span", {}, ...nameList(names), more && `, ${more}`));
}

/** Update the cells that change with time, even without a frame. */
function updateTimes(row, topic) {
  const values = lastBuckets(topic.bucketMap, now(), state);
  drawSparkline(row.spark, values, messagesText(values.reduce((sum, value) => sum + value, 0)));
  setText(row.last, topic.last ? age(now() - topic.last) : gettext("none"));
  row.last.title = topic.last ? date(topic.last) : gettext("none since the monitor started");
}

function showCounts() {
  const { names, total, size: pageSize } = page;
  const first = (query.page - 1) * pageSize + 1;
  const values = { first: count(first), last: count(first + names.length - 1), total: count(total) };
  setText(byId("topics-note"), names.length ? gettext("{first} to {last} of {total}", values) : "");
  show(byId("no-topics"), names.length === 0);
  setText(
    byId("no-topics"),
    query.q || query.page > 1 ? gettext("No topic matches the filter.") : gettext("There are no topics yet. Add a rule that names a topic to create it."),
  );
  show(byId("previous"), query.page > 1);
  show(byId("next"), first + names.length - 1 < total);
}

// Filter, sort and page, which are in the URL

function readUrl() {
  const values = new URLSearchParams(location.search);
  const page = Number(values.get("page") ?? 1);
  const sorts = [...document.querySelectorAll("[data-sort]")].flatMap(({ dataset }) => [dataset.sort, `-${dataset.sort}`]);
  const sort = values.get("sort");
  return {
    q: (values.get("q") ?? "").slice(0, 100),
    sort: sorts.includes(sort) ? sort : DEFAULTS.sort,
    page: Number.isInteger(page) && page >= 1 && page <= 10_000 ? page : 1,
  };
}

function changeQuery(changes) {
  query = { ...query, ...changes };
  page = null;
  const changed = Object.entries(query).filter(([name, value]) => value !== DEFAULTS[name]);
  history.replaceState(null, "", changed.length ? `?${new URLSearchParams(changed)}` : location.pathname);
  showSort();
  connection.watchList(query);
}

function showSort() {
  for (const button of document.querySelectorAll("[data-sort]")) {
    const isSorted = query.sort.replace(/^-/, "") === button.dataset.sort;
    const direction = query.sort.startsWith("-") ? "descending" : "ascending";
    if (isSorted) button.closest("th").setAttribute("aria-sort", direction);
    else button.closest("th").removeAttribute("aria-sort");
  }
}

let typingTimer = 0;
byId("filter").value = query.q;
byId("filter").addEventListener("input", ({ target }) => {
  clearTimeout(typingTimer);
  typingTimer = setTimeout(() => changeQuery({ q: target.value, page: 1 }), TYPING_MS);
});
byId("previous").addEventListener("click", () => changeQuery({ page: query.page - 1 }));
byId("next").addEventListener("click", () => changeQuery({ page: query.page + 1 }));
for (const button of document.querySelectorAll("[data-sort]")) {
  button.addEventListener("click", () => {
    const { sort } = button.dataset;
    // The first click on a column of numbers sorts the largest first.
    const isDescending = query.sort.replace(/^-/, "") === sort ? !query.sort.startsWith("-") : sort !== "topic";
    changeQuery({ sort: isDescending ? `-${sort}` : sort, page: 1 });
  });
}
showSort();
setInterval(() => {
  if (document.documentElement.classList.contains("stale")) return;
  for (const row of rows.values()) if (row.shown) updateTimes(row, row.shown);
}, 1000);
