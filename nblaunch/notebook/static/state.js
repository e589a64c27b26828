// The state of one launch: one for its model, shared by all views, changed by the kernel's messages.
import { ACTIVE_STATES, KernelLink } from "./kernel.js";
import { OutputStore } from "./output_store.js";
import { saveTrace } from "./profile.js";
import { LogStore } from "./store.js";
import { MetricBook, numberOf } from "./series.js";

const NO_INFO = { launch: "", name: "", world_size: 0, ranks: "", device: "", run: "" };

/** @typedef {import("./page_messages.js").ToPage} ToPage */
/** @typedef {import("./page_messages.js").FromPage} FromPage */
/** @typedef {import("./page_messages.js").Changes} Changes */
/** @typedef {import("./page_messages.js").PanelInfo} PanelInfo */
/** @typedef {import("./page_messages.js").StateEntry} StateEntry */
/** @typedef {import("./page_messages.js").FailureEntry} FailureEntry */
/** @typedef {{desc: string, done: number, total: number | null, seconds: number, first: number, level: number}} Bar */
/** @typedef {{values: readonly import("./page_messages.js").UsageValue[], peak: number}} Use the peak is in bytes */

/** What the reader has chosen. The notebook renders a new view when the launch ends; it continues from here.
 * @typedef {object} Reading
 * @property {import("./store.js").Tab} tab
 * @property {boolean} follow
 * @property {number} top
 * @property {{line: import("./store.js").Line, offset: number} | null} anchor
 * @property {import("./store.js").Line | undefined} lastSeen
 * @property {string} query
 * @property {import("./store.js").Line | null} hit
 * @property {string} height of the log, if the reader changed it
 * @property {boolean} wrap long lines of the log
 * @property {number | null} closed time of the stacks that the reader closed
 * @property {number | null} closedProfile time of the profile that the reader closed
 * @property {boolean} traceback whether it is open
 * @property {boolean} others whether they are open
 * @property {Map<number, boolean>} opened whether the outputs of a rank are open, if the reader has chosen */
/** @returns {Reading} */
function freshReading() {
  return {
    tab: "all",
    follow: true,
    top: 0,
    anchor: null,
    lastSeen: undefined,
    query: "",
    hit: null,
    height: "",
    wrap: true,
    closed: null,
    closedProfile: null,
    traceback: true,
    others: false,
    opened: new Map(),
  };
}

/** @param {any} buffer */
function bytesOf(buffer) {
  if (!buffer) return new Uint8Array(0);
  if (buffer instanceof ArrayBuffer) return new Uint8Array(buffer);
  return new Uint8Array(buffer.buffer, buffer.byteOffset, buffer.byteLength);
}

/** Return true if a message is only a heartbeat. @param {ToPage} message */
function isHeartbeat(message) {
  return message?.kind === "delta" && !message.changes && !message.logs && !message.outputs;
}

/** @returns {StateEntry} */
function blankState() {
  return { name: "starting", countdown: "", attempt: 0, log_dir: "", seconds: null, message: "" };
}

