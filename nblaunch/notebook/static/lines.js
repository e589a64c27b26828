// Bytes of one stream of one rank to the lines that a terminal would show.
// Follows nblaunch/launch/output/terminal_lines.py, and supports vertical cursor movement within the last few lines,
// which nested tqdm bars need.
import { joinRuns, sgrAfter, SGR } from "./ansi.js";

const KEEP = 2000; // characters kept at each end of a long line
const CHUNK = 2 * KEEP;
const ESCAPE_REACH = 80; // longest incomplete escape sequence
const MAX_ROWS = 8; // reach of the cursor upwards

const SPECIAL = /[\x00-\x08\x0b-\x1f\x7f]/;
const ONLY_COLOURS = /^[^\x00-\x08\x0b-\x1f\x7f]*(?:\x1b\[[0-9;:]{0,64}m[^\x00-\x08\x0b-\x1f\x7f]*)*$/;
const INCOMPLETE = /^\x1b(?:\[[0-?]{0,64}[ -/]{0,8}|[ -/]{0,8})$/;
const STRING_END = /\x07|(?=\x1b)/;
const TOKEN = new RegExp(
  [
    "(?<text>[^\\x00-\\x08\\x0b-\\x1f\\x7f]+)",
    "(?<back>[\\r\\x08])",
    "\\x1b\\[(?<colour>[0-9;:]{0,64})m",
    "\\x1b\\[(?<erase>[02]?)K",
    "\\x1b\\[(?<move>[0-9]{0,3}[AB])",
    "\\x1b\\[[0-?]{0,64}[ -/]{0,8}[@-~]",
    "\\x1b[\\]PX^_][^\\x07\\x1b]*(?:\\x07|(?=\\x1b)|(?<string>$))", // a title, or other hidden text
    "\\x1b[ -/]{0,8}[0-~]",
    "[\\x00-\\x07\\x0b\\x0c\\x0e-\\x1a\\x1c-\\x1f\\x7f]+",
    "[^]",
  ].join("|"),
  "g",
);

/** A terminal row: one cell for each character, prefixed with its colour. A long row omits its middle: `cells` holds
 * columns 0 to KEEP, then those from KEEP + omitted on. */
class TerminalRow {
  constructor() {
    /** @type {string[]} */ this.cells = [];
    this.cursor = 0;
    this.omitted = 0;
  }

  /** @param {string} text @param {string} colour */
  write(text, colour) {
    const characters = Array.from(text);
    for (let at = 0; at < characters.length; at += CHUNK) {
      const chunk = characters.slice(at, at + CHUNK);
      this.#put(colour ? chunk.map((character) => `\x1b[${colour}m${character}`) : chunk);
    }
  }

  /** @param {string[]} cells */
  #put(cells) {
    let start = this.cursor;
    const afterGap = KEEP + this.omitted;
    this.cursor += cells.length;
    while (!this.omitted && this.cells.length < start) this.cells.push(" "); // the cursor has moved from another row
    if (this.omitted && start < afterGap) {
      for (let i = 0; start + i < KEEP && i < cells.length; i++) this.cells[start + i] = cells[i];
      cells = cells.slice(Math.max(0, afterGap - start));
      start = afterGap;
    }
    start -= this.omitted;
    for (let i = 0; i < cells.length; i++) this.cells[start + i] = cells[i];
    if (this.cells.length > 2 * CHUNK) {
      const excess = this.cells.length - CHUNK;
      this.cells.splice(KEEP, excess);
      this.omitted += excess;
    }
  }

  /** Erase from the cursor on, or everything. @param {boolean} everything */
  erase(everything) {
    if (everything) this.cursor = 0;
    if (this.cursor < KEEP) {
      this.cells.length = Math.min(this.cells.length, this.cursor);
      this.omitted = 0;
    } else if (this.cursor < KEEP + this.omitted) {
      this.cells.length = KEEP;
      this.omitted = this.cursor - KEEP;
    } else {
      this.cells.length = Math.min(this.cells.length, this.cursor - this.omitted);
    }
  }

  render() {
    const { cells } = this;
    if (cells.length <= CHUNK && !this.omitted) return rowPicture(cells);
    const tail = cells.slice(Math.max(KEEP, cells.length - KEEP));
    const omitted = this.omitted + cells.length - KEEP - tail.length;
    return rowPicture(cells.slice(0, KEEP)) + omittedMark(omitted) + rowPicture(tail);
  }
}

/** @param {string[]} cells */
function rowPicture(cells) {
  const text = cells.join("");
  if (!text.includes("\x1b")) return text;
  return joinRuns(
    cells.map((cell) => {
      const end = cell.charCodeAt(0) === 27 ? cell.indexOf("m") + 1 : 0;
      return [cell.slice(2, Math.max(2, end - 1)), cell.slice(end)];
    }),
  );
}

/** @param {number} count */
function omittedMark(count) {
  return `… [${count.toLocaleString("en-US")} characters left out] …`;
}

/** @param {string} line */
function shortenLine(line) {
  if (line.length <= CHUNK) return line;
  const characters = Array.from(line);
  if (characters.length <= CHUNK) return line;
  const [head, tail] = [characters.slice(0, KEEP), characters.slice(-KEEP)];
  return head.join("") + omittedMark(characters.length - CHUNK) + tail.join("");
}

/** A finished line: its text with its own colours, and where its bytes start and end in the file.
 * @typedef {{text: string, start: number, end: number}} FinishedLine */

/** Assembles lines from bytes, however they are split over calls. */
export class LineAssembler {
  /** @param {number} [offset] of the first byte in the file */
  constructor(offset = 0) {
    this.offset = this.start = offset;
    this.decoder = new TextDecoder("utf-8", { ignoreBOM: true });
    this.rows = [new TerminalRow()];
    this.row = 0;
    this.colour = "";
    this.pending = ""; // an incomplete escape sequence
    this.inString = false;
    this.held = 1; // rows that may still change: more than one once the cursor has moved up
    this.ends = 0; // line ends since then
    /** @type {FinishedLine[]} */ this.recent = [];
    /** @type {FinishedLine[]} */ this.out = [];
    this.retract = 0;
  }

  /** Return the lines that `bytes` complete. Remove the last `retract` returned lines before adding them: the cursor
   * has moved up to them. @param {Uint8Array} bytes @returns {{lines: FinishedLine[], retract: number}} */
  feed(bytes) {
    return this.#take(this.decoder.decode(bytes, { stream: true }), bytes);
  }

  /** Return the rest of a stream that has ended or was cut. Do not use the assembler afterwards. */
  finish() {
    const result = this.#take(this.decoder.decode(), new Uint8Array(0));
    const rest = this.rows.map((row) => row.render());
    while (rest.length && !rest[rest.length - 1].trim()) rest.pop();
    for (const text of rest) result.lines.push({ text, start: this.start, end: this.offset });
    return result;
  }

  /** The unfinished lines as a terminal would show them. @returns {string[]} */
  get partials() {
    return this.rows.map((row) => row.render()).filter((text) => text.trim());
  }

  /** @param {string} decoded @param {Uint8Array} bytes */
  #take(decoded, bytes) {
    this.out = [];
    this.retract = 0;
    const segments = (this.pending + decoded).split("\n");
    const rest = /** @type {string} */ (segments.pop());
    this.pending = "";
    let at = 0;
    for (const segment of segments) {
      at = bytes.indexOf(10, at) + 1; // bytes and text have the same number of line ends
      this.#wholeLine(segment, this.offset + at);
    }
    this.#interpret(this.#holdBack(rest));
    this.offset += bytes.length;
    return { lines: this.out, retract: this.retract };
  }

  /** Finish the line with `text`. The two usual cases need no cells. @param {string} text @param {number} end */
  #wholeLine(text, end) {
    if (this.rows.length === 1 && !this.rows[0].cells.length && !this.rows[0].cursor && !this.inString) {
      if (!this.colour && !SPECIAL.test(text)) return this.#emit(shortenLine(text), end);
      if (text.length <= CHUNK && ONLY_COLOURS.test(text)) return this.#emit(this.#coloured(text), end);
    }
    this.#interpret(text);
    this.inString = false; // an unterminated title must not swallow the following lines
    this.#newline(end);
  }

  /** @param {string} text */
  #coloured(text) {
    const parts = text.split(SGR);
    const runs = [[this.colour, parts[0]]];
    for (let i = 1; i < parts.length; i += 2) {
      this.colour = sgrAfter(this.colour, parts[i]);
      if (parts[i + 1]) runs.push([this.colour, parts[i + 1]]);
    }
    return joinRuns(runs);
  }

  /** @param {number} end */
  #newline(end) {
    if (this.row < this.rows.length - 1) {
      this.rows[++this.row].cursor = 0;
      return;
    }
    if (this.held > 1 && ++this.ends >= 2) this.held = 1; // the bars have ended: lines are final at once
    this.rows.push(new TerminalRow());
    while (this.rows.length > this.held) this.#emit(/** @type {TerminalRow} */ (this.rows.shift()).render(), end);
    this.row = this.rows.length - 1;
  }

  /** @param {string} text @param {number} end */
  #emit(text, end) {
    const line = { text, start: this.start, end };
    this.start = end;
    this.out.push(line);
    this.recent.push(line);
    if (this.recent.length > MAX_ROWS) this.recent.shift();
  }

  /** @param {string} move such as "2A" */
  #move(move) {
    const count = parseInt(move, 10) || 1;
    const column = this.rows[this.row].cursor;
    if (move.endsWith("B")) {
      this.row = Math.min(this.row + count, this.rows.length - 1);
    } else {
      while (this.row < count && this.rows.length < MAX_ROWS && this.recent.length) this.#reopen();
      this.row = Math.max(0, this.row - count);
      this.held = Math.max(this.held, this.rows.length);
      this.ends = 0;
    }
    this.rows[this.row].cursor = column;
  }

  /** Reopen the last finished line. */
  #reopen() {
    const line = /** @type {FinishedLine} */ (this.recent.pop());
    if (!this.out.pop()) this.retract++;
    const row = new TerminalRow();
    const parts = line.text.split(SGR);
    row.write(parts[0], "");
    for (let i = 1; i < parts.length; i += 2) row.write(parts[i + 1], parts[i] === "0" ? "" : parts[i]);
    this.rows.unshift(row);
    this.row++;
    this.start = line.start;
  }

  /** @param {string} rest */
  #holdBack(rest) {
    const at = rest.lastIndexOf("\x1b");
    if (at < 0 || at < rest.length - ESCAPE_REACH || !INCOMPLETE.test(rest.slice(at))) return rest;
    this.pending = rest.slice(at);
    return rest.slice(0, at);
  }

  /** @param {string} text */
  #interpret(text) {
    let from = 0;
    if (this.inString) {
      const end = STRING_END.exec(text);
      if (!end) return;
      this.inString = false;
      from = end.index + end[0].length;
    }
    TOKEN.lastIndex = from;
    for (let token = TOKEN.exec(text); token; token = TOKEN.exec(text)) {
      const kind = /** @type {Record<string, string | undefined>} */ (token.groups);
      const row = this.rows[this.row];
      if (kind.text !== undefined) row.write(kind.text, this.colour);
      else if (kind.back !== undefined) row.cursor = kind.back === "\r" ? 0 : Math.max(0, row.cursor - 1);
      else if (kind.colour !== undefined) this.colour = sgrAfter(this.colour, kind.colour);
      else if (kind.erase !== undefined) row.erase(kind.erase === "2");
      else if (kind.move !== undefined) this.#move(kind.move);
      else if (kind.string !== undefined) this.inString = true;
    }
  }
}
