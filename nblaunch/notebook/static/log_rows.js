// The element of one line.
import { ansiRuns } from "./ansi.js";
import { el, rankClass } from "./format.js";

/** How a line is shown.
 * @typedef {object} RowLook
 * @property {boolean} labels show the rank
 * @property {boolean} isOpen the line is unfinished
 * @property {string} query text to mark, in lower case */

/** @param {import("./store.js").Line} line */
export function lineLabel(line) {
  return `[rank ${line.source.rank}]`;
}

/** @param {import("./store.js").Line} line @param {RowLook} look @returns {HTMLElement} */
export function rowElement(line, look) {
  const { source } = line;
  const from = `rank ${source.rank}, ${source.stream === "err" ? "stderr" : "stdout"}`;
  const row = el("div", {
    class: "nbl-line",
    "data-kind": look.isOpen ? "open" : source.stream,
    title: `${line.time.toFixed(2)} s · ${from}`,
  });
  if (look.labels) row.append(el("span", { class: `nbl-label ${rankClass(source.rank)}` }, lineLabel(line)), " ");
  row.append(textElement(line.text, look.query));
  return row;
}

/** @param {string} line with colours @param {string} query text to mark, in lower case */
function textElement(line, query) {
  const text = el("span", { class: "nbl-text" });
  const runs = ansiRuns(line);
  const marks = query
    ? marksOf(
        runs
          .map((run) => run.text)
          .join("")
          .toLowerCase(),
        query,
      )
    : [];
  let at = 0;
  for (const run of runs) {
    for (const [start, end, marked] of cutRun(at, at + run.text.length, marks)) {
      const piece = run.text.slice(start - at, end - at);
      if (!marked && !run.cls && !run.style.color && !run.style.background) {
        text.append(piece);
        continue;
      }
      const span = el(marked ? "mark" : "span", { class: marked ? `nbl-mark ${run.cls}` : run.cls }, piece);
      if (run.style.color) span.style.color = run.style.color;
      if (run.style.background && !marked) span.style.backgroundColor = run.style.background;
      text.append(span);
    }
    at += run.text.length;
  }
  return text;
}

/** Return the ranges of `query`. @param {string} text @param {string} query @returns {number[][]} */
function marksOf(text, query) {
  const marks = [];
  for (let at = text.indexOf(query); at >= 0; at = text.indexOf(query, at + query.length))
    marks.push([at, at + query.length]);
  return marks;
}

/** Cut a run where marks start and end. @param {number} start @param {number} end @param {number[][]} marks
 * @returns {[number, number, boolean][]} */
function cutRun(start, end, marks) {
  /** @type {[number, number, boolean][]} */
  const pieces = [];
  let at = start;
  for (const [from, to] of marks) {
    if (to <= at || from >= end) continue;
    if (from > at) pieces.push([at, from, false]);
    pieces.push([Math.max(at, from), Math.min(to, end), true]);
    at = Math.min(to, end);
  }
  if (at < end) pieces.push([at, end, false]);
  return pieces;
}
