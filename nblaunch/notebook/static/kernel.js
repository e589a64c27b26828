// Stop, kill, stacks and restart: a message first, then an interrupt of a kernel that does not answer.

const ACK_TIMEOUT_MS = 700;
const MAX_SILENCE_MS = 5000; // after a longer silence the kernel may no longer run this launch
const ARMED_MS = 3000;
const ANSWER_TIMEOUT_MS = 5000;
const SILENCE_MS = 6500; // three heartbeats of the kernel
const RESYNC_PAUSE_MS = 2000;
const MAX_RESYNC_PAUSE_MS = 30000;
const RECORD_TIMEOUT_MS = 2000; // before a restart
const ASK_INTERRUPT = "use the notebook's Interrupt button";
const GONE_STATUSES = ["restarting", "autorestarting", "dead", "terminating"];
export const ACTIVE_STATES = ["starting", "running", "stopping"];

/** Say how a kernel has exited. @param {string} status @param {string} run of the detached run that it showed, if any */
export const exitText = (status, run) =>
  `Kernel ${status.endsWith("restarting") ? "restarted" : "exited"}${run && "; the run goes on"}`;

/** @typedef {{now: () => number, set: (act: () => void, ms: number) => any, clear: (timer: any) => void}} Clock */
/** @type {Clock} */
const pageClock = {
  now: () => Date.now(),
  set: (act, ms) => setTimeout(act, ms),
  clear: (timer) => clearTimeout(timer),
};

/** What decides about a request.
 * @typedef {object} Launch
 * @property {string} id
 * @property {boolean} blocking
 * @property {string} state
 * @property {boolean} isTyping whether the cell waits for a line of the user
 * @property {number} receivedAt when the last message arrived, by the clock
 * @property {boolean} isWhole whether nothing more follows: the launch has ended, and the page has all of it
 * @property {import("./page_messages.js").LogEnd[]} logEnds
 * @property {(text: string) => void} notify show a notice, or none for ""
 * @property {() => void} changed
 * @property {() => void} exited called when the kernel has exited */

export class KernelLink {
  /** @param {any} model @param {Launch} launch @param {Clock} [clock] */
  constructor(model, launch, clock = pageClock) {
    this.model = model;
    this.launch = launch;
    this.clock = clock;
    /** @type {"" | "stop" | "kill"} */ this.asked = "";
    this.again = false; // a second click came before the acknowledgement of the first
    this.armed = false;
    this.isProfiling = this.wantsTrace = false;
    /** @type {string} the status by which the kernel has exited */ this.gone = "";
    /** @type {Map<string, any>} */ this.timers = new Map();
    this.resyncWait = RESYNC_PAUSE_MS;
    /** @type {Set<number>} */ this.resyncs = new Set(); // requests without an answer
    this.tries = 0; // requests since the last message
    this.heardAt = clock.now();
    this.isOffline = false; // the page has lost its connection to the kernel
    this.#watch();
  }

  get active() {
    return !this.gone && ACTIVE_STATES.includes(this.launch.state);
  }

  /** @param {import("./page_messages.js").FromPage} message */
  send(message) {
    try {
      this.model.send(message);
      return true;
    } catch {
      return false; // the comm is closed; the missing answer is reported
    }
  }

  /** The first click requests a stop, later ones a kill: at once, or when the first is answered or times out. */
  stop() {
    if (!this.active) return;
    if (this.timers.has("ack")) this.again ||= this.asked === "stop";
    else this.#ask(this.asked || this.launch.state === "stopping" ? "kill" : "stop");
    this.launch.changed();
  }

