// What the debug console has shown, and the line that it waits for.
import { LineAssembler } from "./lines.js";

const MAX_DEBUG_LINES = 5000;
const encoder = new TextEncoder();

export class DebugStore {
  constructor() {
    this.epoch = 0; // changes where lines were removed: views draw all of them again
    this.assembler = new LineAssembler();
    this.clear();
  }

  /** Forget everything: a snapshot follows. */
  clear() {
    this.epoch++;
    this.assembler = new LineAssembler();
    /** @type {string[]} */ this.lines = [];
    /** @type {import("./page_messages.js").PromptEntry | null} */ this.prompt = null;
    /** @type {readonly number[]} */ this.ranks = [];
    /** @type {import("./page_messages.js").CompletionsEntry | null} */ this.completions = null;
  }

  /** @param {import("./page_messages.js").DebugEntry} entry */
  add({ text, prompt, ranks, completions }) {
    const { lines, retract } = this.assembler.feed(encoder.encode(text));
    const kept = Math.max(0, this.lines.length - retract);
    this.lines = [...this.lines.slice(0, kept), ...lines.map((line) => line.text)].slice(-MAX_DEBUG_LINES);
    if (retract || kept + lines.length > MAX_DEBUG_LINES) this.epoch++;
    this.prompt = prompt;
    this.ranks = ranks;
    if (completions) this.completions = completions;
  }

  get isShown() {
    return this.lines.length > 0 || this.prompt !== null;
  }
}
