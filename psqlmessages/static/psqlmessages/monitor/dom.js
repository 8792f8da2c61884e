/** DOM: elements made and changed. Whatever comes from topics, idents or bodies is text. */

const SVG = "http://www.w3.org/2000/svg";

/** The element of an id, which the page has. */
export const byId = (id) => document.getElementById(id);

/**
 * Make an element.
 *
 * @param {string} tag
 * @param {Record<string, string|number|null|undefined>} attributes those that are null are left out
 * @param {...(Node|string|null)} children strings become text
 */
export function h(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** Make an element of an SVG. */
export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

/** Set an element's text, unless it is that. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Hide an element or show it. */
export function show(element, isShown) {
  if (element.hidden === isShown) element.hidden = !isShown;
}
