// Stop, kill, stacks and restart: first a message, and where the kernel cannot hear it, its interrupt.

const ACK_WAIT = 700;
const FRESH = 5000; // a kernel that said something so long ago still runs our launch
const ARMED = 3000;
const PATIENCE = 5000;
const RESYNC_WAIT = 2000;
const RESYNC_MOST = 30000;
const ASK_INTERRUPT = "use the notebook's Interrupt button";
const GONE_STATUSES = ["restarting", "autorestarting", "dead", "terminating"];
export const ACTIVE_STATES = ["starting", "running", "stopping"];

/** @typedef {{now: () => number, set: (act: () => void, ms: number) => any, clear: (timer: any) => void}} Clock */
/** @type {Clock} */
const pageClock = {
  now: () => Date.now(),
  set: (act, ms) => setTimeout(act, ms),
  clear: (timer) => clearTimeout(timer),
};

/** What the panel knows that decides here.
 * @typedef {object} Launch
 * @property {string} id
 * @property {boolean} blocking
 * @property {string} state
 * @property {number} heard when the last message came, by the clock
 * @property {number} seq the last number seen in order
 * @property {boolean} hasLines whether lines of the logs are here
 * @property {(text: string) => void} say
 * @property {() => void} changed
 * @property {() => void} lost the kernel has gone */

