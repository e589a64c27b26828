// The lines of all ranks, bounded, in order of time. Missing lines are gaps that can be loaded.
import { byTime, mergeLines } from "./line_order.js";
import { LineAssembler } from "./lines.js";

/** One file of one rank, and how far it has been read.
 * @typedef {object} Source
 * @property {number} attempt
 * @property {number} rank
 * @property {"out" | "err"} stream
 * @property {LineAssembler} assembler
 * @property {number} end of the bytes that have been read
 * @property {number} time of the latest bytes
 * @property {Line[]} open
 * @property {Line[]} parked */
/** A line, or (kind "gap") a range of missing bytes.
 * @typedef {object} Line
 * @property {Source} source
 * @property {"" | "gap" | "open"} kind
 * @property {number} order among lines of the same time
 * @property {number} time seconds since the launch began
 * @property {number} start of its bytes in the file
 * @property {number} end of its bytes
 * @property {string} text with its colours
 * @property {boolean} [gone] removed from all lists
 * @property {"" | "loading" | "lost"} [state] of a gap
 * @property {string} [plain] cached text for `findLines` */
/** @typedef {import("./page_messages.js").LogPart} LogPart */
/** @typedef {import("./page_messages.js").OlderLines} OlderLines */
/** @typedef {"all" | number} Tab */

const DEFAULT_LIMITS = { rank: 10000, total: 100000, reading: 50000, pinned: 8 };

export class LogStore {
  constructor(limits = DEFAULT_LIMITS) {
    this.limits = limits;
    /** @type {Line[]} */ this.merged = [];
    /** @type {Map<number, Line[]>} */ this.ranks = new Map();
    /** @type {Map<string, Source>} */ this.sources = new Map();
    /** @type {Map<object, Set<number>>} */ this.readers = new Map();
    this.version = 0;
    this.count = 0;
  }

  /** @param {LogPart[]} parts @param {Uint8Array} bytes one part after the other */
  add(parts, bytes) {
    /** @type {Line[]} */
    const fresh = [];
    let at = 0;
    for (const part of parts) {
      this.#addPart(part, bytes.subarray(at, at + part.size), fresh);
      at += part.size;
    }
    this.#insert(fresh.filter((line) => !line.gone));
    this.#evict();
  }

  /** Place unfinished lines in order of time because the launch has ended. Later bytes reopen them. */
  settle() {
    /** @type {Line[]} */
    const parked = [];
    for (const source of this.sources.values()) {
      if (!source.open.length) continue;
      source.parked = source.open;
      source.open = [];
      parked.push(...source.parked);
    }
    if (parked.length) this.#insert(parked);
  }

  /** Where what has arrived of each log ends. @returns {import("./page_messages.js").LogEnd[]} */
  get ends() {
    return [...this.sources.values()].map(({ attempt, rank, stream, end }) => [attempt, rank, stream, end]);
  }

  /** Return the lines of a tab, and its unfinished lines. @param {Tab} tab @returns {{lines: Line[], open: Line[]}} */
  view(tab) {
    const open = [];
    for (const source of this.sources.values()) if (tab === "all" || tab === source.rank) open.push(...source.open);
    if (tab === "all") open.sort((x, y) => x.source.rank - y.source.rank);
    return {
      lines: (tab === "all" ? this.merged : this.ranks.get(tab)) ?? [],
      open: open.slice(0, this.limits.pinned),
    };
  }

  /** Keep more lines of these ranks for a reader; without ranks, release them.
   * @param {object} reader @param {Iterable<number>} [ranks] */
  hold(reader, ranks) {
    if (ranks) this.readers.set(reader, new Set(ranks));
    else if (this.readers.delete(reader)) this.#evict();
  }

  /** Return true if lines of this gap may be loaded. @param {Line} gap */
  mayLoad(gap) {
    return !gap.gone && !gap.state && (this.ranks.get(gap.source.rank)?.length ?? 0) < this.limits.reading;
  }

  /** Fill the end of a gap with the answer to a request.
   * @param {OlderLines} answer
   * @param {Uint8Array} bytes */
  fill(answer, bytes) {
    const gap = this.#gap(answer);
    if (!gap) return;
    gap.state = bytes.length ? "" : "lost";
    this.version++;
    if (!bytes.length) return;
    const end = Math.min(answer.end, gap.end); // the end may already have arrived unrequested
    this.#fillGap(gap, { ...answer, end }, bytes.subarray(0, end - answer.start));
  }

