/** Jobs: status of the pipeline's jobs. A job without a heartbeat is not shown as running. */

import { byId, h, setText, show } from "./dom.js";
import { age, count, duration, rate } from "./format.js";
import { Table } from "./table.js";

const TEXTS = { starting: "starting", running: "running", waiting: "waiting for the database", stopped: "stopped", failed: "failed" };

const table = new Table(byId("jobs"), ["", "", "number", "number", "number wide", "wide", "wide"]);

/** Show the jobs of a frame. */
export function showJobs({ jobs, now }) {
  show(byId("no-jobs"), jobs.length === 0);
  show(byId("jobs-box"), jobs.length > 0);
  const alive = jobs.filter((job) => job.is_alive).length;
  setText(byId("jobs-note"), jobs.length ? `${count(alive)} of ${count(jobs.length)} alive` : "");
  table.fill(jobs, ({ name }) => name, (job) => row(job, now));
}

function row(job, now) {
  const silence = Math.max(0, now - job.seen_at);
  const isOver = job.state === "stopped" || job.state === "failed";
  const isLost = !isOver && !job.is_alive;
  const isLive = job.is_alive;
  return [
    (cell) => nameAndFault(cell, job),
    { is: isLost ? "lost" : job.state, text: isLost ? `no heartbeat for ${passed(silence)}` : (TEXTS[job.state] ?? job.state) },
    isLive && job.lag_seconds !== null ? lag(job.lag_seconds) : "-",
    isLive ? rate(job.rows_per_second) : "-",
    count(job.rows),
    job.last_batch < 0 ? "none yet" : `${count(job.last_batch)}, ${job.last_batch_at ? age(now - job.last_batch_at) : "at an unknown time"}`,
    age(silence),
  ];
}

function nameAndFault(cell, { name, error }) {
  if (!cell.firstChild) cell.append(h("span"), h("span", { class: "fault" }));
  setText(cell.firstChild, name);
  setText(cell.lastChild, error);
  show(cell.lastChild, error !== "");
}

const lag = (seconds) => (seconds === 0 ? "none" : duration(seconds));

/** A duration in one unit, from seconds to days. */
export function passed(seconds) {
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.floor(seconds / 3600)} h` : `${Math.floor(seconds / 86400)} d`;
}