export class KernelLink {
  /** @param {any} model @param {Launch} launch @param {Clock} [clock] */
  constructor(model, launch, clock = pageClock) {
    this.model = model;
    this.launch = launch;
    this.clock = clock;
    /** @type {"" | "stop" | "kill"} */ this.asked = "";
    this.again = false; // clicked once more while the first click was not acknowledged
    this.armed = false;
    this.gone = false;
    /** @type {Map<string, any>} */ this.timers = new Map();
    this.resyncWait = RESYNC_WAIT;
    this.rewinds = false; // no line is here, and all are to come after the next snapshot
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
      return false; // the comm is closed: what follows the missing answer says so
    }
  }

  /** The first click asks to stop, every other to kill: at once, or when the first has been heard or has not. */
  stop() {
    if (!this.active) return;
    if (this.timers.has("ack")) this.again ||= this.asked === "stop";
    else
      this.#ask(
        this.asked || this.launch.state === "stopping" ? "kill" : "stop",
      );
    this.launch.changed();
  }

  /** @param {"stop" | "kill"} kind */
  #ask(kind) {
    this.asked = kind;
    this.send({ kind, launch: this.launch.id });
    this.#after("ack", ACK_WAIT, () => {
      this.#interruptOrSay();
      this.#askAgain(); // with an interrupt of its own: the first one only stops
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
    if (action === "stop" && this.asked === "kill") return; // late: that of the click before
    this.#cancel("ack");
    this.#cancel("patience");
    this.launch.say("");
    if (action === "done") this.#forget();
    this.#askAgain();
    if (action === "done" && this.active) this.resync();
    this.launch.changed();
  }

  /** The launch's state has changed, so the kernel has done something. @param {string} state */
  moved(state) {
    if (state === "running" || state === "starting") return;
    this.#cancel("patience");
    this.launch.say("");
    if (state === "stopping" && this.asked === "stop") {
      this.#cancel("ack"); // it has been heard, by whatever way: an interrupt would kill now
      this.#askAgain();
    }
    if (!ACTIVE_STATES.includes(state)) {
      this.#cancel("ack");
      this.#forget();
    }
  }

  stacks() {
    this.send({ kind: "stacks", launch: this.launch.id });
    this.launch.say("");
    this.#after("stacks", PATIENCE, () =>
      this.launch.say(
        "No stacks: the kernel does not answer while its cell runs.",
      ),
    );
  }

  stacksCame() {
    this.#cancel("stacks");
  }

  /** Messages are missing: ask for everything, again after a while until it comes, less and less often. */
  resync() {
    if (this.timers.has("resync") || this.gone) return;
    const { seq, hasLines } = this.launch;
    this.rewinds = !hasLines;
    this.send({ kind: "resync", seq, has_lines: hasLines });
    this.#after("resync", this.resyncWait, () => this.resync());
    this.resyncWait = Math.min(RESYNC_MOST, 2 * this.resyncWait);
  }

  /** A snapshot has come. @param {boolean} rewound and all lines will */
  resynced(rewound) {
    if (this.rewinds && !rewound) return; // it was for another page
    this.rewinds = false;
    this.#cancel("resync");
    this.resyncWait = RESYNC_WAIT;
  }

  /** The first click arms, the second within 3 s restarts. */
  restart() {
    if (!this.armed) {
      const session = this.#session();
      if (!session && (!this.#kernel() || this.#inVsCode())) {
        return this.launch.say(
          "Use your editor's Restart button: a page may not restart this kernel.",
        );
      }
      this.armed = true;
      this.#after("armed", ARMED, () => this.#disarm());
      return this.launch.changed();
    }
    this.#disarm();
    const failed = () =>
      this.launch.say(
        "The kernel did not restart: use the notebook's Restart button.",
      );
    try {
      const session = this.#session();
      Promise.resolve(
        session ? session.restartKernel() : this.#kernel().restart(),
      ).catch(failed);
    } catch {
      failed();
    }
  }

  dispose() {
    for (const timer of this.timers.values()) this.clock.clear(timer);
    this.timers.clear();
    try {
      this.watched?.disconnect(this.onStatus);
    } catch {
      this.watched = null; // the kernel connection was disposed of before
    }
  }

  #watch() {
    this.onStatus = (
      /** @type {unknown} */ _,
      /** @type {string} */ status,
    ) => {
      if (!GONE_STATUSES.includes(status) || this.gone) return;
      this.gone = true;
      this.#forget();
      for (const name of ["ack", "patience", "stacks", "resync"])
        this.#cancel(name);
      this.launch.say("");
      this.launch.lost();
    };
    try {
      this.watched = this.#kernel()?.statusChanged;
      this.watched?.connect(this.onStatus);
    } catch {
      this.watched = null; // an editor whose kernels have no such signal
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

  /** No acknowledgement came. Only a kernel that surely runs our launch in its cell may be interrupted. */
  #interruptOrSay() {
    if (!this.active) return;
    if (!this.launch.blocking) {
      return this.launch.say(
        "The kernel is busy: it stops when the running cell ends, or run %distributed stop.",
      );
    }
    if (this.clock.now() - this.launch.heard > FRESH) {
      return this.launch.say(`The kernel does not answer: ${ASK_INTERRUPT}.`);
    }
    if (!this.#kernel())
      return this.launch.say(
        `From here the kernel cannot be reached: ${ASK_INTERRUPT}.`,
      );
    const failed = () =>
      this.launch.say(`The kernel could not be interrupted: ${ASK_INTERRUPT}.`);
    try {
      Promise.resolve(this.#interrupt(this.#kernel())).catch(failed);
      this.#after(
        "patience",
        PATIENCE,
        () =>
          this.active &&
          this.launch.say(`The kernel has not stopped yet: ${ASK_INTERRUPT}.`),
      );
    } catch {
      failed();
    }
  }

  /** @param {any} kernel */
  #interrupt(kernel) {
    // VS Code's kernel.interrupt() calls a server that is not there; its control messages are passed on.
    return this.#inVsCode()
      ? kernel.sendControlMessage(interruptRequest(kernel))
      : kernel.interrupt();
  }

  /** Nothing is asked for any more. */
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

/** Jupyter's message for the control channel, by hand. @param {any} kernel */
function interruptRequest(kernel) {
  return {
    header: {
      msg_type: "interrupt_request",
      msg_id:
        globalThis.crypto?.randomUUID?.() ??
        `nbl-${Date.now()}-${Math.random()}`,
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