  /** @param {"stop" | "kill"} kind */
  #ask(kind) {
    this.asked = kind;
    this.send({ kind, launch: this.launch.id });
    if (kind === "stop" && this.launch.isTyping) return this.#interruptOrNotify(); // only that ends the wait for a line
    this.#after("ack", ACK_TIMEOUT_MS, () => {
      this.#interruptOrNotify();
      this.#askAgain(); // sends its own interrupt: the first one only stops
    });
  }

  #askAgain() {
    const again = this.again && this.active;
    this.again = false;
    if (again) this.#ask("kill");
  }

  /** @param {import("./page_messages.js").Acknowledged["action"]} action @param {string} launch */
  acknowledged(action, launch) {
    if (launch !== this.launch.id) return;
    if (action === "profile") return this.#cancel("profile");
    if (action === "stop" && this.asked === "kill") return; // late: it answers the click before
    this.#cancel("ack");
    this.#cancel("patience");
    this.launch.notify("");
    if (action === "done") this.#forget();
    this.#askAgain();
    if (action === "done" && this.active) this.resync();
    this.launch.changed();
  }

  /** Handle a change of the launch's state. @param {string} state */
  moved(state) {
    if (state === "running" || state === "starting") return;
    this.#cancel("patience");
    this.launch.notify("");
    if (state === "stopping" && this.asked === "stop") {
      this.#cancel("ack"); // the stop has arrived: an interrupt would now kill
      this.#askAgain();
    }
    if (!ACTIVE_STATES.includes(state)) {
      this.#cancel("ack");
      this.#cancel("look");
      this.profileCame();
      this.#forget();
    }
  }

  stacks() {
    this.send({ kind: "stacks", launch: this.launch.id });
    this.launch.notify("");
    this.#after("stacks", ANSWER_TIMEOUT_MS, () =>
      this.launch.notify("No stacks: the kernel does not answer while a cell runs."),
    );
  }

  stacksCame() {
    this.#cancel("stacks");
  }

  /** Ask for a profile, which the kernel acknowledges at once. */
  profile() {
    this.isProfiling = true;
    this.send({ kind: "profile", launch: this.launch.id });
    this.launch.notify("Recording what the ranks do, then reading it …");
    this.#after("profile", ANSWER_TIMEOUT_MS, () => {
      this.isProfiling = false;
      this.launch.notify("No profile: the kernel does not answer while a cell runs.");
    });
    this.launch.changed();
  }

  profileCame() {
    this.#cancel("profile");
    this.isProfiling = false;
    this.launch.notify("");
  }

  /** Ask for the trace of the last profile, to save it. */
  trace() {
    this.wantsTrace = true;
    this.launch.notify("");
    this.send({ kind: "trace", launch: this.launch.id });
  }

  /** Return whether this page has asked for the trace that has come. */
  traceCame() {
    const wanted = this.wantsTrace;
    this.wantsTrace = false;
    return wanted;
  }

  /** Open the debugger on a rank: its prompt comes in the cell. @param {number} rank */
  look(rank) {
    this.send({ kind: "look", launch: this.launch.id, rank });
    this.launch.notify("");
    const late = `Rank ${rank} did not open a debugger: it runs C code, or the kernel does not answer while a cell runs.`;
    this.#after("look", ANSWER_TIMEOUT_MS, () => this.launch.notify(late));
  }

  /** A rank waits for a line. */
  rankWaits() {
    this.#cancel("look");
  }

  /** Any message has arrived. Without another one the page asks whether it has missed some. */
  heard() {
    this.heardAt = this.clock.now();
    this.tries = 0;
    if (this.launch.isWhole || this.gone) this.#cancel("silence");
    else this.#after("silence", SILENCE_MS, () => this.resync());
  }

  /** Seconds without a message, if the kernel does not answer either; else 0. */
  get silence() {
    const seconds = Math.round((this.clock.now() - this.heardAt) / 1000);
    return this.tries > 1 && !this.gone && 1000 * seconds > SILENCE_MS ? seconds : 0;
  }

  /** Request a snapshot because messages may be missing. Repeat with growing pauses until it arrives. */
  resync() {
    if (this.timers.has("resync") || this.gone) return;
    const request = Math.floor(Math.random() * 2 ** 48); // other pages ask, too
    this.resyncs.add(request);
    this.tries++;
    this.send({ kind: "resync", request, logs: this.launch.logEnds });
    this.#after("resync", this.resyncWait, () => (this.resync(), this.launch.changed()));
    this.resyncWait = Math.min(MAX_RESYNC_PAUSE_MS, 2 * this.resyncWait);
  }

  /** Handle a snapshot. @param {readonly number[]} requests those that it answers, of all pages */
  resynced(requests) {
    if (!requests.some((request) => this.resyncs.has(request))) return;
    this.resyncs.clear();
    this.#cancel("resync");
    this.resyncWait = RESYNC_PAUSE_MS;
  }

  /** Say that a page shows the panel, or the end of the launch. */
  seen() {
    this.send({ kind: "seen", launch: this.launch.id });
  }

  /** Request the record, which comes as a message. */
  askRecord() {
    if (!this.gone) this.send({ kind: "record", launch: this.launch.id });
  }

  /** The record has arrived, and is in the notebook. */
  recordCame() {
    if (this.timers.has("restart")) this.#restartNow();
  }

  /** Restart the kernel on the second click within 3 s. */
  restart() {
    if (!this.armed) {
      const session = this.#session();
      if (!session && (!this.#kernel() || this.#inVsCode())) {
        return this.launch.notify("Use your editor's Restart button: the panel cannot restart this kernel.");
      }
      this.armed = true;
      this.#after("armed", ARMED_MS, () => this.#disarm());
      return this.launch.changed();
    }
    this.#disarm();
    if (!this.active) return this.#restartNow();
    this.launch.notify("Saving the record, then restarting …");
    this.askRecord(); // the notebook keeps it
    this.#after("restart", RECORD_TIMEOUT_MS, () => this.#restartNow());
  }

  #restartNow() {
    this.#cancel("restart");
    const failed = () => this.launch.notify("The kernel did not restart: use the notebook's Restart button.");
    try {
      const session = this.#session();
      Promise.resolve(session ? session.restartKernel() : this.#kernel().restart()).catch(failed);
    } catch {
      failed();
    }
  }

  dispose() {
    for (const timer of this.timers.values()) this.clock.clear(timer);
    this.timers.clear();
    try {
      this.watched?.disconnect(this.onStatus);
      this.connection?.disconnect(this.onConnection);
    } catch {
      this.watched = null; // the kernel connection is already disposed
    }
  }

  #watch() {
    this.onStatus = (/** @type {unknown} */ _, /** @type {string} */ status) => {
      if (!GONE_STATUSES.includes(status) || this.gone) return;
      this.gone = status;
      this.#forget();
      for (const name of ["ack", "patience", "stacks", "profile", "resync", "silence", "look", "restart"])
        this.#cancel(name);
      this.launch.notify("");
      this.launch.exited();
    };
    this.onConnection = (/** @type {unknown} */ _, /** @type {string} */ status) => {
      this.isOffline = status !== "connected";
      this.launch.changed();
      if (this.isOffline || this.launch.isWhole) return;
      this.#cancel("resync"); // what was asked before may be lost
      this.resyncWait = RESYNC_PAUSE_MS;
      this.resyncs.clear();
      this.resync();
    };
    try {
      this.watched = this.#kernel()?.statusChanged;
      this.watched?.connect(this.onStatus);
      this.connection = this.#kernel()?.connectionStatusChanged;
      this.connection?.connect(this.onConnection);
    } catch {
      this.watched = null; // this editor's kernels have no such signal
    }
  }

  #kernel() {
    try {
      return this.model.widget_manager?.kernel ?? null;
    } catch {
      return null;
    }
  }

  #session() {
    try {
      const session = this.model.widget_manager?.context?.sessionContext;
      return typeof session?.restartKernel === "function" ? session : null;
    } catch {
      return null;
    }
  }

  #inVsCode() {
    return this.#kernel()?.serverSettings?.wsUrl === "BOGUS_PVSC";
  }

  /** Interrupt a kernel that did not acknowledge, but only if its running cell is surely this launch. */
  #interruptOrNotify() {
    if (!this.active) return;
    if (!this.launch.blocking) {
      return this.launch.notify("The kernel is busy: the launch stops when the running cell ends.");
    }
    if (this.clock.now() - this.launch.receivedAt > MAX_SILENCE_MS) {
      return this.launch.notify(`The kernel does not answer: ${ASK_INTERRUPT}.`);
    }
    if (!this.#kernel()) return this.launch.notify(`The panel cannot reach the kernel: ${ASK_INTERRUPT}.`);
    const failed = () => this.launch.notify(`The kernel could not be interrupted: ${ASK_INTERRUPT}.`);
    try {
      Promise.resolve(this.#interrupt(this.#kernel())).catch(failed);
      this.#after(
        "patience",
        ANSWER_TIMEOUT_MS,
        () => this.active && this.launch.notify(`The kernel has not stopped yet: ${ASK_INTERRUPT}.`),
      );
    } catch {
      failed();
    }
  }

  /** @param {any} kernel */
  #interrupt(kernel) {
    // VS Code's kernel.interrupt() calls a server that does not exist; control messages do arrive.
    return this.#inVsCode() ? kernel.sendControlMessage(interruptRequest(kernel)) : kernel.interrupt();
  }

  /** Drop all pending requests. */
  #forget() {
    this.asked = "";
    this.again = false;
  }

  #disarm() {
    this.armed = false;
    this.#cancel("armed");
    this.launch.changed();
  }

  /** @param {string} name @param {number} ms @param {() => void} act */
  #after(name, ms, act) {
    this.#cancel(name);
    this.timers.set(
      name,
      this.clock.set(() => (this.timers.delete(name), act()), ms),
    );
  }

  /** @param {string} name */
  #cancel(name) {
    if (!this.timers.has(name)) return;
    this.clock.clear(this.timers.get(name));
    this.timers.delete(name);
  }
}

/** Build Jupyter's interrupt request for the control channel. @param {any} kernel */
function interruptRequest(kernel) {
  return {
    header: {
      msg_type: "interrupt_request",
      msg_id: globalThis.crypto?.randomUUID?.() ?? `nbl-${Date.now()}-${Math.random()}`,
      session: kernel.clientId ?? "",
      username: kernel.username ?? "",
      version: "5.3",
      date: new Date().toISOString(),
    },
    parent_header: {},
    metadata: {},
    content: {},
    channel: "control",
    buffers: [],
  };
}
