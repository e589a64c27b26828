// Messages in, the state of the panel out; what is asked for when some are missing.
import assert from "node:assert/strict";
import test from "node:test";
import { PanelState } from "../../../nblaunch/notebook/static/state.js";
import { bytes, deltaOf, snapshotOf, FakeClock, FakeModel } from "./helpers.mjs";

function opened(options = {}) {
  const clock = new FakeClock();
  const model = new FakeModel(options);
  const panel = new PanelState(model, clock);
  panel.open();
  return { clock, model, panel };
}
const delta = (model, seq, rest = {}, data) => model.deliver(deltaOf(seq, rest), data);
const logged = (panel) => panel.logs.view("all").lines.map((line) => line.text);
const log = (first, ...lines) => ({
  logs: [{ attempt: 1, rank: 0, stream: "out", first, lines: lines.map((text) => [1, text]), open: [] }],
});

/** What was asked for: where each log ends. */
const resyncs = (model) => model.sentMessages.filter(({ kind }) => kind === "resync").map(({ logs }) => logs);

test("it asks for nothing where nothing was missed", () => {
  const { clock, model } = opened();
  clock.pass(6000);
  delta(model, 1, { last: true });
  clock.pass(60_000);
  assert.deepEqual(model.sentMessages, []);
});

test("a page that was reloaded asks at once for what it has missed", () => {
  const { model } = opened({ sent: 7 });
  assert.deepEqual(resyncs(model), [[]]);
});

test("it asks again after 2 s, then less and less often, until the snapshot comes", () => {
  const { clock, model } = opened({ sent: 7 });
  const asked = () => model.kinds().filter((kind) => kind === "resync").length;
  clock.pass(1999);
  assert.equal(asked(), 1);
  clock.pass(1);
  assert.equal(asked(), 2);
  clock.pass(60_000);
  assert.ok(asked() > 3 && asked() < 8, String(asked()));
  model.deliver(snapshotOf(8, { now: 5, to: model }));
  delta(model, 9, { last: true });
  const before = asked();
  clock.pass(60_000);
  assert.equal(asked(), before);
});

test("lines that come before those that were asked for do not take their place", () => {
  const { model, panel } = opened({ sent: 7 });
  delta(model, 8, log(1, "late"));
  model.deliver(snapshotOf(9, { now: 5 })); // for another page
  delta(model, 10, log(2, "later"));
  model.deliver(snapshotOf(11, { now: 5, to: model }));
  delta(model, 12, log(0, "begun"));
  delta(model, 13, log(1, "late", "later"));
  assert.deepEqual(logged(panel), ["begun", "late", "later"]);
});

test("a hole in the numbers asks once, and what came is shown meanwhile", () => {
  const { model, panel } = opened();
  delta(model, 1, { state: { name: "running" } });
  delta(model, 3, { ranks: [[1, "running"]] });
  delta(model, 4, { ranks: [[0, "running"]] });
  assert.deepEqual(resyncs(model), [[]]);
  assert.deepEqual(
    [...panel.ranks],
    [
      [0, "running"],
      [1, "running"],
    ],
  );
  const ranks = [0, 1].map((rank) => [rank, "returned"]);
  model.deliver(snapshotOf(5, { to: model, state: { name: "finished", seconds: 4 }, ranks }));
  delta(model, 6);
  assert.equal(panel.seq, 6);
  assert.equal(panel.elapsed, 4);
  assert.equal(model.sentMessages.length, 1);
});

test("a message that comes twice counts once", () => {
  const { model, panel } = opened();
  delta(model, 1, { metrics: [["loss", 0, 1, 2, 0]] });
  delta(model, 1, { metrics: [["loss", 0, 1, 2, 0]] });
  assert.equal(panel.metrics.metrics.get("loss").ranks.get(0).count, 1);
});

test("a snapshot replaces everything but the logs", () => {
  const { model, panel } = opened();
  delta(model, 1, {
    metrics: [["loss", 0, 1, 2, 0]],
    progress: [[0, "epoch", 1, 10, 1]],
    resources: [[0, [["", 1000, "bytes"]]]],
    notes: [[0, "note"]],
    stacks: { time: 1, ranks: [] },
    ...log(0, "a"),
  });
  model.deliver(snapshotOf(2, { now: 2, metrics: [["accuracy", 0, 1, 0.5, 0]], notes: [[0, "note"]] }));
  assert.deepEqual([...panel.metrics.metrics.keys()], ["accuracy"]);
  assert.deepEqual([panel.progress.size, panel.resources.size, panel.stacks], [0, 0, null]);
  assert.deepEqual(logged(panel), ["a"]);
  assert.deepEqual(panel.notes, [[0, "note"]]);
});

test("the elapsed time goes on between messages, and ends with the launch", () => {
  const { clock, model, panel } = opened();
  assert.equal(panel.elapsed, 0);
  delta(model, 1, { now: 10, state: { name: "running" } });
  clock.pass(2500);
  assert.equal(panel.elapsed, 12.5);
  delta(model, 2, { state: { name: "failed", seconds: 13.25 } });
  clock.pass(9000);
  assert.equal(panel.elapsed, 13.25);
});

