/** Table: rows are updated in place, so that focus and selection stay. */

import { h, setText } from "./dom.js";

/**
 * @typedef {string|{text: string, url?: string, class?: string, is?: string}|((cell: HTMLElement) => void)} Cell
 *   `is`: the state shown by a mark before the text; a function fills the cell itself
 */

/** The body of a table. */
export class Table {
  #body;
  #classes;
  #rows = new Map();

  /**
   * @param {HTMLElement} body
   * @param {string[]} [classes] of the cells, by column
   */
  constructor(body, classes = []) {
    this.#body = body;
    this.#classes = classes;
  }

  /**
   * Show an entry in each row.
   *
   * @template T
   * @param {T[]} entries
   * @param {(entry: T) => string} keyOf
   * @param {(entry: T) => Cell[]} cellsOf
   */
  fill(entries, keyOf, cellsOf) {
    const kept = new Set();
    entries.forEach((entry, place) => {
      const key = keyOf(entry);
      kept.add(key);
      const cells = cellsOf(entry);
      let row = this.#rows.get(key);
      if (!row) this.#rows.set(key, (row = this.#made(cells)));
      cells.forEach((cell, at) => put(row.children[at], cell));
      if (this.#body.children[place] !== row) this.#body.insertBefore(row, this.#body.children[place] ?? null);
    });
    for (const [key, row] of this.#rows) {
      if (kept.has(key)) continue;
      row.remove();
      this.#rows.delete(key);
    }
  }

  #made(cells) {
    const made = (_, at) => h(at ? "td" : "th", { scope: at ? null : "row", class: this.#classes[at] });
    return h("tr", {}, ...cells.map(made));
  }
}

function put(cell, value) {
  if (typeof value === "function") {
    value(cell);
    return;
  }
  const { text, url, is } = typeof value === "string" ? { text: value } : value;
  if (!url && !is) {
    setText(cell, text);
    return;
  }
  let inner = cell.firstElementChild;
  if (!inner) cell.replaceChildren((inner = url ? h("a") : h("span", { class: "state" })));
  if (url && inner.getAttribute("href") !== url) inner.setAttribute("href", url);
  if (is && inner.dataset.is !== is) inner.dataset.is = is;
  setText(inner, text);
}
