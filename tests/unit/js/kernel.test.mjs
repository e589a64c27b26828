// Stop, kill and restart: what is sent when, and what is never done.
import assert from "node:assert/strict";
import test from "node:test";
import { PanelState } from "../../../nblaunch/notebook/static/state.js";
import { deltaOf, snapshotOf, FakeClock, FakeKernel, FakeModel } from "./helpers.mjs";

const VS_CODE = { wsUrl: "BOGUS_PVSC" };

/** A panel whose launch runs. */
function running({ info = {}, kernel = new FakeKernel(), manager = { kernel } } = {}) {
  const clock = new FakeClock();
  const model = new FakeModel({ info, manager });
  const panel = new PanelState(model, clock);
  panel.open();
  model.deliver(deltaOf(1, { state: { name: "running" } }));
  model.sentMessages.length = 0;
  return { clock, model, panel, kernel };
}
/** What was sent, without what a page asks that hears nothing. */
const clicks = (model) => model.kinds().filter((kind) => kind !== "resync");
const state = (model, name, seq = 2) => model.deliver(deltaOf(seq, { now: 2, state: { name } }));

test("a stop that is acknowledged interrupts nothing", () => {
  const { clock, model, panel, kernel } = running();
  panel.kernel.stop();
  assert.deepEqual(model.sentMessages, [{ kind: "stop", launch: "L1" }]);
  clock.pass(699);
  model.deliver({ kind: "acknowledged", action: "stop", launch: "L1" });
  clock.pass(60_000);
  assert.deepEqual(kernel.calls, []);
  assert.equal(panel.kernel.asked, "stop");
});

test("without an acknowledgement in 0.7 s the kernel is interrupted, once", () => {
  const { clock, panel, kernel } = running();
  panel.kernel.stop();
  clock.pass(699);
  assert.deepEqual(kernel.calls, []);
  clock.pass(1);
  assert.deepEqual(kernel.calls, ["interrupt"]);
  clock.pass(60_000);
  assert.deepEqual(kernel.calls, ["interrupt"]);
});

