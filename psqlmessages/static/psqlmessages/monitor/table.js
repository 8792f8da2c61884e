/** Table: updates rows in place, so that focus and selection stay. */

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
    const keys = new Set();
    entries.forEach((entry, index) => {
      const key = keyOf(entry);
      keys.add(key);
      const cells = cellsOf(entry);
      let row = this.#rows.get(key);
      if (!row) this.#rows.set(key, (row = this.#makeRow(cells)));
      cells.forEach((cell, column) => setCell(row.children[column], cell));
      if (this.#body.children[index] !== row) this.#body.insertBefore(row, this.#body.children[index] ?? null);
    });
    for (const [key, row] of this.#rows) {
      if (keys.has(key)) continue;
      row.remove();
      this.#rows.delete(key);
    }
  }

  #makeRow(cells) {
    const makeCell = (_, column) => h(column ? "td" : "th", { scope: column ? null : "row", class: this.#classes[column] });
    return h("tr", {}, ...cells.map(makeCell));
  }
}

function setCell(cell, value) {
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
