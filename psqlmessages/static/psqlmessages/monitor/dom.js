/** DOM: creating and updating elements. Topics, idents and bodies are only ever inserted as text. */

const SVG = "http://www.w3.org/2000/svg";

/** Return the element with this id; null if there is none. */
export const byId = (id) => document.getElementById(id);

/**
 * Create an element.
 *
 * @param {string} tag
 * @param {Record<string, string|number|null|undefined>} attributes null values are omitted
 * @param {...(Node|string|null)} children strings become text
 */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Create an SVG element. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

/** A list of names, each in an element of its own, so that U+202E in one does not reverse the others. */
export const nameList = (names) => names.flatMap((name, index) => [index ? ", " : null, h("bdi", {}, name)]);

/** Add a card with this name to a strip of cards; return the card, and its elements for value and note. */
export function addCard(strip, name) {
  const [value, note] = [h("dd", { class: "value" }, "…"), h("dd", { class: "note" })];
  const card = h("div", {}, h("dt", {}, name), value, note);
  strip.append(card);
  return { card, value, note };
}

/** Set an element's text if it differs. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Show or hide an element. */
export function show(element, isShown) {
  if (element.hidden === isShown) element.hidden = !isShown;
}