test("when an interrupt changes nothing the panel says which button to press", () => {
  const { clock, model, panel } = running();
  panel.kernel.stop();
  clock.pass(5600);
  assert.equal(panel.notice, "");
  clock.pass(200);
  assert.match(panel.notice, /has not stopped yet: use the notebook's Interrupt button/);
  state(model, "stopping");
  assert.equal(panel.notice, "");
});

test("the second click kills, by the same ways", () => {
  const { clock, model, panel, kernel } = running();
  panel.kernel.stop();
  model.deliver({ kind: "acknowledged", action: "stop", launch: "L1" });
  panel.kernel.stop();
  assert.deepEqual(model.sentMessages, [
    { kind: "stop", launch: "L1" },
    { kind: "kill", launch: "L1" },
  ]);
  clock.pass(700);
  assert.deepEqual(kernel.calls, ["interrupt"]);
});

test("where the launch is stopping already the first click kills", () => {
  const { model, panel } = running();
  state(model, "stopping");
  panel.kernel.stop();
  assert.deepEqual(clicks(model), ["kill"]);
});

test("a click before the acknowledgement of the first kills as soon as that comes, once", () => {
  const { clock, model, panel, kernel } = running();
  panel.kernel.stop();
  clock.pass(300);
  panel.kernel.stop();
  panel.kernel.stop();
  assert.deepEqual(clicks(model), ["stop"]);
  model.deliver({ kind: "acknowledged", action: "stop", launch: "L1" });
  assert.deepEqual(clicks(model), ["stop", "kill"]);
  model.deliver({ kind: "acknowledged", action: "kill", launch: "L1" });
  clock.pass(60_000);
  assert.deepEqual(clicks(model), ["stop", "kill"]);
  assert.deepEqual(kernel.calls, []);
});

test("a click before the acknowledgement of the first is not lost on a kernel that never answers", () => {
  const { clock, model, panel, kernel } = running();
  panel.kernel.stop();
  clock.pass(300);
  panel.kernel.stop();
  clock.pass(399);
  assert.deepEqual([clicks(model), kernel.calls], [["stop"], []]);
  clock.pass(1);
  assert.deepEqual([clicks(model), kernel.calls], [["stop", "kill"], ["interrupt"]]);
  clock.pass(699);
  assert.deepEqual(kernel.calls, ["interrupt"]);
  clock.pass(1);
  assert.deepEqual(kernel.calls, ["interrupt", "interrupt"]);
  clock.pass(60_000);
  assert.deepEqual([clicks(model).length, kernel.calls.length], [2, 2]);
});

test("a click too many is forgotten with the launch", () => {
  const { clock, model, panel } = running();
  panel.kernel.stop();
  panel.kernel.stop();
  state(model, "stopped");
  clock.pass(60_000);
  assert.deepEqual(clicks(model), ["stop"]);
  assert.equal(panel.kernel.again, false);
});

test("a stop that takes effect unacknowledged is no reason to interrupt, which would kill", () => {
  const { clock, model, panel, kernel } = running();
  panel.kernel.stop();
  clock.pass(600);
  state(model, "stopping");
  clock.pass(60_000);
  assert.deepEqual(kernel.calls, []);
});

test("a late acknowledgement of the stop is none of the kill", () => {
  const { clock, model, panel, kernel } = running();
  panel.kernel.stop();
  clock.pass(700);
  panel.kernel.stop();
  model.deliver({ kind: "acknowledged", action: "stop", launch: "L1" });
  clock.pass(700);
  assert.deepEqual(kernel.calls, ["interrupt", "interrupt"]);
});

test("an empty message says that the kernel runs our launch", () => {
  const { clock, model, panel, kernel } = running();
  for (let seq = 2; seq < 30; seq++) {
    clock.pass(2000);
    model.deliver(deltaOf(seq, { now: 2 * seq }));
  }
  panel.kernel.stop();
  clock.pass(700);
  assert.deepEqual(kernel.calls, ["interrupt"]);
});

test("in VS Code an interrupt_request goes over the control channel", () => {
  const { clock, panel, kernel } = running();
  kernel.serverSettings = VS_CODE;
  panel.kernel.stop();
  clock.pass(700);
  const [message] = kernel.calls;
  assert.equal(kernel.calls.length, 1);
  assert.deepEqual(
    { ...message, header: { ...message.header, msg_id: "", date: "" } },
    {
      header: { msg_type: "interrupt_request", msg_id: "", session: "client", username: "", version: "5.3", date: "" },
      parent_header: {},
      metadata: {},
      content: {},
      channel: "control",
      buffers: [],
    },
  );
  assert.ok(message.header.msg_id && !Number.isNaN(Date.parse(message.header.date)));
});

test("a stale panel interrupts nothing: the kernel may run a stranger's cell", () => {
  const { clock, panel, kernel } = running();
  clock.pass(4400);
  panel.kernel.stop();
  clock.pass(700);
  assert.deepEqual(kernel.calls, []);
  assert.match(panel.notice, /does not answer: use the notebook's Interrupt button/);
});

test("a background launch interrupts nothing", () => {
  const { clock, panel, kernel } = running({ info: { blocking: false } });
  panel.kernel.stop();
  clock.pass(700);
  assert.deepEqual(kernel.calls, []);
  assert.match(panel.notice, /busy: the launch stops when the running cell ends/);
});

test("a launch that has ended meanwhile interrupts nothing", () => {
  const { clock, model, panel, kernel } = running();
  panel.kernel.stop();
  clock.pass(600);
  state(model, "finished");
  clock.pass(60_000);
  assert.deepEqual(kernel.calls, []);
  panel.kernel.stop();
  assert.deepEqual(clicks(model), ["stop"]);
});

for (const [name, manager] of [
  ["no widget manager", null],
  ["no kernel", { kernel: null }],
  [
    "a manager that throws",
    {
      get kernel() {
        throw new Error("no");
      },
      get context() {
        throw new Error("no");
      },
    },
  ],
]) {
  test(`with ${name} the panel says which buttons to press`, () => {
    const { clock, panel } = running({ manager });
    panel.kernel.stop();
    clock.pass(700);
    assert.match(panel.notice, /use the notebook's Interrupt button/);
    panel.kernel.restart();
    assert.match(panel.notice, /Use your editor's Restart button/);
    assert.equal(panel.kernel.armed, false);
    panel.dispose();
  });
}

test("a failed interrupt is reported", async () => {
  const kernel = new FakeKernel();
  kernel.interrupt = () => Promise.reject(new Error("403"));
  const { clock, panel } = running({ kernel });
  panel.kernel.stop();
  clock.pass(700);
  await new Promise((resolve) => setImmediate(resolve));
  assert.match(panel.notice, /could not be interrupted: use the notebook's Interrupt button/);
});

test("a closed comm is a kernel that does not answer", () => {
  const { clock, model, panel, kernel } = running();
  model.send = () => {
    throw new Error("closed");
  };
  panel.kernel.stop();
  clock.pass(700);
  assert.deepEqual(kernel.calls, ["interrupt"]);
});

test("an acknowledgement of another launch is not ours", () => {
  const { clock, model, panel, kernel } = running();
  panel.kernel.stop();
  model.deliver({ kind: "acknowledged", action: "stop", launch: "L0" });
  clock.pass(700);
  assert.deepEqual(kernel.calls, ["interrupt"]);
});

test("done: the launch had ended, and the panel asks how", () => {
  const { clock, model, panel, kernel } = running();
  panel.kernel.stop();
  model.deliver({ kind: "acknowledged", action: "done", launch: "L1" });
  assert.equal(panel.kernel.asked, "");
  assert.deepEqual({ ...model.sentMessages.at(-1), request: 0 }, { kind: "resync", request: 0, logs: [] });
  clock.pass(1000);
  assert.deepEqual(kernel.calls, []);
});

test("restart takes two clicks within three seconds, and opens no dialog of the session's", () => {
  const session = [];
  const kernel = new FakeKernel();
  const manager = { kernel, context: { sessionContext: { restartKernel: () => session.push("restart") } } };
  const { clock, model, panel } = running({ kernel, manager });
  panel.kernel.restart();
  assert.ok(panel.kernel.armed);
  clock.pass(3000);
  assert.ok(!panel.kernel.armed);
  panel.kernel.restart();
  clock.pass(2999);
  panel.kernel.restart();
  assert.deepEqual([session, clicks(model).at(-1)], [[], "record"]);
  model.deliver({ kind: "record", html: "", text: "" });
  assert.deepEqual(session, ["restart"]);
  clock.pass(60_000);
  assert.deepEqual(session, ["restart"]);
  assert.deepEqual(kernel.calls, []);
  assert.ok(!panel.kernel.armed);
});

test("without a session the kernel itself restarts, also if it does not answer", () => {
  const { clock, panel, kernel } = running();
  panel.kernel.restart();
  panel.kernel.restart();
  clock.pass(2000);
  assert.deepEqual(kernel.calls, ["restart"]);
});

test("in VS Code restart points at the editor's button", () => {
  const { panel, kernel } = running();
  kernel.serverSettings = VS_CODE;
  panel.kernel.restart();
  panel.kernel.restart();
  assert.deepEqual(kernel.calls, []);
  assert.match(panel.notice, /Use your editor's Restart button/);
});

test("a failed restart is reported", async () => {
  const kernel = new FakeKernel();
  kernel.restart = () => Promise.reject(new Error("500"));
  const { clock, panel } = running({ kernel });
  panel.kernel.restart();
  panel.kernel.restart();
  clock.pass(2000);
  await new Promise((resolve) => setImmediate(resolve));
  assert.match(panel.notice, /did not restart/);
});

for (const status of ["restarting", "autorestarting", "dead", "terminating"]) {
  test(`when the kernel is ${status} the panel is a picture`, () => {
    const { clock, model, panel, kernel } = running();
    panel.kernel.stop();
    kernel.status(status);
    assert.equal(panel.active, false);
    clock.pass(60_000);
    assert.deepEqual(kernel.calls, []);
    model.sentMessages.length = 0;
    panel.kernel.stop();
    panel.kernel.resync();
    assert.deepEqual(model.sentMessages, []);
    assert.equal(panel.elapsed, 1);
    panel.kernel.restart();
    assert.ok(panel.kernel.armed);
  });
}

test("busy and idle are no end", () => {
  const { panel, kernel } = running();
  for (const status of ["busy", "idle", "unknown", "starting"]) kernel.status(status);
  assert.ok(panel.active);
});

test("after it is disposed of nothing is left: no timer, no listener", () => {
  const { clock, panel, kernel } = running();
  panel.kernel.stop();
  panel.kernel.restart();
  panel.kernel.resync();
  panel.dispose();
  assert.equal(clock.timers.size, 0);
  assert.equal(kernel.slots.size + kernel.connections.size, 0);
});

test("missing stacks are reported", () => {
  const { clock, model, panel } = running();
  panel.kernel.stacks();
  assert.deepEqual(model.sentMessages, [{ kind: "stacks", launch: "L1" }]);
  clock.pass(5000);
  assert.match(panel.notice, /No stacks/);
  panel.kernel.stacks();
  model.deliver(deltaOf(2, { now: 3, stacks: { time: 3, ranks: [[0, "here"]] } }));
  clock.pass(5000);
  assert.equal(panel.notice, "");
});

test("a profile takes its time once the kernel has acknowledged it", () => {
  const { clock, model, panel } = running();
  panel.kernel.profile();
  assert.deepEqual(model.sentMessages, [{ kind: "profile", launch: "L1" }]);
  assert.ok(panel.kernel.isProfiling);
  clock.pass(5000);
  assert.match(panel.notice, /No profile: the kernel does not answer/);
  assert.ok(!panel.kernel.isProfiling);
  panel.kernel.profile();
  model.deliver({ kind: "acknowledged", action: "profile", launch: "L1" });
  clock.pass(5000);
  assert.equal(panel.notice, "Recording what the ranks do, then reading it …");
  model.deliver(deltaOf(2, { now: 3, profile: { time: 3, html: "", has_trace: true } }));
  assert.deepEqual([panel.notice, panel.kernel.isProfiling], ["", false]);
});

test("a trace that was removed is reported", () => {
  const { model, panel } = running();
  panel.kernel.trace();
  assert.deepEqual(model.sentMessages, [{ kind: "trace", launch: "L1" }]);
  model.deliver({ kind: "trace", name: "profile1.json.gz" });
  assert.match(panel.notice, /^The trace is gone/);
  panel.notice = "";
  model.deliver({ kind: "trace", name: "profile1.json.gz" }); // for another page
  assert.equal(panel.notice, "");
});

test("a look that the kernel does not answer is reported", () => {
  const { clock, model, panel } = running();
  panel.kernel.look(1);
  clock.pass(5000);
  assert.match(panel.notice, /while a cell runs/);
  panel.kernel.look(1);
  model.deliver(deltaOf(2, { ranks: [[1, "waiting"]] }));
  clock.pass(60_000);
  assert.equal(panel.notice, "");
  assert.deepEqual(clicks(model), ["look", "look"]);
});

test("a stop interrupts a cell that waits for a line, once", () => {
  const { clock, kernel, model, panel } = running({ info: { blocking: true } });
  model.deliver(deltaOf(2, { ranks: [[1, "waiting"]] }));
  panel.kernel.stop();
  clock.pass(2000);
  assert.deepEqual([clicks(model), kernel.calls], [["stop"], ["interrupt"]]);
});

const asked = (model) => model.kinds().filter((kind) => kind === "resync").length;

test("after three missing heartbeats it asks, and says since when it hears nothing", () => {
  const { clock, model, panel } = running();
  clock.pass(6499);
  assert.equal(asked(model), 0);
  clock.pass(1);
  assert.deepEqual([asked(model), panel.kernel.silence], [1, 0]); // the answer may be on its way
  clock.pass(2000);
  assert.deepEqual([asked(model), panel.kernel.silence], [2, 9]);
  clock.pass(3_600_000);
  assert.equal(panel.kernel.silence, 3609);
  assert.ok(asked(model) < 130, String(asked(model)));
  model.deliver(deltaOf(2));
  assert.equal(panel.kernel.silence, 0);
});

test("a page that slept shows no silence if the kernel answers", () => {
  const { clock, model, panel } = running();
  clock.time += 3_600_000; // no timer runs meanwhile
  clock.pass(0);
  assert.equal(panel.kernel.silence, 0);
  model.deliver(snapshotOf(900, { to: model, state: { name: "finished", seconds: 60 } }));
  model.deliver(deltaOf(901, { last: true }));
  clock.pass(60_000);
  assert.deepEqual([asked(model), panel.kernel.silence, panel.elapsed], [1, 0, 60]);
});

test("heartbeats keep it quiet, and after the last message no more are due", () => {
  const { clock, model } = running();
  for (let seq = 2; seq < 30; seq++) {
    clock.pass(6000);
    model.deliver(deltaOf(seq));
  }
  state(model, "finished", 30);
  model.deliver(deltaOf(31, { last: true }));
  clock.pass(600_000);
  assert.deepEqual(model.sentMessages, []);
});

test("a launch that ended without its last message is asked for", () => {
  const { clock, model } = running();
  state(model, "finished");
  clock.pass(6500);
  assert.equal(asked(model), 1);
});

test("when the connection is back it asks at once, unless it has everything", () => {
  const { clock, model, kernel } = running();
  kernel.connection("disconnected");
  kernel.connection("connecting");
  assert.equal(asked(model), 0);
  kernel.connection("connected");
  clock.pass(20_000);
  const before = asked(model);
  kernel.connection("connected"); // what it has asked meanwhile may be lost
  assert.equal(asked(model), before + 1);
  model.deliver(snapshotOf(7, { to: model, state: { name: "finished", seconds: 1 } }));
  model.deliver(deltaOf(8, { last: true }));
  kernel.connection("connected");
  clock.pass(60_000);
  assert.equal(asked(model), before + 1);
});
