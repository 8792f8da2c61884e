/** Health: server metrics. A value that the server does not know is shown as "unknown", not as 0. */

import { addCard, byId, setText } from "./dom.js";
import { count, duration, percent, size, UNKNOWN } from "./format.js";

const QUEUE_LIMIT = 0.1;
const LOCK_SECONDS = 1;
const LAG_SECONDS = 1;

const orUnknown = (value, format) => (value === null || value === undefined ? UNKNOWN : format(value));

function queue({ usage, holders }) {
  const holder = holders?.[0];
  const isProblem = usage >= QUEUE_LIMIT || Boolean(holder);
  let note = holders ? "no session holds it back" : `the blocking session is ${UNKNOWN}`;
  if (holder) {
    const activity = holder.wait === "ClientWrite" ? "which does not read" : holder.state;
    note =
      `${holder.has_node ? "" : "perhaps "}held back by pid ${holder.pid} (${holder.role ?? "?"},` +
      ` ${holder.program || "no name"}), ${activity} for ${duration(holder.seconds)}`;
  }
  return [orUnknown(usage, percent), orUnknown(usage, () => note), isProblem];
}

function commitLock({ waiting, waiting_seconds: seconds, waiting_for: pid }) {
  const isProblem = waiting > 0 && seconds >= LOCK_SECONDS;
  const note = waiting ? `longest wait ${duration(seconds)}, for pid ${pid ?? "?"}` : "commits with notifications";
  return [orUnknown(waiting, (n) => `${count(n)} waiting`), orUnknown(waiting, () => note), isProblem];
}

// Each function returns the value, a note, and whether there is a problem.
const CARDS = [
  ["Notification queue", queue],
  ["NOTIFY lock", commitLock],
  ["Sessions", (health) => [orUnknown(health.sessions, count), orUnknown(health.nodes, (n) => `with ${count(n)} nodes`), false]],
  ["Large bodies", (health) => [orUnknown(health.bodies, (n) => `≈ ${count(n)}`), orUnknown(health.bodies_size, (n) => `${size(n)} on disk`), false]],
  ["Database round trip", (health) => [orUnknown(health.round_trip, duration), "one small query", health.round_trip > LAG_SECONDS]],
  [
    "Lag",
    (health) => [
      orUnknown(health.echo, duration),
      `database to hub; server to page and back: ${orUnknown(health.lag, duration)}`,
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
