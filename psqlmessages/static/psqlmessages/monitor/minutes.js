/** Minutes: the history chart of a topic or a queue, from counts per minute. Periods without counts are gaps. */

import { byId, setText } from "./dom.js";
import { count, date, messagesText, size } from "./format.js";
import { gettext } from "./i18n.js";
import { BYTES, draw, localTime } from "./panels.js";

const INTERVAL_MS = 20_000;
const TIMEOUT_MS = 6000;

const chart = byId("history");
const buttons = chart ? [...chart.closest("section").querySelectorAll("[data-seconds]")] : [];
let timer = 0;
let seconds = "3600";

for (const button of buttons) {
  button.addEventListener("click", () => {
    seconds = button.dataset.seconds;
    for (const each of buttons) each.setAttribute("aria-pressed", each === button);
    refresh();
  });
}
document.addEventListener("visibilitychange", refresh);
if (chart) refresh();

async function refresh() {
  clearTimeout(timer);
  if (!chart || document.hidden) return;
  const requested = seconds;
  try {
    const options = { cache: "no-store", redirect: "error", signal: AbortSignal.timeout(TIMEOUT_MS) };
    const response = await fetch(`${chart.dataset.url}&seconds=${requested}`, options);
    const frame = response.ok ? await response.json() : null;
    if (requested !== seconds) return;
    chart.classList.toggle("outdated", frame === null);
    if (frame) show(frame);
    else setText(byId("history-note"), chart.dataset.unread);
  } catch {
    chart.classList.add("outdated");
    setText(byId("history-note"), chart.dataset.unread);
  } finally {
    if (requested === seconds) timer = setTimeout(refresh, INTERVAL_MS);
  }
}

function show(frame) {
  const { begin, step, now, kind } = frame;
  const points = new Map(frame.points.map(([at, ...values]) => [at, values]));
  const unknown = new Set(frame.unknown);
  const times = Array.from({ length: frame.seconds / step }, (_, index) => begin + index * step);
  let backlog = frame.backlog;
  const steps = times.map((at) => {
    const counted = Math.min(step, overlap(frame.periods, at, at + step));
    const values = points.get(at) ?? null;
    if (kind === "queue") backlog = values?.[3] ?? backlog;
    const isKnown = counted > 0 && at < now && !unknown.has(at);
    return { at, counted, values: values ?? [0, 0, 0], backlog: isKnown ? backlog : null, isKnown };
  });
  const line = (name, colour, index, describe) => ({
    name, colour,
    values: steps.map(({ isKnown, values, counted }) => (isKnown ? values[index] / counted : null)),
    texts: steps.map(({ at, values }) => `${date(at)}: ${describe(values[index])}`),
  });
  const sum = (index) => steps.reduce((total, { isKnown, values }) => total + (isKnown ? values[index] : 0), 0);
  draw(chart, times, step, kind === "topic" ? topicPanels(line) : queuePanels(line, steps), localTime, chart.dataset.unknown);
  setText(byId("history-note"), noteOf(kind, sum, steps.some(({ isKnown }) => isKnown)));
}

function topicPanels(line) {
  return [
    { title: gettext("messages/s"), minAxisMax: 0, isStep: true, lines: [line("messages", "accent", 0, messagesText)] },
    { title: gettext("bytes/s"), minAxisMax: 0, isStep: true, axis: BYTES, lines: [line("bytes", "second", 1, size)] },
  ];
}

function queuePanels(line, steps) {
  const backlogLine = {
    name: gettext("backlog"), colour: "accent", values: steps.map(({ backlog }) => backlog),
    texts: steps.map(({ at, backlog }) => `${date(at)}: ${gettext("{number} in the queue", { number: count(backlog ?? 0) })}`),
  };
  return [
    { title: gettext("elements in the queue"), minAxisMax: 0, isStep: true, lines: [backlogLine] },
    { title: gettext("elements/s"), minAxisMax: 0, lines: [
      line(gettext("in"), "accent", 0, (number) => gettext("{number} in", { number: count(number) })),
      line(gettext("out"), "second", 1, (number) => gettext("{number} out", { number: count(number) })),
      line(gettext("removed"), "third", 2, (number) => gettext("{number} removed", { number: count(number) })),
    ] },
  ];
}

function noteOf(kind, sum, isAnyKnown) {
  if (!isAnyKnown) return chart.dataset.none;
  if (kind === "topic") return `${messagesText(sum(0))}, ${size(sum(1))}`;
  return gettext("{in} in, {out} out, {removed} removed", { in: count(sum(0)), out: count(sum(1)), removed: count(sum(2)) });
}

/** The number of seconds from `begin` to `end` in these periods. */
function overlap(periods, begin, end) {
  return periods.reduce((sum, [from, to]) => sum + Math.max(0, Math.min(end, to) - Math.max(begin, from)), 0);
}