test("it says where its logs end, and goes on from there", () => {
  const { model, panel } = opened();
  delta(model, 1, log(0, "a"));
  delta(model, 3, log(20, "z"));
  assert.deepEqual(resyncs(model), [[[1, 0, "out", 1]]]);
  assert.deepEqual(logged(panel), ["a", "… 19 lines not shown …", "z"]); // they are on their way
  model.deliver(snapshotOf(4, { to: model, state: { name: "finished", seconds: 1 } }));
  delta(model, 5, log(1, "b", "z"));
  assert.deepEqual(logged(panel), ["a", "b", "z"]);
});

test("a bar whose total is no number that can be reached has none", () => {
  const { model, panel } = opened();
  const totals = [10, "10", 0, -1, null, "inf", NaN, Infinity, {}, true];
  const known = totals.map((total, i) => {
    delta(model, i + 1, { progress: [[0, "epoch", 1, total, 1]] });
    return panel.progress.get(0).get("epoch").total;
  });
  assert.deepEqual(known, [10, 10, ...Array(8).fill(null)]);
});

test("an empty message is a sign of life and changes nothing that is drawn", () => {
  const { clock, model, panel } = opened();
  delta(model, 1, { state: { name: "running" } });
  let redraws = 0;
  panel.views.add(() => redraws++);
  clock.pass(6000);
  delta(model, 2);
  assert.deepEqual([redraws, panel.seq, panel.receivedAt, panel.elapsed], [0, 2, clock.time, 2]);
  delta(model, 3, { metrics: 5 });
  assert.equal(redraws, 1);
});

test("a new attempt clears the failure and the bars of the one before", () => {
  const { model, panel } = opened();
  delta(model, 1, {
    state: { name: "running", attempt: 1 },
    progress: [[0, "epoch", 1, 10, 1]],
    failure: { rank: 1, headline: "E", details: "", others: [] },
  });
  delta(model, 2, { state: { name: "running", attempt: 2 } });
  assert.equal(panel.failure, null);
  assert.equal(panel.progress.size, 0);
});

test("the memory that a rank used most is kept", () => {
  const { model, panel } = opened();
  const use = (cpu, memory) => ({ resources: [[0, [["CPU", cpu, "share"], ["", memory, "bytes"]]]] }); // prettier-ignore
  delta(model, 1, use(1, 2000));
  delta(model, 2, use(0.1, 500));
  assert.deepEqual(panel.resources.get(0).peak, 2000);
});

test("a rank has the bars that the kernel says", (t) => {
  const { panel, model } = opened(t);
  const bar = (rank, name) => [rank, name, 1, null, 1, 0, 0];
  delta(model, 1, { progress: [bar(0, "fit"), bar(0, "epoch 1"), bar(1, "fit")] });
  delta(model, 2, { progress: [bar(0, "fit"), bar(0, "epoch 2")] });
  assert.deepEqual([...panel.progress.get(0).keys()], ["fit", "epoch 2"]);
  assert.deepEqual([...panel.progress.get(1).keys()], ["fit"]);
});

test("views get every change until they are removed", () => {
  const { model, panel } = opened();
  let redraws = 0;
  const view = () => redraws++;
  panel.views.add(view);
  delta(model, 1, { state: { name: "running" } });
  assert.ok(redraws > 0);
  panel.views.delete(view);
  const before = redraws;
  delta(model, 2, { state: { name: "stopping" } });
  assert.equal(redraws, before);
});

test("a malformed message is reported and breaks nothing", () => {
  const { model, panel } = opened();
  delta(model, 1, { metrics: 5 });
  assert.match(panel.notice, /could not read a message/);
  delta(model, 2, { ranks: [[0, "running"]] });
  assert.equal(panel.ranks.get(0), "running");
  model.deliver({ kind: "something new", seq: 3 });
});

test("buffers come as views or as whole buffers", () => {
  const { panel } = opened();
  const content = JSON.stringify({ kind: "text", body: "a" });
  const { length } = bytes(content);
  const come = (seq) => deltaOf(seq, { outputs: [[0, [seq], 0]], parts: [[seq, 0, length, length]] });
  panel.receive(come(1), [new DataView(bytes(`xx${content}xx`).buffer, 2, length)]);
  panel.receive(come(2), [new Uint8Array(bytes(content)).buffer]);
  assert.deepEqual(panel.outputs.ranks.get(0)?.shown.map(({ body }) => body), ["a"]); // prettier-ignore
});

test("a widget without any information is a panel nevertheless", () => {
  const model = new FakeModel();
  model.state = {};
  const panel = new PanelState(model, new FakeClock());
  panel.open();
  assert.equal(panel.state.name, "starting");
  assert.equal(panel.info.world_size, 0);
});

test("every field of info reaches the views", () => {
  const model = new FakeModel({ info: { added_later: 1 } });
  assert.deepEqual(new PanelState(model, new FakeClock()).info, model.state.info);
});

test("it says that a page shows the panel, and that one has shown the end", () => {
  const { model, panel } = opened();
  assert.equal(model.seen, 1);
  panel.receive(deltaOf(1, { state: { name: "stopping" } }));
  assert.equal(model.seen, 1);
  panel.receive(deltaOf(2, { state: { name: "finished" } }));
  assert.equal(model.seen, 2);
});

test("a page that was opened again says so only if its notebook has the record", () => {
  for (const isInNotebook of [false, true]) {
    const { model, panel } = opened({ sent: 7 });
    panel.keeper = { isInNotebook };
    assert.equal(model.seen, 0);
    panel.receive(snapshotOf(8, { to: model, state: { name: "finished" } }));
    assert.equal(model.seen, Number(isInNotebook));
  }
});
