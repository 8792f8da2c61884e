/**
 * JSON path: finds one field in JSON bodies, such as `$.order.id` or `$.items[0].id = 42`.
 *
 * The stored messages are searched alike on the server (stored_messages.py): a name applied to an array
 * applies to each of its elements, and 42 finds the number and the text. But here, numbers beyond 2^53 are
 * compared as JavaScript rounds them.
 */

const STEP = String.raw`\.([^\s.\[\]()=!<>?*"]+)|\[([0-9]{1,9})\]`;
const FIELD = new RegExp(String.raw`^\$((?:${STEP})+)(?:\s*==?\s*(.+))?$`, "s");

/** Whether a text is meant as a path. */
export const isPath = (text) => text.startsWith("$.") || text.startsWith("$[");

/**
 * Read a path, and optionally the value of the field.
 *
 * @param {string} text
 * @returns {((body: string) => boolean)|null} whether a body has this field; null if the text is no path
 */
export function fieldFilter(text) {
  const found = FIELD.exec(text);
  if (!found) return null;
  const steps = [...found[1].matchAll(new RegExp(STEP, "g"))].map(([, name, index]) => name ?? Number(index));
  const wanted = found[4] === undefined ? null : [found[4], parse(found[4])];
  return (body) => {
    const start = [parse(body)].filter((value) => value instanceof Object);
    const values = steps.reduce((each, step) => each.flatMap((value) => take(value, step)), start);
    return wanted === null ? values.length > 0 : values.flat().some((value) => wanted.includes(value));
  };
}

/** The values of a field or element: none, one, or those of each element of an array. */
function take(value, step) {
  const elements = [value].flat();
  if (typeof step === "number") return elements.slice(step, step + 1);
  const objects = elements.filter((each) => each instanceof Object && !Array.isArray(each));
  return objects.filter((each) => Object.hasOwn(each, step)).map((each) => each[step]);
}

/** The value of a JSON text; undefined if the text is not JSON. */
function parse(text) {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}
