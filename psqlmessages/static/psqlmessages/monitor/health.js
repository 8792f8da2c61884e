/** Health: server metrics. A value that the server does not know is shown as "unknown", not as 0. */

import { addCard, byId, setText } from "./dom.js";
import { count, duration, percent, size, UNKNOWN } from "./format.js";
import { gettext, ngettext } from "./i18n.js";

// From these values on, a card shows a problem.
const QUEUE_LIMIT = 0.1;
const LOCK_SECONDS = 1;
const LAG_SECONDS = 1;

const orUnknown = (value, format) => (value === null || value === undefined ? UNKNOWN : format(value));

function notificationQueue({ usage, holders }) {
  const holder = holders?.[0];
  const isProblem = usage >= QUEUE_LIMIT || Boolean(holder);
  let note = holders ? gettext("no session holds it back") : gettext("the blocking session is unknown");
  if (holder) {
    const values = {
      pid: holder.pid, role: holder.role ?? "?", program: holder.program || gettext("no name"),
      activity: holder.wait === "ClientWrite" ? gettext("which does not read") : holder.state, time: duration(holder.seconds),
    };
    note = holder.has_node
      ? gettext("held back by pid {pid} ({role}, {program}), {activity} for {time}", values)
      : gettext("perhaps held back by pid {pid} ({role}, {program}), {activity} for {time}", values);
  }
  return [orUnknown(usage, percent), orUnknown(usage, () => note), isProblem];
}

function commitLock({ waiting, waiting_seconds: seconds, waiting_for: pid }) {
  const isProblem = waiting > 0 && seconds >= LOCK_SECONDS;
  const note = waiting
    ? gettext("longest wait {time}, for pid {pid}", { time: duration(seconds), pid: pid ?? "?" })
    : gettext("commits with notifications");
  return [orUnknown(waiting, (n) => gettext("{number} waiting", { number: count(n) })), orUnknown(waiting, () => note), isProblem];
}

// The name of each card, and a function that returns its value, its note, and whether there is a problem.
const CARDS = [
  [gettext("Notification queue"), notificationQueue],
  [gettext("NOTIFY lock"), commitLock],
  [gettext("Sessions"), (health) => [orUnknown(health.sessions, count), orUnknown(health.nodes, (n) => ngettext("with {number} node", "with {number} nodes", n, { number: count(n) })), false]],
  [gettext("Stored large messages"), (health) => [orUnknown(health.bodies, (n) => `≈ ${count(n)}`), orUnknown(health.bodies_size, (n) => gettext("{size} on disk", { size: size(n) })), false]],
  [gettext("Database round trip"), (health) => [orUnknown(health.round_trip, duration), gettext("one small query"), health.round_trip > LAG_SECONDS]],
  [
    gettext("Lag"),
    (health) => [
      orUnknown(health.echo, duration),
      gettext("database to hub; server to page and back: {time}", { time: orUnknown(health.lag, duration) }),
      health.echo > LAG_SECONDS || health.lag > LAG_SECONDS,
    ],
  ],
];

/** The strip of metrics. */
export class Health {
  #values = {};
  #cards = CARDS.map(([name, read]) => ({ ...addCard(byId("health"), name), read }));

  /** Show the metrics and the lag of a frame. */
  update(frame) {
    if (frame.health !== undefined) this.#values = frame.health ?? {};
    if (frame.op === "snapshot" && !frame.health) return;
    this.#values.lag = frame.lag;
    for (const { card, value, note, read } of this.#cards) {
      const [text, noteText, isProblem] = read(this.#values);
      setText(value, text);
      setText(note, noteText === UNKNOWN ? "" : noteText);
      card.classList.toggle("wrong", isProblem);
      card.classList.toggle("unknown", text === UNKNOWN);
    }
  }
}