export class PanelState {
  /** @param {any} model @param {import("./kernel.js").Clock} [clock] */
  constructor(model, clock) {
    this.model = model;
    /** @type {PanelInfo} */
    this.info = { ...NO_INFO, ...model.get("info") };
    this.seq = 0;
    this.highest = 0;
    this.notice = "";
    this.broken = false;
    this.whole = false;
    /** @type {import("./record.js").RecordKeeper | null} */ this.keeper = null;
    /** @type {Set<() => void>} */ this.views = new Set();
    this.reading = freshReading();
    this.logs = new LogStore();
    /** What nblaunch says. @type {import("./page_messages.js").NoteEntry[]} */ this.notes = [];
    this.outputs = new OutputStore();
    /** @type {import("./page_messages.js").StuckEntry} */ this.stuck = { lines: [], ranks: [] };
    this.state = blankState();
    /** @type {Map<number, string>} */ this.ranks = new Map();
    /** @type {Map<number, Map<string, Bar>>} */ this.progress = new Map();
    /** @type {Map<number, Use>} */ this.resources = new Map();
    /** @type {FailureEntry | null} */ this.failure = null;
    /** @type {import("./page_messages.js").StacksEntry | null} */ this.stacks = null;
    /** @type {import("./page_messages.js").ProfileEntry | null} */ this.profile = null;
    this.metrics = new MetricBook();
    this.#clear();
    this.kernel = new KernelLink(model, this.#launch(), clock);
    this.now = 0;
    this.receivedAt = -Infinity;
  }

  /** Listen, and request missed messages. */
  open() {
    this.model.on("msg:custom", (/** @type {ToPage} */ content, /** @type {any[]} */ buffers) =>
      this.receive(content, buffers),
    );
    this.kernel.heard();
    if (this.isReopened) this.kernel.resync();
    else this.kernel.seen();
  }

  /** True if the page has shown the panel before, and was reloaded. */
  get isReopened() {
    return Number(this.model.get("sent")) > 0;
  }

  dispose() {
    this.kernel.dispose();
    this.views.clear();
  }

  get active() {
    return this.kernel.active;
  }

  /** The ranks that wait for a line of the user. */
  get waiting() {
    return [...this.ranks].filter(([, state]) => state === "waiting").map(([rank]) => rank);
  }

  /** Seconds since the launch began, or its duration. */
  get elapsed() {
    if (this.state.seconds !== null) return this.state.seconds;
    if (this.receivedAt === -Infinity || !ACTIVE_STATES.includes(this.state.name) || this.kernel.gone) return this.now;
    return this.now + (this.kernel.clock.now() - this.receivedAt) / 1000;
  }

  /** @param {ToPage} content @param {any[]} [buffers] */
  receive(content, buffers) {
    const notice = this.notice;
    try {
      this.receivedAt = this.kernel.clock.now();
      this.#dispatch(content, bytesOf(buffers?.[0]));
    } catch (error) {
      this.notice = `The panel could not read a message from the kernel: ${error}`;
    }
    this.kernel.heard();
    if (!isHeartbeat(content) || notice !== this.notice) this.changed();
  }

  changed() {
    for (const view of this.views) view();
  }

  /** Report once that a view could not draw a part. @param {unknown} error */
  drawingFailed(error) {
    if (this.broken) return;
    this.broken = true;
    this.notice = `A part of the panel could not be drawn: ${error}`;
    this.changed();
  }

  /** @param {ToPage} message @param {Uint8Array} bytes */
  #dispatch(message, bytes) {
    switch (message.kind) {
      case "acknowledged":
        return this.kernel.acknowledged(message.action, message.launch);
      case "record":
        this.keeper?.keep(message);
        return this.kernel.recordCame();
      case "trace":
        return this.#saveTrace(message.name, bytes);
      case "snapshot":
        this.seq = message.seq;
        this.highest = Math.max(this.highest, message.seq);
        this.whole = false;
        this.kernel.resynced(message.requests);
        this.now = Number(message.now) || 0;
        this.#clear();
        return this.#apply(message.changes ?? {}, true);
      case "delta":
        if (message.seq > this.highest) this.#delta(message, bytes);
    }
  }

