// The last lines of all ranks, in order of time.
import { stripAnsi } from "./ansi.js";

/** One log of one rank.
 * @typedef {object} Source
 * @property {number} attempt
 * @property {number} rank
 * @property {"out" | "err"} stream
 * @property {number} place among all logs, in order of arrival
 * @property {number} end the number of the line after those that have arrived
 * @property {number} whole the number of the first line that has not arrived
 * @property {Line[]} open unfinished lines */
/** @typedef {object} Line
 * @property {Source} source
 * @property {number} number in its log
 * @property {number} time seconds since the launch began
 * @property {string} text with its colours
 * @property {string} [plain] cached text for `findLines` */
/** @typedef {import("./page_messages.js").LogPart} LogPart */
/** @typedef {"all" | number} Tab */

const DEFAULT_LIMITS = { rank: 10000, total: 100000, open: 8 };

export class LogStore {
  constructor(limits = DEFAULT_LIMITS) {
    this.limits = limits;
    /** @type {Line[]} */ this.merged = [];
    /** @type {Map<number, Line[]>} */ this.ranks = new Map();
    /** @type {Map<string, Source>} */ this.sources = new Map();
    this.version = 0;
  }

  /** @param {readonly LogPart[]} parts */
  add(parts) {
    this.version++;
    for (const part of parts) this.#addPart(part);
    for (const [rank, list] of this.ranks) {
      if (list.length <= this.limits.rank) continue;
      const old = new Set(list.splice(0, list.length - this.limits.rank));
      this.merged = this.merged.filter((line) => line.source.rank !== rank || !old.has(line));
    }
    for (const line of this.merged.splice(0, Math.max(0, this.merged.length - this.limits.total)))
      this.ranks.get(line.source.rank)?.shift();
  }

  /** The number of the first line of each log that has not arrived. @returns {import("./page_messages.js").LogEnd[]} */
  get ends() {
    return [...this.sources.values()].map(({ attempt, rank, stream, whole }) => [attempt, rank, stream, whole]);
  }

  /** Return the lines of a tab, its unfinished lines, and how many lines its logs have.
   * @param {Tab} tab @returns {{lines: Line[], open: Line[], total: number}} */
  view(tab) {
    const sources = [...this.sources.values()].filter(({ rank }) => tab === "all" || tab === rank);
    if (tab === "all") sources.sort((x, y) => x.rank - y.rank);
    return {
      lines: (tab === "all" ? this.merged : this.ranks.get(tab)) ?? [],
      open: sources.flatMap(({ open }) => open).slice(0, this.limits.open),
      total: sources.reduce((sum, { end }) => sum + end, 0),
    };
  }

  /** @param {LogPart} part */
  #addPart({ attempt, rank, stream, first, lines, open }) {
    const key = `${attempt} ${rank} ${stream}`;
    const known = this.sources.get(key);
    const source = known ?? { attempt, rank, stream, place: this.sources.size, end: 0, whole: 0, open: [] };
    if (!known) this.sources.set(key, source);
    const list = this.ranks.get(rank) ?? [];
    this.ranks.set(rank, list);
    for (const all of [list, this.merged]) takeBack(all, source, first);
    const fresh = lines.map(([time, text], i) => ({ source, number: first + i, time, text }));
    const time = lines[0]?.[0] ?? list.at(-1)?.time ?? 0;
    if (first > source.end) {
      const count = (first - source.end).toLocaleString("en-US");
      fresh.unshift({ source, number: first - 1, time, text: `… ${count} lines not shown …` });
    }
    for (const all of fresh.length ? [list, this.merged] : []) mergeLines(all, fresh);
    source.end = first + lines.length;
    if (first <= source.whole) source.whole = source.end;
    source.open = open.map((text, i) => ({ source, number: source.end + i, time, text }));
  }
}

/** Remove the lines of a log from number `first` on. @param {Line[]} list @param {Source} source @param {number} first */
function takeBack(list, source, first) {
  for (let i = list.length - 1; i >= 0 && source.end > first; i--) {
    if (list[i].source !== source) continue;
    if (list[i].number < first) return;
    list.splice(i, 1);
  }
}

/** @param {Line} x @param {Line} y */
function byTime(x, y) {
  return x.time - y.time || x.source.place - y.source.place || x.number - y.number;
}

/** Merge sorted `fresh` lines into a sorted list; nearly all belong at its end.
 * @param {Line[]} list @param {Line[]} fresh */
function mergeLines(list, fresh) {
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
    line.plain ??= stripAnsi(line.text).toLowerCase();
    if (line.plain.includes(wanted)) found.push(i);
  }
  return found;
}
