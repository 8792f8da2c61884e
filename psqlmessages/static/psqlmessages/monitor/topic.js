/** Topic: the page of one topic, made of parts: chart.js, events.js, topic_status.js, tail.js (with the filter). */

import { Chart } from "./chart.js";
import { addCard, byId, setText } from "./dom.js";
import { Events } from "./events.js";
import { age, count, date, rate, size } from "./format.js";
import { gettext } from "./i18n.js";
import { now, settings, start } from "./page.js";
import { Tail } from "./tail.js";
import { TopicStatus } from "./topic_status.js";

const CARDS = [
  [gettext("Messages per second"), (t) => [rate(t.rate), gettext("mean of 5 s")]],
  [gettext("Bytes per second"), (t) => [size(t.size_rate), gettext("mean of 5 s")]],
  [gettext("Messages"), (t) => [count(t.count), gettext("{size} since the monitor started", { size: size(t.size) })]],
  [gettext("Last message"), (t) => (t.last ? [age(now() - t.last), date(t.last)] : [gettext("none"), gettext("since the monitor started")])],
];

const chart = new Chart();
const events = new Events(settings.name);
const status = new TopicStatus(byId("status"), settings.ruleUrl);
const tail = new Tail();
const cards = CARDS.map(([name, read]) => ({ ...addCard(byId("totals"), name), read }));
let state = { since: null, gaps: [] };
let topic = null;

start(settings.name, (frame) => {
  state = frame.state ?? state;
  events.update(frame);
  chart.update(frame);
  if (frame.topic) {
    topic = frame.topic;
    status.update(topic, state.is === "live");
    tail.update(frame);
  }
  draw();
});

function draw() {
  if (topic === null || document.documentElement.classList.contains("stale")) return;
  chart.draw(now(), state);
  for (const { value, note, read } of cards) {
    const [text, noteText] = read(topic);
    setText(value, text);
    setText(note, noteText);
  }
}

setInterval(draw, 500);
