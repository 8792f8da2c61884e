/** Rates: computed from counters that only grow. */

const WINDOW_SECONDS = 10;
// Drop older samples after a longer gap: a hidden page does not request data.
const GAP_SECONDS = 20;

/** The counters of the last seconds. */
export class Rates {
  /** @type {{at: number, counts: Map<string, number>}[]} oldest first */
  #samples = [];

  /** Add the counters of a frame; ignore a frame that was already added. */
  take({ now, exchanges }) {
    if (this.#samples.at(-1)?.at === now) return;
    if (this.#samples.at(-1)?.at < now - GAP_SECONDS) this.#samples = [];
    const counts = new Map();
    for (const { id, counts: outcomes, destinations } of exchanges) {
      for (const outcome of ["ok", "no_route", "too_many_hops", "failed"]) {
        counts.set(`${id} ${outcome}`, outcomes[outcome] ?? 0);
      }
      destinations.forEach((destination, position) => counts.set(`${id} ${position}`, destination.count));
    }
    this.#samples.push({ at: now, counts });
    // Keep the newest sample that is old enough for comparison.
    while (this.#samples.length > 2 && this.#samples[1].at <= now - WINDOW_SECONDS) this.#samples.shift();
  }

  /** The growth of a counter per second; null while it is unknown. */
  of(key) {
    const [last, first] = [this.#samples.at(-1), this.#samples.find(({ counts }) => counts.has(key))];
    if (!last || !first || first === last || !last.counts.has(key)) return null;
    const grown = last.counts.get(key) - first.counts.get(key);
    // The counter was reset, so its growth is unknown.
    return grown < 0 ? null : grown / (last.at - first.at);
  }

  /** The sum of several rates; null while one of them is unknown. */
  sum(keys) {
    const all = keys.map((key) => this.of(key));
    return all.includes(null) ? null : all.reduce((total, each) => total + each, 0);
  }
}
