// What is known of one launch: kept for its model, shared by all its views, changed by the kernel's messages.
import { ACTIVE_STATES, KernelLink } from "./kernel.js";
import { LogStore } from "./store.js";
import { MetricBook, numberOf } from "./series.js";

const OLDER_WAIT = 10000;
const BARS = 3; // progress bars shown for one rank

/** @typedef {{rank: number, type: string, message: string, where: string, source: string, traceback: string,
 *   others: string[], log: string}} Failure */
/** @typedef {{desc: string, done: number, total: number | null, seconds: number}} Bar */
/** @typedef {{cpu: number, memory: number, gpu: number | null, gpuMemory: number | null, peak: number}} Use */
/** @typedef {{id: string, name: string, world: number, device: string, blocking: boolean}} Info */

/** What the reader has chosen: a notebook renders the panel anew when its launch ends, and he reads on where he was.
 * @typedef {object} Reading
 * @property {object | null} by the log that has changed it last
 * @property {import("./store.js").Tab} tab
 * @property {boolean} follow
 * @property {number} top
 * @property {{line: import("./store.js").Line, offset: number} | null} anchor
 * @property {import("./store.js").Line | undefined} lastSeen
 * @property {Set<number>} loaded
 * @property {string} query
 * @property {import("./store.js").Line | null} hit
 * @property {string} height of the log, where he has changed it
 * @property {number | null} closed when the stacks were taken that he has closed
 * @property {boolean} traceback whether it is open
 * @property {boolean} others whether they are open */
/** @returns {Reading} */
function freshReading() {
  return {
    by: null, tab: "all", follow: true, top: 0, anchor: null, lastSeen: undefined, loaded: new Set(), query: "", hit: null,
    height: "", closed: null, traceback: true, others: false,
  };
}

/** @param {any} buffer */
function bytesOf(buffer) {
  if (!buffer) return new Uint8Array(0);
  if (buffer instanceof ArrayBuffer) return new Uint8Array(buffer);
  return new Uint8Array(buffer.buffer, buffer.byteOffset, buffer.byteLength);
}

/** A message that says nothing but that the kernel is there. @param {any} content */
function isSignOfLife(content) {
  return content?.kind === "delta" && Object.keys(content).every((key) => ["kind", "seq", "now"].includes(key));
}

/** @typedef {{name: string, countdown: string, attempt: number, log_dir: string, seconds: number | null, message: string}} LaunchState */
/** @returns {LaunchState} */
function blankState() {
  return { name: "starting", countdown: "", attempt: 0, log_dir: "", seconds: null, message: "" };
}

export class PanelState {
  /** @param {any} model @param {import("./kernel.js").Clock} [clock] */
  constructor(model, clock) {
    this.model = model;
    const info = model.get("info") ?? {};
    /** @type {Info} */
    this.info = {
      id: String(info.launch ?? ""), name: String(info.name ?? ""), world: Number(info.world) || 0,
      device: String(info.device ?? ""), blocking: Boolean(info.blocking),
    };
    this.seq = 0;
    this.highest = 0;
    this.notice = "";
    this.broken = false;
    /** @type {Set<() => void>} */ this.views = new Set();
    this.reading = freshReading();
    this.logs = new LogStore();
    this.state = blankState();
    /** @type {Map<number, string>} */ this.ranks = new Map();
    /** @type {Map<number, Map<string, Bar>>} */ this.progress = new Map();
    /** @type {Map<number, Use>} */ this.resources = new Map();
    /** @type {Failure | null} */ this.failure = null;
    /** @type {{t: number, ranks: [number, string][]} | null} */ this.stacks = null;
    this.metrics = new MetricBook();
    this.#clear();
    this.kernel = new KernelLink(model, this.#launch(), clock);
    this.now = 0;
    this.heard = -Infinity;
    this.asked = 0;
    /** @type {Map<number, {gap: import("./store.js").Line, timer: any}>} */ this.requests = new Map();
  }

  /** Listen; and where this page has missed messages, ask for them. */
  open() {
    this.model.on("msg:custom", (/** @type {any} */ content, /** @type {any[]} */ buffers) => this.receive(content, buffers));
    if (Number(this.model.get("sent")) > 0) this.kernel.resync();
  }

  dispose() {
    this.kernel.dispose();
    for (const { timer } of this.requests.values()) this.kernel.clock.clear(timer);
    this.views.clear();
  }

  get active() {
    return this.kernel.active;
  }

  /** Seconds since the launch began, or what it took. */
  get elapsed() {
    if (this.state.seconds !== null) return this.state.seconds;
    if (this.heard === -Infinity || !ACTIVE_STATES.includes(this.state.name) || this.kernel.gone) return this.now;
    return this.now + (this.kernel.clock.now() - this.heard) / 1000;
  }

  /** @param {any} content @param {any[]} [buffers] */
  receive(content, buffers) {
    const notice = this.notice;
    try {
      this.heard = this.kernel.clock.now();
      this.#dispatch(content, bytesOf(buffers?.[0]));
    } catch (error) {
      this.notice = `The panel could not read a message of the kernel: ${error}`;
    }
    if (!isSignOfLife(content) || notice !== this.notice) this.changed();
  }

  changed() {
    for (const view of this.views) view();
  }

  /** A view could not draw a part of itself: said once, or it would be at every message. @param {unknown} error */
  drawingFailed(error) {
    if (this.broken) return;
    this.broken = true;
    this.notice = `A part of the panel could not be drawn: ${error}`;
    this.changed();
  }

  /** Ask for the lines of a gap. @param {import("./store.js").Line} gap */
  loadOlder(gap) {
    if (!this.logs.mayLoad(gap) || this.requests.size || this.kernel.gone) return;
    const id = ++this.asked;
    const { a, r, s } = gap.src;
    gap.state = "loading";
    const timer = this.kernel.clock.set(() => this.#olderFailed(id), OLDER_WAIT);
    this.requests.set(id, { gap, timer });
    this.kernel.send({ kind: "older", id, a, r, s, from: gap.o, to: gap.e });
    this.changed();
  }

  /** @param {any} content @param {Uint8Array} bytes */
  #dispatch(content, bytes) {
    if (content.kind === "ack") return this.kernel.acknowledged(content.what, content.launch);
    if (content.kind === "older") return this.#older(content, bytes);
    const snapshot = content.kind === "snapshot";
    if (!snapshot && (content.kind !== "delta" || content.seq <= this.highest)) return;
    this.#count(content, snapshot);
    this.now = Number(content.now) || 0;
    if (snapshot) this.#clear();
    this.#apply(content, bytes, snapshot);
  }

  /** @param {{seq: number, rewound?: boolean}} content @param {boolean} snapshot */
  #count({ seq, rewound }, snapshot) {
    this.highest = Math.max(this.highest, seq);
    if (snapshot) {
      this.seq = seq;
      this.kernel.resynced(Boolean(rewound));
    } else if (seq === this.seq + 1) {
      this.seq = seq;
    } else {
      this.kernel.resync(); // what did come is shown meanwhile
    }
  }

