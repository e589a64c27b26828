// What the tests share.
const encoder = new TextEncoder();

/** @param {string | Uint8Array} text */
export const bytes = (text) => (typeof text === "string" ? encoder.encode(text) : text);

/** Whole numbers below `limit`, the same in every run. */
export function randomSource(seed) {
  let state = seed;
  return (limit) => {
    state = (state * 16807) % 2147483647;
    return state % limit;
  };
}

/** A delta with these logs, parts of outputs, and changes. */
export function deltaOf(seq, { now = seq, logs, parts, last, ...changes } = {}) {
  const some = {
    ...(Object.keys(changes).length && { changes }),
    ...(logs && { logs }),
    ...(parts && { outputs: parts }),
    ...(last && { last }),
  };
  return { kind: "delta", seq, now, ...some };
}

/** A snapshot of these changes, in answer to the latest request of a model. */
export function snapshotOf(seq, { now = seq, to, ...changes } = {}) {
  const requests = to ? [to.sentMessages.findLast(({ kind }) => kind === "resync").request] : [];
  return { kind: "snapshot", seq, now, changes, requests };
}

/** A clock whose time a test moves. */
export class FakeClock {
  constructor() {
    this.time = 1_000_000;
    this.timers = new Map();
    this.count = 0;
  }
  now() {
    return this.time;
  }
  set(act, ms) {
    this.timers.set(++this.count, { act, at: this.time + ms });
    return this.count;
  }
  clear(timer) {
    this.timers.delete(timer);
  }
  /** Let so many milliseconds pass. */
  pass(ms) {
    const end = this.time + ms;
    for (;;) {
      const next = [...this.timers].filter(([, timer]) => timer.at <= end).sort((x, y) => x[1].at - y[1].at)[0];
      if (!next) break;
      this.timers.delete(next[0]);
      this.time = Math.max(this.time, next[1].at);
      next[1].act();
    }
    this.time = end;
  }
}

/** An anywidget model in a page whose kernel is `kernel`. */
export class FakeModel {
  constructor({ info = {}, sent = 0, manager = {} } = {}) {
    this.state = {
      info: {
        launch: "L1",
        name: "train",
        world_size: 2,
        ranks: "2 ranks",
        device: "cpu",
        blocking: true,
        is_session: false,
        run: "",
        ...info,
      },
      sent,
    };
    this.sentMessages = [];
    this.seen = 0; // messages that say so
    this.listeners = [];
    this.widget_manager = manager;
  }
  get(name) {
    return this.state[name];
  }
  on(name, listener) {
    if (name === "msg:custom") this.listeners.push(listener);
  }
  off(name, listener) {
    if (name === "msg:custom") this.listeners = this.listeners.filter((known) => known !== listener);
  }
  send(content) {
    if (content.kind === "seen") this.seen++;
    else this.sentMessages.push(content);
  }
  deliver(content, data) {
    const buffers = data === undefined ? [] : [new DataView(bytes(data).buffer)];
    for (const listener of this.listeners) listener(content, buffers);
  }
  kinds() {
    return this.sentMessages.map((message) => message.kind);
  }
}

/** A kernel connection as JupyterLab has it. */
export class FakeKernel {
  constructor() {
    this.calls = [];
    this.slots = new Set();
    this.connections = new Set();
    this.statusChanged = { connect: (slot) => this.slots.add(slot), disconnect: (slot) => this.slots.delete(slot) };
    this.connectionStatusChanged = {
      connect: (slot) => this.connections.add(slot),
      disconnect: (slot) => this.connections.delete(slot),
    };
    this.clientId = "client";
  }
  interrupt() {
    this.calls.push("interrupt");
    return Promise.resolve();
  }
  restart() {
    this.calls.push("restart");
    return Promise.resolve();
  }
  sendControlMessage(message) {
    this.calls.push(message);
  }
  status(name) {
    for (const slot of this.slots) slot(this, name);
  }
  connection(status) {
    for (const slot of this.connections) slot(this, status);
  }
}