  /** @param {string} name @param {Uint8Array} bytes */
  #saveTrace(name, bytes) {
    if (!this.kernel.traceCame()) return; // another page has asked
    if (bytes.length) saveTrace(name, bytes);
    else this.notice = "The trace is gone: it was removed with the logs of the launch.";
  }

  /** @param {import("./page_messages.js").Delta} delta @param {Uint8Array} bytes */
  #delta({ seq, now, changes, logs, outputs, last }, bytes) {
    this.highest = seq;
    this.whole = Boolean(last) && seq === this.seq + 1;
    if (seq === this.seq + 1) this.seq = seq;
    else this.kernel.resync(); // show what has arrived meanwhile
    this.now = Number(now) || 0;
    if (changes) this.#apply(changes, false);
    if (logs) this.logs.add(logs);
    if (outputs) this.outputs.add(outputs, bytes);
  }

  #clear() {
    this.state = blankState();
    for (let rank = 0; rank < this.info.world_size; rank++) this.ranks.set(rank, "starting");
    this.progress.clear();
    this.resources.clear();
    this.failure = this.stacks = this.profile = null;
    this.stuck = { lines: [], ranks: [] };
    this.outputs.clear();
    this.metrics = new MetricBook();
  }

  /** @param {Changes} changes @param {boolean} isWhole */
  #apply(changes, isWhole) {
    if (changes.state) this.#setState(changes.state);
    for (const [rank, state] of changes.ranks ?? []) this.ranks.set(rank, state);
    for (const rank of new Set(changes.progress?.map(([rank]) => rank))) this.progress.set(rank, new Map());
    for (const bar of changes.progress ?? []) this.#setBar(bar);
    if (changes.charts) this.metrics.arrange(changes.charts);
    if (changes.metrics) this.metrics.add(changes.metrics);
    if (changes.best) this.metrics.mark(changes.best);
    for (const use of changes.resources ?? []) this.#setUse(use);
    for (const entry of changes.outputs ?? []) this.outputs.set(entry);
    if (isWhole) this.notes = [];
    this.notes.push(...(changes.notes ?? []));
    if (changes.failure) this.failure = changes.failure;
    if (changes.stuck) this.stuck = changes.stuck;
    if (this.waiting.length) this.kernel.rankWaits();
    if (changes.stacks) {
      this.stacks = changes.stacks;
      this.kernel.stacksCame();
    }
    if (changes.profile) {
      this.profile = changes.profile;
      this.kernel.profileCame();
    }
  }

  /** @param {Partial<StateEntry>} state */
  #setState(state) {
    const before = this.state;
    this.state = { ...before, ...state };
    if (this.state.attempt > before.attempt) {
      this.progress.clear();
      this.failure = null;
    }
    this.kernel.moved(this.state.name);
    const ends = ACTIVE_STATES.includes(before.name) && !ACTIVE_STATES.includes(this.state.name);
    if (ends && (!this.isReopened || this.keeper?.isInNotebook)) this.kernel.seen();
  }

  /** @param {import("./page_messages.js").ProgressEntry} bar */
  #setBar([rank, desc, done, total, seconds, first, level]) {
    const whole = numberOf(total) ?? 0;
    this.progress.get(rank)?.set(String(desc), {
      desc: String(desc),
      done: numberOf(done) ?? 0,
      total: whole > 0 ? whole : null,
      seconds: numberOf(seconds) ?? 0,
      first: numberOf(first) ?? 0,
      level: numberOf(level) ?? 0,
    });
  }

  /** @param {import("./page_messages.js").ResourceEntry} use */
  #setUse([rank, values]) {
    const memory = values.find(([, , unit]) => unit === "bytes")?.[1] ?? 0;
    this.resources.set(rank, { values, peak: Math.max(memory, this.resources.get(rank)?.peak ?? 0) });
  }

  /** Return what KernelLink may read and call. @returns {import("./kernel.js").Launch} */
  #launch() {
    const panel = this;
    return {
      id: this.info.launch,
      blocking: this.info.blocking,
      get state() {
        return panel.state.name;
      },
      get isTyping() {
        return panel.info.blocking && panel.waiting.length > 0;
      },
      get receivedAt() {
        return panel.receivedAt;
      },
      get isWhole() {
        return panel.whole;
      },
      get logEnds() {
        return panel.logs.ends;
      },
      notify: (text) => {
        if (panel.notice === text) return;
        panel.notice = text;
        panel.changed();
      },
      changed: () => panel.changed(),
      exited: () => panel.changed(),
    };
  }
}
