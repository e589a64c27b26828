// Messages in, the state of the panel out; what is asked for when some are missing.
import assert from "node:assert/strict";
import test from "node:test";
import { PanelState } from "../../../nblaunch/notebook/static/state.js";
import { plainText } from "../../../nblaunch/notebook/static/line_order.js";
import { bytes, deltaOf, snapshotOf, FakeClock, FakeModel } from "./helpers.mjs";

function opened(options = {}) {
  const clock = new FakeClock();
  const model = new FakeModel(options);
  const panel = new PanelState(model, clock);
  panel.open();
  return { clock, model, panel };
}
const delta = (model, seq, rest = {}, data) => model.deliver(deltaOf(seq, rest), data);
const logged = (panel) =>
  panel.logs.view("all").lines.map((line) => (line.kind === "gap" ? `<${line.start}-${line.end}>` : plainText(line)));

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
  const log = (offset, text) => ({
    logs: [{ attempt: 1, rank: 0, stream: "out", offset, size: text.length, time: 1 }],
  });
  delta(model, 8, log(6, "late\n"), "late\n");
  model.deliver(snapshotOf(9, { now: 5 })); // for another page
  delta(model, 10, log(11, "later\n"), "later\n");
  assert.deepEqual(logged(panel), []);
  model.deliver(snapshotOf(11, { now: 5, to: model }));
  delta(model, 12, log(0, "begun\n"), "begun\n");
  delta(model, 13, log(6, "late\nlater\n"), "late\nlater\n");
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
  delta(
    model,
    1,
    {
      metrics: [["loss", 0, 1, 2, 0]],
      progress: [[0, "epoch", 1, 10, 1]],
      resources: [[0, [["", 1000, "bytes"]]]],
      notes: [[0, "note"]],
      stacks: { time: 1, ranks: [] },
      logs: [{ attempt: 1, rank: 0, stream: "out", offset: 0, size: 2, time: 1 }],
    },
    "a\n",
  );
  model.deliver(snapshotOf(2, { now: 2, metrics: [["accuracy", 0, 1, 0.5, 0]], notes: [[0, "note"]] }));
  assert.deepEqual([...panel.metrics.metrics.keys()], ["accuracy"]);
  assert.deepEqual([panel.progress.size, panel.resources.size, panel.stacks], [0, 0, null]);
  assert.deepEqual(logged(panel), ["a"]);
  assert.deepEqual(panel.notes, [[0, "note"]]);
});

