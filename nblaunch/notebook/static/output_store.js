// What the ranks display: which outputs each rank shows, and the outputs that have arrived.

/** @typedef {import("./page_messages.js").OutputContent} OutputContent */
/** @typedef {{numbers: readonly number[], left: number, shown: OutputContent[]}} RankOutputs */

export class OutputStore {
  constructor() {
    /** @type {Map<number, RankOutputs>} */ this.ranks = new Map();
    /** @type {Map<number, OutputContent>} */ this.contents = new Map();
    /** @type {Map<number, Uint8Array[]>} */ this.parts = new Map();
    this.version = 0;
  }

  /** Forget what is shown, but not what has arrived: a snapshot follows. */
  clear() {
    this.ranks.clear();
    this.version++;
  }

  /** @param {import("./page_messages.js").OutputsEntry} entry */
  set([rank, numbers, left]) {
    const shown = this.ranks.get(rank)?.shown ?? [];
    this.ranks.set(rank, { numbers, left, shown });
    this.#refresh();
  }

  /** Take parts of outputs. @param {readonly import("./page_messages.js").OutputPart[]} parts
   * @param {Uint8Array} bytes those of all parts, one after the other */
  add(parts, bytes) {
    let at = 0;
    for (const [number, offset, size, total] of parts) {
      this.#addPart(number, offset, total, bytes.slice(at, at + size));
      at += size;
    }
    this.#refresh();
    this.#prune();
  }

  /** @param {number} number @param {number} offset @param {number} total @param {Uint8Array} bytes */
  #addPart(number, offset, total, bytes) {
    if (this.contents.has(number)) return;
    const known = offset === 0 ? [] : (this.parts.get(number) ?? []);
    const have = known.reduce((sum, part) => sum + part.length, 0);
    if (have !== offset) return; // a part was missed: the kernel sends the output again
    known.push(bytes);
    this.parts.set(number, known);
    if (offset + bytes.length < total) return;
    this.parts.delete(number);
    const whole = new Uint8Array(total);
    let end = 0;
    for (const part of known) {
      whole.set(part, end);
      end += part.length;
    }
    this.contents.set(number, JSON.parse(new TextDecoder().decode(whole)));
  }

  /** Show what has arrived. A replaced output stays until the new one is there. */
  #refresh() {
    this.version++;
    for (const rank of this.ranks.values()) {
      const before = rank.shown;
      rank.shown = rank.numbers.flatMap((number, place) => this.contents.get(number) ?? before[place] ?? []);
    }
  }

  /** Free outputs that no rank shows any more. */
  #prune() {
    const used = new Set([...this.ranks.values()].flatMap(({ numbers }) => numbers));
    for (const known of [this.contents, this.parts])
      for (const number of known.keys()) if (!used.has(number)) known.delete(number);
  }
}
