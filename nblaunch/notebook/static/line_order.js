// Lists of lines in order of time: merge, locate, search.
import { stripAnsi } from "./ansi.js";

/** @typedef {import("./store.js").Line} Line */

/** @param {Line} x @param {Line} y */
export function byTime(x, y) {
  return x.time - y.time || x.order - y.order || x.start - y.start;
}

/** Merge sorted `fresh` lines into a sorted list; nearly all belong at its end.
 * @param {Line[]} list @param {Line[]} fresh */
export function mergeLines(list, fresh) {
  let at = list.length;
  while (at && byTime(list[at - 1], fresh[0]) > 0) at--;
  const tail = at < list.length ? list.splice(at).concat(fresh).sort(byTime) : fresh;
  for (const line of tail) list.push(line);
}

/** Return the index of a line in a sorted list, or where it would be.
 * @param {Line[]} lines @param {Line} line */
export function placeOf(lines, line) {
  let [low, high] = [0, lines.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (byTime(lines[middle], line) < 0) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** Return the indices of the lines that contain `query`, ignoring case. @param {Line[]} lines @param {string} query */
export function findLines(lines, query) {
  const wanted = query.toLowerCase();
  /** @type {number[]} */
  const found = [];
  if (!wanted) return found;
  for (let i = 0; i < lines.length; i++) {
    const line = lines[i];
    if (line.kind === "gap") continue;
    line.plain ??= plainText(line).toLowerCase();
    if (line.plain.includes(wanted)) found.push(i);
  }
  return found;
}

/** @param {Line} line */
export function plainText(line) {
  return stripAnsi(line.text);
}