test("after a snapshot logs may overlap or leave a gap", () => {
  const { model, panel } = opened();
  delta(model, 1, { logs: [{ attempt: 1, rank: 0, stream: "out", offset: 0, size: 4, time: 1 }] }, "a\nb\n");
  model.deliver(snapshotOf(3, { now: 2 }));
  delta(
    model,
    4,
    {
      logs: [
        { attempt: 1, rank: 0, stream: "out", offset: 2, size: 4, time: 1 },
        { attempt: 1, rank: 0, stream: "out", offset: 100, size: 2, time: 3 },
      ],
    },
    "b\nc\nz\n",
  );
  assert.deepEqual(logged(panel), ["a", "b", "c", "<6-100>", "z"]);
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

test("older lines are asked for one at a time, and come into their place", () => {
  const { clock, model, panel } = opened();
  delta(model, 1, { logs: [{ attempt: 1, rank: 1, stream: "err", offset: 6, size: 2, time: 1 }] }, "c\n");
  const gap = panel.logs.view(1).lines[0];
  panel.loadOlder(gap);
  panel.loadOlder(gap);
  assert.deepEqual(model.sentMessages, [
    { kind: "older", request: 1, attempt: 1, rank: 1, stream: "err", start: 0, end: 6 },
  ]);
  assert.equal(gap.state, "loading");
  model.deliver(
    { kind: "older", request: 1, attempt: 1, rank: 1, stream: "err", start: 2, end: 6, spans: [[4, 0.5]] },
    "xx\n\n",
  );
  assert.deepEqual(logged(panel), ["<0-2>", "xx", "", "c"]);
  panel.loadOlder(panel.logs.view(1).lines[0]);
  clock.pass(10_000);
  assert.match(panel.notice, /[Oo]lder lines did not arrive/);
  assert.equal(panel.logs.view(1).lines[0].state, "");
});

const part = (offset, text) => [
  { logs: [{ attempt: 1, rank: 0, stream: "out", offset, size: text.length, time: 1 }] },
  text,
];

test("it says where its logs end, and goes on from there", () => {
  const { model, panel } = opened();
  delta(model, 1, ...part(0, "a\nhalf"));
  delta(model, 3, ...part(20, "z\n"));
  assert.deepEqual(resyncs(model), [[[1, 0, "out", 6]]]);
  assert.deepEqual(logged(panel), ["a"]); // the line in between is on its way
  model.deliver(snapshotOf(4, { to: model, state: { name: "finished", seconds: 1 } }));
  delta(model, 5, ...part(6, " and half\nend\nz\n"));
  assert.deepEqual(logged(panel), ["a", "half and half", "end", "z"]);
});

test("lines wait for no answer of a kernel that gives none", () => {
  const { clock, model, panel } = opened();
  delta(model, 1, ...part(0, "a\n"));
  delta(model, 3, ...part(10, "y\n"));
  clock.pass(2000);
  delta(model, 4, ...part(12, "z\n"));
  assert.deepEqual(logged(panel), ["a", "<2-12>", "z"]);
  clock.pass(4000);
  model.deliver(snapshotOf(5, { to: model }));
  delta(model, 6, ...part(2, "bcdefgh\ny\nz\n"));
  delta(model, 7, ...part(14, "end\n"));
  assert.deepEqual(logged(panel), ["a", "<2-12>", "z", "end"]); // a gap can be loaded
});

/** A panel with the gap 6-26 between two lines, and what comes unasked for it. */
function withGap() {
  const made = opened();
  delta(
    made.model,
    1,
    {
      logs: [
        { attempt: 1, rank: 0, stream: "out", offset: 0, size: 6, time: 1 },
        { attempt: 1, rank: 0, stream: "out", offset: 26, size: 4, time: 3 },
      ],
    },
    "first\nend\n",
  );
  const come = (from, text, rest = {}) => {
    const spans = [[text.length, 2]];
    made.model.deliver(
      {
        kind: "older",
        request: null,
        attempt: 1,
        rank: 0,
        stream: "out",
        start: from,
        end: from + text.length,
        spans,
        ...rest,
      },
      text,
    );
  };
  return { ...made, come };
}

test("lines that come unasked fill the end of a gap, again and again", () => {
  const { panel, come } = withGap();
  come(20, "six 6\n");
  assert.deepEqual(logged(panel), ["first", "<6-20>", "six 6", "end"]);
  come(6, "two\nthree fou\n");
  assert.deepEqual(logged(panel), ["first", "two", "three fou", "six 6", "end"]);
});

test("lines that come unasked and fit no gap are dropped", () => {
  const { panel, come } = withGap();
  come(10, "ab\n");
  come(20, "six 6\n", { attempt: 2 });
  come(20, "six 6\n", { rank: 1 });
  come(20, "six 6\n", { stream: "err" });
  come(0, "x".repeat(25) + "\n");
  come(0, "first\n");
  come(26, "end\n");
  assert.deepEqual(logged(panel), ["first", "<6-26>", "end"]);
});

test("lines that come unasked disturb no request", () => {
  const { clock, model, panel, come } = withGap();
  const [, gap] = panel.logs.view(0).lines;
  panel.loadOlder(gap);
  come(20, "six 6\n");
  assert.equal(gap.state, "loading");
  const { request, start, end } = model.sentMessages.at(-1);
  assert.deepEqual([start, end], [6, 26]);
  model.deliver(
    { kind: "older", request, attempt: 1, rank: 0, stream: "out", start: 14, end, spans: [[12, 1.5]] },
    "seven\nsix 6\n",
  );
  assert.deepEqual(logged(panel), ["first", "<6-14>", "seven", "six 6", "end"]);
  assert.equal(gap.state, "");
  clock.pass(60_000);
  assert.equal(panel.notice, "");
  panel.loadOlder(gap);
  come(6, "one two\n");
  model.deliver(
    { kind: "older", request: request + 1, attempt: 1, rank: 0, stream: "out", start: 6, end: 14, spans: [[8, 1.5]] },
    "one two\n",
  );
  assert.deepEqual(logged(panel), ["first", "one two", "seven", "six 6", "end"]);
  assert.equal(panel.requests.size, 0);
});

test("an answer that arrived unrequested leaves the gap loadable", () => {
  const { model, panel, come } = withGap();
  const [, gap] = panel.logs.view(0).lines;
  panel.loadOlder(gap);
  come(20, "six 6\n");
  model.deliver(
    { kind: "older", request: 1, attempt: 1, rank: 0, stream: "out", start: 20, end: 26, spans: [[6, 2]] },
    "six 6\n",
  );
  assert.deepEqual(logged(panel), ["first", "<6-20>", "six 6", "end"]);
  assert.ok(panel.logs.mayLoad(gap));
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

test("an answer without a request is dropped", () => {
  const { model, panel } = opened();
  delta(model, 1, { logs: [{ attempt: 1, rank: 0, stream: "out", offset: 6, size: 2, time: 1 }] }, "c\n");
  model.deliver(
    { kind: "older", request: 9, attempt: 1, rank: 0, stream: "out", start: 0, end: 6, spans: [[6, 0.5]] },
    "a\nb\n12",
  );
  assert.deepEqual(logged(panel), ["<0-6>", "c"]);
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
  const chunk = (offset) =>
    deltaOf(offset / 2 + 1, { logs: [{ attempt: 1, rank: 0, stream: "out", offset, size: 2, time: 1 }] });
  panel.receive(chunk(0), [new DataView(bytes("xxa\nxx").buffer, 2, 2)]);
  panel.receive(chunk(2), [new Uint8Array(bytes("b\n")).buffer]);
  assert.deepEqual(logged(panel), ["a", "b"]);
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
