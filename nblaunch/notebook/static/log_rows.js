// The element of one line.
import { ansiRuns } from "./ansi.js";
import { bytesText, el, rankClass } from "./format.js";

/** How a line is shown.
 * @typedef {object} RowLook
 * @property {boolean} labels show the rank
 * @property {string} query text to mark, in lower case
 * @property {(gap: import("./store.js").Line) => void} onGap
 * @property {boolean} mayLoad */

/** @param {import("./store.js").Line} line */
export function lineLabel(line) {
  return `[rank ${line.source.rank}]`;
}

/** @param {import("./store.js").Line} line */
export function gapText(line) {
  return `… ${bytesText(line.end - line.start)} not shown`;
}

/** @param {import("./store.js").Line} line @param {RowLook} look @returns {HTMLElement} */
export function rowElement(line, look) {
  const { source, kind } = line;
  const from = `rank ${source.rank}, ${source.stream === "err" ? "stderr" : "stdout"}`;
  const row = el("div", {
    class: "nbl-line",
    "data-kind": kind || source.stream,
    title: `${line.time.toFixed(2)} s · ${from}`,
  });
  if (look.labels) row.append(el("span", { class: `nbl-label ${rankClass(source.rank)}` }, lineLabel(line)), " ");
  if (kind === "gap") row.append(gapElement(line, look));
  else row.append(textElement(line.text, look.query));
  return row;
}

/** @param {import("./store.js").Line} line @param {RowLook} look */
function gapElement(line, { onGap, mayLoad }) {
  const what = gapText(line);
  if (line.state === "lost") return el("span", { class: "nbl-gap" }, `${what}: the file has no more of it`);
  if (line.state === "loading") return el("span", { class: "nbl-gap" }, `${what}: loading …`);
  if (!mayLoad) return el("span", { class: "nbl-gap" }, `${what}: see the file`);
  return el(
    "button",
    {
      type: "button",
      class: "nbl-gap",
      "aria-label": `${bytesText(line.end - line.start)} of rank ${line.source.rank} not shown: load`,
      on_click: () => onGap(line),
    },
    `${what}: `,
    el("u", {}, "load"),
  );
}

/** @param {string} line with colours @param {string} query text to mark, in lower case */
export function textElement(line, query) {
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
