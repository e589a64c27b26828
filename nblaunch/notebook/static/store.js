// The lines of all ranks, bounded, in the order of time; what is not here is a gap that can be fetched.
import { byTime, mergeLines } from "./line_order.js";
import { LineAssembler } from "./lines.js";

/** One file of one rank, and how far it has been read.
 * @typedef {{a: number, r: number, s: string, asm: LineAssembler, end: number, t: number, open: Line[], parked: Line[]}} Source */
/** A line, or (kind "gap") the bytes from o to e that are not here.
 * @typedef {object} Line
 * @property {Source} src
 * @property {"" | "gap" | "note" | "open"} kind
 * @property {number} n order among lines of the same time
 * @property {number} t seconds since the launch began
 * @property {number} o where its bytes begin
 * @property {number} e and end
 * @property {string} text with its colours
 * @property {boolean} [gone] it is in no list any more
 * @property {"" | "loading" | "lost"} [state] of a gap
 * @property {string} [plain] what `find` looks through, once it has */
/** @typedef {{a: number, r: number, s: string, o: number, n: number, t: number}} Chunk */
/** @typedef {"all" | number} Tab */

const DEFAULT_LIMITS = { rank: 10000, total: 100000, reading: 50000, pinned: 8 };
const NOTES = /** @type {Source} */ (/** @type {unknown} */ ({ a: 0, r: -1, s: "note", open: [], parked: [] }));

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

  /** @param {Chunk[]} chunks @param {Uint8Array} bytes one chunk after the other */
  add(chunks, bytes) {
    /** @type {Line[]} */
    const fresh = [];
    let at = 0;
    for (const chunk of chunks) {
      this.#chunk(chunk, bytes.subarray(at, at + chunk.n), fresh);
      at += chunk.n;
    }
    this.#insert(fresh.filter((line) => !line.gone));
    this.#evict();
  }

  /** The launch is over: what never ended stands where it was last written, until more of it comes after all. */
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

  /** What nblaunch itself says. @param {[number, string][]} notes @param {boolean} replace all that were there */
  addNotes(notes, replace = false) {
    const fresh = notes.map(([t, text]) => this.#line(NOTES, "note", t, 0, 0, String(text)));
    if (replace) for (const line of this.ranks.get(-1) ?? []) line.gone = true;
    this.#sweep([-1]);
    this.#insert(fresh);
  }

  /** Whether anything of a log has come. */
  get hasLines() {
    return [...this.sources.values()].some((source) => source.end > 0);
  }

  /** The lines of a tab, with those that have not ended yet last. @param {Tab} tab @returns {{lines: Line[], open: Line[]}} */
  view(tab) {
    const open = [];
    for (const source of this.sources.values()) if (tab === "all" || tab === source.r) open.push(...source.open);
    if (tab === "all") open.sort((x, y) => x.src.r - y.src.r);
    return { lines: (tab === "all" ? this.merged : this.ranks.get(tab)) ?? [], open: open.slice(0, this.limits.pinned) };
  }

  /** Someone reads older lines of these ranks: keep more of them until he follows again (no ranks).
   * @param {object} reader @param {Iterable<number>} [ranks] */
  hold(reader, ranks) {
    if (ranks) this.readers.set(reader, new Set(ranks));
    else if (this.readers.delete(reader)) this.#evict();
  }

  /** Whether more lines of this gap may be loaded. @param {Line} gap */
  mayLoad(gap) {
    return !gap.gone && !gap.state && (this.ranks.get(gap.src.r)?.length ?? 0) < this.limits.reading;
  }

  /** Put the answer to `older` in place: the end of a gap.
   * @param {{a: number, r: number, s: string, from: number, to: number, spans: [number, number][]}} answer
   * @param {Uint8Array} bytes */
  fill(answer, bytes) {
    const gap = this.#gap(answer);
    if (!gap) return;
    gap.state = bytes.length ? "" : "lost";
    this.version++;
    if (!bytes.length) return;
    const to = Math.min(answer.to, gap.e); // the end may have come unasked meanwhile
    this.#fillGap(gap, { ...answer, to }, bytes.subarray(0, to - answer.from));
  }

  /** Put lines in place that the kernel has left out of a flood: the end of a gap, as long as there is room, and nothing
   * newer goes for them. @param {Parameters<LogStore["fill"]>[0]} part @param {Uint8Array} bytes */
  fillUnasked(part, bytes) {
    const gap = this.#gap(part);
    if (!gap || gap.e !== part.to || !bytes.length) return;
    const count = bytes.reduce((lines, byte) => lines + Number(byte === 10), 1);
    if ((this.ranks.get(part.r)?.length ?? 0) + count > this.limits.rank || this.merged.length + count > this.limits.total) return;
    this.version++;
    this.#fillGap(gap, part, bytes);
  }

  /** The gap that these bytes begin in. @param {{a: number, r: number, s: string, from: number}} part */
  #gap({ a, r, s, from }) {
    return this.ranks.get(r)?.find((line) => line.kind === "gap" && line.src.a === a && line.src.s === s && line.o <= from && from < line.e);
  }

  /** @param {Source} src @param {Line["kind"]} kind @param {number} t @param {number} o @param {number} e @param {string} text
   * @returns {Line} */
  #line(src, kind, t, o, e, text) {
    return { src, kind, n: ++this.count, t, o, e, text };
  }

  /** @param {Chunk} chunk @param {Uint8Array} bytes @param {Line[]} fresh */
  #chunk(chunk, bytes, fresh) {
    const source = this.#source(chunk, fresh);
    const known = source.end - chunk.o;
    if (!bytes.length || known >= bytes.length) return;
    source.t = Math.max(source.t, chunk.t);
    this.#unpark(source);
    if (known < 0) {
      this.#take(source, source.asm.finish(), fresh);
      fresh.push(this.#line(source, "gap", source.t, source.end, chunk.o, ""));
      source.asm = new LineAssembler(chunk.o);
    }
    this.#take(source, source.asm.feed(known > 0 ? bytes.subarray(known) : bytes), fresh);
    source.end = chunk.o + bytes.length;
    const partials = source.asm.partials;
    source.open = partials.map((text) => this.#line(source, "open", source.t, source.end, source.end, text));
  }

  /** @param {Source} source */
  #unpark(source) {
    if (!source.parked.length) return;
    for (const line of source.parked) line.gone = true;
    source.parked = [];
    this.#sweep([source.r]);
  }

  /** @param {Chunk} chunk @param {Line[]} fresh @returns {Source} */
  #source({ a, r, s }, fresh) {
    const key = `${a} ${r} ${s}`;
    const known = this.sources.get(key);
    if (known) return known;
    for (const source of this.sources.values()) {
      if (source.r !== r || source.a >= a) continue;
      this.#unpark(source);
      this.#take(source, source.asm.finish(), fresh); // an earlier attempt's bar stands for ever
      source.asm = new LineAssembler(source.end);
      source.open = [];
    }
    const source = { a, r, s, asm: new LineAssembler(0), end: 0, t: 0, open: [], parked: [] };
    this.sources.set(key, source);
    return source;
  }

  /** @param {Source} source @param {{lines: {text: string, o: number, e: number}[], retract: number}} result
   * @param {Line[]} fresh */
  #take(source, { lines, retract }, fresh) {
    if (retract) this.#takeBack(source, retract, fresh);
    for (const { text, o, e } of lines) fresh.push(this.#line(source, "", source.t, o, e, text));
  }

  /** The cursor has moved up into the last `count` lines of a source. @param {Source} source @param {number} count
   * @param {Line[]} fresh */
  #takeBack(source, count, fresh) {
    const list = this.ranks.get(source.r) ?? [];
    for (const lines of [fresh, list]) {
      for (let i = lines.length - 1; i >= 0 && count; i--) {
        if (lines[i].src !== source || lines[i].kind || lines[i].gone) continue;
        lines[i].gone = true;
        count--;
      }
    }
    this.#sweep([source.r]);
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
      const lines = byRank.get(line.src.r);
      if (lines) lines.push(line);
      else byRank.set(line.src.r, [line]);
    }
    for (const [rank, lines] of byRank) {
      const list = this.ranks.get(rank);
      if (list) mergeLines(list, lines);
      else this.ranks.set(rank, lines);
    }
  }

  /** Take what has gone out of the lists. @param {Iterable<number>} ranks */
  #sweep(ranks) {
    this.version++;
    for (const rank of ranks) {
      const list = this.ranks.get(rank);
      if (list) this.ranks.set(rank, list.filter((line) => !line.gone));
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
      const { r } = this.merged[i].src;
      if (held.has(r)) continue;
      oldest.set(r, (oldest.get(r) ?? 0) + 1);
      left--;
    }
    for (const [rank, count] of oldest) this.#drop(rank, count);
    this.#sweep(oldest.keys());
  }

  /** Make room for `count` lines of a rank: its oldest become one gap for each of its files.
   * @param {number} rank @param {number} count */
  #drop(rank, count) {
    const list = /** @type {Line[]} */ (this.ranks.get(rank));
    /** @type {Map<Source, Line>} */
    const gaps = new Map();
    for (const line of list) {
      if (count <= -gaps.size) break; // a gap takes a place too
      count--;
      if (line.kind === "note" || line.kind === "open") {
        line.gone = true;
        continue;
      }
      const before = gaps.get(line.src);
      if (before) {
        before.gone = true;
        line.o = Math.min(before.o, line.o);
        line.state = "";
      }
      if (line.kind !== "gap") Object.assign(line, { kind: "gap", text: "", plain: undefined, state: "" });
      gaps.set(line.src, line);
    }
    return true;
  }

  /** @param {Line} gap @param {{from: number, to: number, spans: [number, number][]}} answer @param {Uint8Array} bytes */
  #fillGap(gap, { from, to, spans }, bytes) {
    const assembler = new LineAssembler(from);
    const lines = assembler.feed(bytes).lines.concat(assembler.finish().lines);
    const after = to < gap.e ? [{ ...gap, o: to, n: gap.n + 0.5 }] : [];
    let [span, until] = [0, from + (spans[0]?.[0] ?? 0)];
    const fresh = lines.map(({ text, o, e }, i) => {
      while (span < spans.length - 1 && o >= until) until += spans[++span][0];
      const t = Math.min(spans[span]?.[1] ?? gap.t, gap.t);
      return { ...this.#line(gap.src, "", t, o, e, text), n: gap.n - 1 + (i + 1) / (lines.length + 1) };
    });
    if (from > gap.o) Object.assign(gap, { e: from, t: fresh[0]?.t ?? gap.t, n: gap.n - 1 });
    else gap.gone = true;
    const list = (this.ranks.get(gap.src.r) ?? []).concat(fresh, after);
    this.ranks.set(gap.src.r, list.filter((line) => !line.gone).sort(byTime));
    this.merged = this.merged.concat(fresh, after).filter((line) => !line.gone).sort(byTime);
  }
}