  #clear() {
    this.state = blankState();
    for (let rank = 0; rank < this.info.world; rank++) this.ranks.set(rank, "starting");
    this.progress.clear();
    this.resources.clear();
    this.failure = this.stacks = null;
    this.metrics = new MetricBook();
  }

  /** @param {any} delta @param {Uint8Array} bytes @param {boolean} snapshot */
  #apply(delta, bytes, snapshot) {
    if (delta.state) this.#setState(delta.state);
    for (const [rank, state] of delta.ranks ?? []) this.ranks.set(Number(rank), String(state));
    for (const bar of delta.progress ?? []) this.#setBar(bar);
    if (delta.metrics) this.metrics.add(delta.metrics);
    for (const use of delta.resources ?? []) this.#setUse(use);
    if (delta.notes || snapshot) this.logs.addNotes(delta.notes ?? [], snapshot);
    if (delta.failure) this.failure = delta.failure;
    if (delta.stacks) {
      this.stacks = delta.stacks;
      this.kernel.stacksCame();
    }
    if (delta.logs && !this.kernel.rewinds) this.logs.add(delta.logs, bytes);
    if (!ACTIVE_STATES.includes(this.state.name)) this.logs.settle();
  }

  /** @param {Partial<LaunchState>} state */
  #setState(state) {
    const before = this.state;
    this.state = { ...before, ...state };
    if (this.state.attempt > before.attempt) {
      this.progress.clear();
      this.failure = null;
    }
    this.kernel.moved(this.state.name);
  }

  /** @param {[number, string, number, number | null, number]} bar */
  #setBar([rank, desc, done, total, seconds]) {
    let bars = this.progress.get(rank);
    if (!bars) this.progress.set(rank, (bars = new Map()));
    const whole = numberOf(total) ?? 0;
    bars.set(String(desc), { desc: String(desc), done: numberOf(done) ?? 0, total: whole > 0 ? whole : null, seconds: numberOf(seconds) ?? 0 });
    if (bars.size > BARS) bars.delete(/** @type {string} */ (bars.keys().next().value));
  }

  /** @param {[number, number, number, number | null, number | null]} use */
  #setUse([rank, cpu, memory, gpu, gpuMemory]) {
    const peak = Math.max(memory, this.resources.get(rank)?.peak ?? 0);
    this.resources.set(rank, { cpu, memory, gpu: gpu ?? null, gpuMemory: gpuMemory ?? null, peak });
  }

  /** @param {any} answer @param {Uint8Array} bytes */
  #older(answer, bytes) {
    if (answer.id === null || answer.id === undefined) return this.logs.fillUnasked(answer, bytes);
    const request = this.requests.get(answer.id);
    if (!request) return;
    this.kernel.clock.clear(request.timer);
    this.requests.delete(answer.id);
    request.gap.state = ""; // it may be smaller by now than what was asked for
    this.logs.fill(answer, bytes);
  }

  /** @param {number} id */
  #olderFailed(id) {
    const request = this.requests.get(id);
    this.requests.delete(id);
    if (request) request.gap.state = "";
    this.notice = "The older lines did not come: the kernel is busy or gone. The file has them.";
    this.changed();
  }

  /** What KernelLink may know and do. @returns {import("./kernel.js").Launch} */
  #launch() {
    const panel = this;
    return {
      id: this.info.id,
      blocking: this.info.blocking,
      get state() { return panel.state.name; },
      get heard() { return panel.heard; },
      get seq() { return panel.seq; },
      get have() { return panel.logs.hasLines; },
      say: (text) => {
        if (panel.notice === text) return;
        panel.notice = text;
        panel.changed();
      },
      changed: () => panel.changed(),
      lost: () => panel.changed(),
    };
  }
}
