/** Health: server metrics. Unknown values are shown as such, never as 0. */

import { byId, h, setText } from "./dom.js";
import { count, duration, percent, size, UNKNOWN } from "./format.js";

const QUEUE_LIMIT = 0.1;
const LOCK_SECONDS = 1;
const LAG_SECONDS = 1;

const known = (value, format) => (value === null || value === undefined ? UNKNOWN : format(value));

function queue({ usage, holders }) {
  const holder = holders?.[0];
  const isWrong = usage >= QUEUE_LIMIT || Boolean(holder);
  const who = holder
    ? `${holder.has_node ? "" : "perhaps "}held back by pid ${holder.pid} (${holder.role ?? "?"},` +
      ` ${holder.program || "no name"}), ${holder.wait === "ClientWrite" ? "which does not read" : holder.state}` +
      ` for ${duration(holder.seconds)}`
    : holders === null || holders === undefined ? `the blocking session is ${UNKNOWN}` : "no session holds it back";
  return [known(usage, percent), known(usage, () => who), isWrong];
}

function commitLock({ waiting, waiting_seconds: seconds, waiting_for: pid }) {
  const isWrong = waiting > 0 && seconds >= LOCK_SECONDS;
  const who = waiting ? `longest ${duration(seconds)}, for pid ${pid ?? "?"}` : "commits that notify";
  return [known(waiting, (n) => `${count(n)} waiting`), known(waiting, () => who), isWrong];
}

const CARDS = [
  ["Notification queue", queue],
  ["NOTIFY lock", commitLock],
  ["Sessions", (f) => [known(f.sessions, count), known(f.nodes, (n) => `with ${count(n)} nodes`), false]],
  ["Large bodies", (f) => [known(f.bodies, (n) => `≈ ${count(n)}`), known(f.bodies_size, (n) => `${size(n)} on disk`), false]],
  ["Database round trip", (f) => [known(f.round_trip, duration), "one small query", f.round_trip > LAG_SECONDS]],
  [
    "Lag",
    (f) => [
      known(f.echo, duration),
      `to the hub; page and back ${known(f.lag, duration)}`,
      f.echo > LAG_SECONDS || f.lag > LAG_SECONDS,
    ],
  ],
];

/** The strip of metrics. */
export class Health {
  #figures = {};
  #cards = CARDS.map(([name, read]) => {
    const value = h("dd", { class: "value" }, "…");
    const note = h("dd", { class: "note" });
    const card = h("div", {}, h("dt", {}, name), value, note);
    byId("health").append(card);
    return { card, value, note, read };
  });

  /** Show the metrics and the lag of a frame. */
  take(frame) {
    if (frame.health !== undefined) this.#figures = frame.health ?? {};
    if (frame.op === "snapshot" && !frame.health) return;
    this.#figures.lag = frame.lag;
    for (const { card, value, note, read } of this.#cards) {
      const [text, more, isWrong] = read(this.#figures);
      setText(value, text);
      setText(note, more === UNKNOWN ? "" : more);
      card.classList.toggle("wrong", isWrong);
      card.classList.toggle("unknown", text === UNKNOWN);
    }
  }
}