  /** Fill the end of a gap with unrequested lines that a flood had skipped, unless newer lines would be evicted. @param {OlderLines} part @param {Uint8Array} bytes */
  fillUnrequested(part, bytes) {
    const gap = this.#gap(part);
    if (!gap || gap.end !== part.end || !bytes.length) return;
    const count = bytes.reduce((lines, byte) => lines + Number(byte === 10), 1);
    if (
      (this.ranks.get(part.rank)?.length ?? 0) + count > this.limits.rank ||
      this.merged.length + count > this.limits.total
    )
      return;
    this.version++;
    this.#fillGap(gap, part, bytes);
  }

  /** Return the gap that contains the start of these bytes. @param {OlderLines} part */
  #gap({ attempt, rank, stream, start }) {
    return this.ranks
      .get(rank)
      ?.find(
        (line) =>
          line.kind === "gap" &&
          line.source.attempt === attempt &&
          line.source.stream === stream &&
          line.start <= start &&
          start < line.end,
      );
  }

  /** @param {Source} source @param {Line["kind"]} kind @param {number} time @param {number} start @param {number} end
   * @param {string} text
   * @returns {Line} */
  #line(source, kind, time, start, end, text) {
    return { source, kind, order: ++this.count, time, start, end, text };
  }

  /** @param {LogPart} part @param {Uint8Array} bytes @param {Line[]} fresh */
  #addPart(part, bytes, fresh) {
    const source = this.#source(part, fresh);
    const known = source.end - part.offset;
    if (!bytes.length || known >= bytes.length) return;
    source.time = Math.max(source.time, part.time);
    this.#unpark(source);
    if (known < 0) {
      this.#take(source, source.assembler.finish(), fresh);
      fresh.push(this.#line(source, "gap", source.time, source.end, part.offset, ""));
      source.assembler = new LineAssembler(part.offset);
    }
    this.#take(source, source.assembler.feed(known > 0 ? bytes.subarray(known) : bytes), fresh);
    source.end = part.offset + bytes.length;
    const partials = source.assembler.partials;
    source.open = partials.map((text) => this.#line(source, "open", source.time, source.end, source.end, text));
  }

  /** @param {Source} source */
  #unpark(source) {
    if (!source.parked.length) return;
    for (const line of source.parked) line.gone = true;
    source.parked = [];
    this.#sweep([source.rank]);
  }

  /** @param {LogPart} part @param {Line[]} fresh @returns {Source} */
  #source({ attempt, rank, stream }, fresh) {
    const key = `${attempt} ${rank} ${stream}`;
    const known = this.sources.get(key);
    if (known) return known;
    for (const source of this.sources.values()) {
      if (source.rank !== rank || source.attempt >= attempt) continue;
      this.#unpark(source);
      this.#take(source, source.assembler.finish(), fresh); // bars of an earlier attempt are final
      source.assembler = new LineAssembler(source.end);
      source.open = [];
    }
    /** @type {Source} */
    const source = { attempt, rank, stream, assembler: new LineAssembler(0), end: 0, time: 0, open: [], parked: [] };
    this.sources.set(key, source);
    return source;
  }

  /** @param {Source} source @param {{lines: import("./lines.js").FinishedLine[], retract: number}} result
   * @param {Line[]} fresh */
  #take(source, { lines, retract }, fresh) {
    if (retract) this.#takeBack(source, retract, fresh);
    for (const { text, start, end } of lines) fresh.push(this.#line(source, "", source.time, start, end, text));
  }

  /** Remove the last `count` lines of a source: the cursor has moved up into them. @param {Source} source @param {number} count
   * @param {Line[]} fresh */
  #takeBack(source, count, fresh) {
    const list = this.ranks.get(source.rank) ?? [];
    for (const lines of [fresh, list]) {
      for (let i = lines.length - 1; i >= 0 && count; i--) {
        if (lines[i].source !== source || lines[i].kind || lines[i].gone) continue;
        lines[i].gone = true;
        count--;
      }
    }
    this.#sweep([source.rank]);
  }

  /** @param {Line[]} fresh */
  #insert(fresh) {
    this.version++;
    if (!fresh.length) return;
    fresh.sort(byTime);
    mergeLines(this.merged, fresh);
    /** @type {Map<number, Line[]>} */
    const byRank = new Map();
    for (const line of fresh) {
      const lines = byRank.get(line.source.rank);
      if (lines) lines.push(line);
      else byRank.set(line.source.rank, [line]);
    }
    for (const [rank, lines] of byRank) {
      const list = this.ranks.get(rank);
      if (list) mergeLines(list, lines);
      else this.ranks.set(rank, lines);
    }
  }

  /** Remove lines marked as gone from the lists. @param {Iterable<number>} ranks */
  #sweep(ranks) {
    this.version++;
    for (const rank of ranks) {
      const list = this.ranks.get(rank);
      if (list)
        this.ranks.set(
          rank,
          list.filter((line) => !line.gone),
        );
    }
    this.merged = this.merged.filter((line) => !line.gone);
  }

  #evict() {
    const held = new Set();
    for (const ranks of this.readers.values()) for (const rank of ranks) held.add(rank);
    const touched = new Set();
    let allowed = this.limits.total;
    for (const [rank, list] of this.ranks) {
      const most = held.has(rank) ? this.limits.reading : this.limits.rank;
      if (held.has(rank)) allowed += Math.max(0, list.length - this.limits.rank);
      if (list.length > most && this.#drop(rank, list.length - most)) touched.add(rank);
    }
    if (touched.size) this.#sweep(touched);
    const excess = this.merged.length - allowed;
    if (excess <= 0) return;
    /** @type {Map<number, number>} */
    const oldest = new Map();
    for (let i = 0, left = excess; left > 0 && i < this.merged.length; i++) {
      const { rank } = this.merged[i].source;
      if (held.has(rank)) continue;
      oldest.set(rank, (oldest.get(rank) ?? 0) + 1);
      left--;
    }
    for (const [rank, count] of oldest) this.#drop(rank, count);
    this.#sweep(oldest.keys());
  }

  /** Free `count` lines of a rank: its oldest lines become one gap for each file.
   * @param {number} rank @param {number} count */
  #drop(rank, count) {
    const list = /** @type {Line[]} */ (this.ranks.get(rank));
    /** @type {Map<Source, Line>} */
    const gaps = new Map();
    for (const line of list) {
      if (count <= -gaps.size) break; // a gap counts as a line
      count--;
      if (line.kind === "open") {
        line.gone = true;
        continue;
      }
      const before = gaps.get(line.source);
      if (before) {
        before.gone = true;
        line.start = Math.min(before.start, line.start);
        line.state = "";
      }
      if (line.kind !== "gap") Object.assign(line, { kind: "gap", text: "", plain: undefined, state: "" });
      gaps.set(line.source, line);
    }
    return true;
  }

  /** @param {Line} gap @param {OlderLines} answer @param {Uint8Array} bytes */
  #fillGap(gap, { start, end, spans }, bytes) {
    const assembler = new LineAssembler(start);
    const lines = assembler.feed(bytes).lines.concat(assembler.finish().lines);
    const after = end < gap.end ? [{ ...gap, start: end, order: gap.order + 0.5 }] : [];
    let [span, until] = [0, start + (spans[0]?.[0] ?? 0)];
    const fresh = lines.map((line, i) => {
      while (span < spans.length - 1 && line.start >= until) until += spans[++span][0];
      const time = Math.min(spans[span]?.[1] ?? gap.time, gap.time);
      const order = gap.order - 1 + (i + 1) / (lines.length + 1);
      return { ...this.#line(gap.source, "", time, line.start, line.end, line.text), order };
    });
    if (start > gap.start) Object.assign(gap, { end: start, time: fresh[0]?.time ?? gap.time, order: gap.order - 1 });
    else gap.gone = true;
    const list = (this.ranks.get(gap.source.rank) ?? []).concat(fresh, after);
    this.ranks.set(gap.source.rank, list.filter((line) => !line.gone).sort(byTime));
    this.merged = this.merged
      .concat(fresh, after)
      .filter((line) => !line.gone)
      .sort(byTime);
  }
}
