// The record in the notebook's outputs: what the page writes there, and when it asks for it.
import assert from "node:assert/strict";
import test from "node:test";
import { PanelState } from "../../../nblaunch/notebook/static/state.js";
import { RecordKeeper } from "../../../nblaunch/notebook/static/record.js";
import { deltaOf, snapshotOf, FakeClock, FakeKernel, FakeModel } from "./helpers.mjs";

const WIDGET = "application/vnd.jupyter.widget-view+json";
const HEAD = '<div><b style="color:#2f6fe4">… Running</b> <span>for 3.0 s</span></div>';
const RUNNING = `<div class="nblaunch-L1 nblaunch-running x">${HEAD}</div>`;
const FINISHED = '<div class="nblaunch-L1 x">finished</div>';
globalThis.document = { body: {}, getElementsByClassName: () => [] };
globalThis.MutationObserver = class {
  observe() {}
  disconnect() {}
};

/** The outputs of a cell, as JupyterLab has them. */
class FakeOutputs {
  constructor(...list) {
    this.list = list;
  }
  get length() {
    return this.list.length;
  }
  get(at) {
    return { toJSON: () => structuredClone(this.list[at]) };
  }
  set(at, json) {
    this.list[at] = json;
  }
  add(json) {
    this.list.push(json);
  }
  get htmls() {
    return this.list.map(({ data }) => data?.["text/html"]);
  }
}
const shown = (html, rest = {}) => ({
  output_type: "display_data",
  data: { "text/html": html, "text/plain": "x", ...rest },
});

/** A panel that runs, with a keeper, in a notebook with these outputs of the cells c0, c1...; null: it gives no access. */
function kept(outputs, { sent = 0, cell = "c0", run = "" } = {}) {
  const clock = new FakeClock();
  const kernel = new FakeKernel();
  const cells = outputs?.map((each, at) => ({ id: `c${at}`, outputs: each }));
  const context = outputs && { model: { cells: [{ id: "text" }, ...cells] } };
  const model = new FakeModel({ info: { cell, run }, sent, manager: { kernel, context } });
  const panel = new PanelState(model, clock);
  panel.open();
  const keeper = new RecordKeeper(panel, () => () => {});
  panel.views.add(() => keeper.update());
  model.deliver(
    sent ? snapshotOf(1, { to: model, state: { name: "running" } }) : deltaOf(1, { state: { name: "running" } }),
  );
  const asked = () => model.kinds().filter((kind) => kind === "record").length;
  const ends = () => model.deliver(deltaOf(2, { state: { name: "finished", seconds: 4 } }));
  return { clock, kernel, model, panel, keeper, asked, ends };
}
const record = (html) => ({ kind: "record", html, text: "as text" });

test("the record takes the widget's place while the launch runs, and is kept current", async () => {
  const outputs = new FakeOutputs({ output_type: "stream", text: "hi" }, shown(RUNNING, { [WIDGET]: {} }));
  const { clock, model, keeper, asked } = kept([outputs]);
  assert.equal(keeper.takePlace(), true);
  await new Promise((done) => setTimeout(done));
  assert.deepEqual(outputs.list[1], shown(RUNNING));
  clock.pass(5000);
  assert.equal(asked(), 1);
  model.deliver(record(RUNNING.replace("3.0", "8.0")));
  assert.equal(outputs.htmls[1], RUNNING.replace("3.0", "8.0"));
  assert.equal(outputs.list[1].data["text/plain"], "as text");
  clock.pass(600_000);
  assert.ok(asked() > 10 && asked() < 15, String(asked()));
});

test("at the end it asks for records that the kernel's own update did not reach", () => {
  for (const [htmls, times] of [
    [[RUNNING, FINISHED], 1],
    [[FINISHED, FINISHED], 0],
    [[], 0],
  ]) {
    const cells = htmls.map((html) => new FakeOutputs(shown(html)));
    const { clock, model, asked, ends } = kept(cells);
    ends();
    clock.pass(600_000);
    assert.equal(asked(), times);
    model.deliver(record(FINISHED));
    model.deliver(record(RUNNING)); // late: what has ended stays
    assert.deepEqual(
      cells.map(({ htmls: [html] }) => html),
      htmls.map(() => FINISHED),
    );
  }
});

test("a launch whose kernel has exited says so", () => {
  for (const [status, words, run] of [
    ["autorestarting", /■ Kernel restarted<.b> <span>after 3.0 s/, ""],
    ["dead", /■ Kernel exited<.b> <span>after/, ""],
    ["restarting", /■ Kernel restarted; the run goes on<.b> <span>after/, "nightly"],
  ]) {
    const outputs = new FakeOutputs(shown(RUNNING));
    kept([outputs], { run }).kernel.status(status);
    assert.match(outputs.htmls[0], words);
    assert.doesNotMatch(outputs.htmls[0], /nblaunch-running|…/);
  }
});

test("a reloaded page shows a launch again that its notebook lacks, in its cell", () => {
  const cells = [new FakeOutputs(), new FakeOutputs()];
  const { model, asked, ends } = kept(cells, { sent: 5, cell: "c1" });
  assert.equal(asked(), 1);
  model.deliver(record(RUNNING));
  assert.deepEqual([cells[0].htmls, cells[1].htmls], [[], [RUNNING]]);
  ends();
  model.deliver(record(FINISHED));
  assert.deepEqual(cells[1].htmls, [FINISHED]);
  cells[1].list = []; // the user has cleared it
  model.deliver(record(FINISHED));
  assert.deepEqual(cells[1].htmls, []);
});

test("a page that cannot write says how to save the record, if it was reloaded", () => {
  for (const [sent, words] of [
    [5, /show its result in a new cell/],
    [0, /^$/],
  ]) {
    const { panel, keeper, asked, ends } = kept(null, { sent });
    assert.equal(keeper.takePlace(), false);
    ends();
    assert.equal(asked(), 0);
    assert.match(panel.notice, words);
  }
});
