/** Topic: the page of one topic. */

import { Chart } from "./chart.js";
import { byId, h, setText } from "./dom.js";
import { Events } from "./events.js";
import { age, count, date, rate, size } from "./format.js";
import { now, settings, start } from "./page.js";
import { Tail } from "./tail.js";
import { TopicStatus } from "./topic_status.js";

const CARDS = [
  ["Messages per second", (t) => [rate(t.rate), "mean of 5 s"]],
  ["Bytes per second", (t) => [size(t.size_rate), "mean of 5 s"]],
  ["Messages", (t) => [count(t.count), `${size(t.size)} since the monitor started`]],
  ["Last message", (t) => (t.last ? [age(now() - t.last), date(t.last)] : ["none", "since the monitor started"])],
];

const chart = new Chart();
const events = new Events(settings.name);
const status = new TopicStatus(byId("who"), settings.ruleUrl);
const tail = new Tail();
const cards = CARDS.map(([name, read]) => {
  const [value, note] = [h("dd", { class: "value" }, "…"), h("dd", { class: "note" })];
  byId("totals").append(h("div", {}, h("dt", {}, name), value, note));
  return { value, note, read };
});
let state = { since: null, gaps: [] };
let topic = null;

start(settings.name, (frame) => {
  state = frame.state ?? state;
  events.take(frame);
  chart.take(frame);
  if (frame.topic) {
    topic = frame.topic;
    status.take(topic, state.is === "live");
    tail.take(frame);
  }
  draw();
});

function draw() {
  if (topic === null || document.documentElement.classList.contains("stale")) return;
  chart.draw(now(), state);
  for (const { value, note, read } of cards) {
    const [text, more] = read(topic);
    setText(value, text);
    setText(note, more);
  }
}

setInterval(draw, 500);
