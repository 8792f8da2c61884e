/** Rates: from counts that only grow, how fast they do. */

const WINDOW_SECONDS = 10;
// What was long ago says nothing of now: a page that was not seen asks for nothing.
const GAP_SECONDS = 20;

/** The counts of the last seconds. */
export class Rates {
  /** @type {{at: number, counts: Map<string, number>}[]} oldest first */
  #samples = [];

  /** Take the counts of a frame; one that was seen before says nothing new. */
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
    // The newest of those that are old enough stays, to compare with.
    while (this.#samples.length > 2 && this.#samples[1].at <= now - WINDOW_SECONDS) this.#samples.shift();
  }

  /** How much a count grew in a second; null as long as that is not known. */
  of(key) {
    const [last, first] = [this.#samples.at(-1), this.#samples.find(({ counts }) => counts.has(key))];
    if (!last || !first || first === last || !last.counts.has(key)) return null;
    const grown = last.counts.get(key) - first.counts.get(key);
    // It was counted anew: what it grew by before is lost.
    return grown < 0 ? null : grown / (last.at - first.at);
  }

  /** The sum over several counts; null as long as one is not known. */
  sum(keys) {
    const all = keys.map((key) => this.of(key));
    return all.includes(null) ? null : all.reduce((total, each) => total + each, 0);
  }
}
