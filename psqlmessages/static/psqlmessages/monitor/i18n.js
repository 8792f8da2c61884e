/**
 * Translation: texts in the reader's language, from the catalog that Django serves (monitor/texts.js).
 * Without the catalog, as in reports and other pages, the texts are English.
 */

const catalog = globalThis.django ?? {};

/** Translate a text, and insert values for its {names}. */
export const gettext = (text, values) => insert(catalog.gettext?.(text) ?? text, values);

/** Translate a text whose form depends on a number. */
export const ngettext = (one, many, number, values) =>
  insert(catalog.ngettext?.(one, many, number) ?? (number === 1 ? one : many), values);

function insert(text, values) {
  return values ? text.replace(/\{(\w+)\}/g, (place, name) => values[name] ?? place) : text;
}
