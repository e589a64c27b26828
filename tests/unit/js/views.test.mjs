// The views of a panel, in a fake page: what they draw, and what a new view keeps.
import assert from "node:assert/strict";
import test from "node:test";
import { MetricChart } from "../../../nblaunch/notebook/static/chart.js";
import panel from "../../../nblaunch/notebook/static/panel.js";
import { bytes, deltaOf, FakeKernel, FakeModel } from "./helpers.mjs";
import { fakePage } from "./dom.mjs";

const page = fakePage();
const SHOWN = 180; // pixels of the log: ten lines
let launches = 0;

/** A model whose launch runs, and views of it. */
function opened(t, info = {}, manager = {}) {
  const model = new FakeModel({ info: { launch: `views ${++launches}`, ...info }, manager });
  const end = panel.initialize({ model });
  const closers = new Set();
  t.after(() => {
    for (const close of closers) close();
    end();
  });
  let seq = 0;
  const delta = (rest, data) => {
    model.deliver(deltaOf(++seq, rest), data);
    return page.draw();
  };
  const view = () => {
    const host = page.host();
    const close = panel.render({ model, el: host });
    closers.add(close);
    const log = host.one("nbl-log");
    log.clientHeight = SHOWN;
    page.resized();
    page.draw();
    return { host, log, close: () => (closers.delete(close), close()) };
  };
  delta({ state: { name: "running" } });
  return { model, delta, view };
}
const numbered = (from, to) => Array.from({ length: to - from }, (_, i) => `line ${from + i}\n`).join("");
const chunk = (text, first = 0, time = 1) => {
  const lines = text.trimEnd().split("\n").map((line) => [time, line]); // prettier-ignore
  return [{ logs: [{ attempt: 1, rank: 0, stream: "out", first, lines, open: [] }] }];
};
const rows = (host) => host.all("nbl-line").map((row) => row.textContent);
const button = (host, text) => host.all("nbl-button").find((node) => node.textContent === text);
const tab = (host, text) => host.all("nbl-tab").find((node) => node.textContent === text);
const chosen = (host) => host.all("nbl-tab").find((node) => node.getAttribute("aria-selected") === "true").textContent;
const FAILURE = {
  rank: 1,
  headline: "Rank 1 failed: ValueError: no",
  details: "",
  where: "",
  source: "",
  traceback: "trace",
  others: ["rank 0: the same"],
};

/** Scroll as a reader does. */
function scroll(log, top) {
  log.scrollTop = top;
  log.fire("scroll");
}

test("a part that fails to draw is reported once, and the others are drawn", (t) => {
  const { model, delta, view } = opened(t);
  const { host } = view();
  delta({
    stacks: { time: 1, ranks: [[0, "here"]] },
    resources: [[0, [["CPU", { toString: null, valueOf: null }, "share"]]]],
  });
  delta(...chunk("a\nb\n"));
  assert.deepEqual(rows(host), ["[rank 0] a", "[rank 0] b"]);
  assert.ok(!host.one("nbl-stacks").hidden);
  assert.match(host.one("nbl-notice").textContent, /^A part of the panel could not be drawn: TypeError/);
  model.deliver({ kind: "acknowledged", action: "stop", launch: model.state.info.launch });
  delta(...chunk("c\n", 2));
  assert.equal(host.one("nbl-notice").textContent, "");
  assert.equal(rows(host).length, 3);
});

test("ranks are profiled while they run", (t) => {
  const { delta, view } = opened(t);
  const { host } = view();
  const isHidden = () => button(host, "Profile").hidden;
  for (const [name, hidden] of [
    ["starting", true],
    ["running", false],
    ["stopping", true],
  ]) {
    delta({ state: { name } });
    assert.equal(isHidden(), hidden);
  }
});

test("a profile stays closed until another one comes", (t) => {
  const { delta, view } = opened(t);
  const { host } = view();
  const profile = host.one("nbl-profile");
  assert.ok(profile.hidden);
  delta({ profile: { time: 1, html: "<b>even</b>", has_trace: false } });
  assert.ok(!profile.hidden);
  assert.equal(host.one("nbl-profile-body").innerHTML, "<b>even</b>");
  assert.ok(button(host, "Save trace").hidden);
  host.all("nbl-button").filter((node) => node.textContent === "Close").at(-1).fire("click"); // prettier-ignore
  delta({ notes: [[9, "more"]] });
  assert.ok(profile.hidden);
  delta({ profile: { time: 2, html: "", has_trace: true } });
  assert.deepEqual([profile.hidden, button(host, "Save trace").hidden], [false, false]);
});

test("ranks that start say what they do", (t) => {
  const { delta, view } = opened(t, { hosts: [] });
  const { host } = view();
  const notice = () => host.one("nbl-notice").textContent;
  delta({ state: { name: "starting", message: "" } });
  assert.match(notice(), /^Starting the ranks: they import torch/);
  delta({ state: { name: "running", message: "" } });
  assert.equal(notice(), "");
});

test("a second view of a launch that has ended shows what the first one showed", (t) => {
  const { delta, view } = opened(t);
  const first = view();
  delta(...chunk(numbered(0, 100)));
  delta({ failure: FAILURE, stacks: { time: 1, ranks: [[0, "here"]] } });
  tab(first.host, "rank 0").fire("click");
  scroll(first.log, 720);
  const read = rows(first.host);
  first.log.style.height = "400px";
  page.resized();
  button(first.host, "Close").fire("click");
  const traceback = first.host.one("nbl-details");
  traceback.removeAttribute("open");
  traceback.fire("toggle");
  delta({ state: { name: "failed", seconds: 5 } });
  first.close();
  const second = view();
  delta({ notes: [[9, "the end"]] });
  assert.equal(chosen(second.host), "rank 0");
  assert.equal(second.log.scrollTop, 720);
  assert.deepEqual(rows(second.host), read);
  assert.equal(button(second.host, "Follow")?.textContent, "Follow");
  assert.equal(second.log.style.height, "400px");
  assert.ok(second.host.one("nbl-stacks").hidden);
  assert.equal(second.host.one("nbl-details").open, false);
  delta({ stacks: { time: 2, ranks: [[0, "there"]] } });
  assert.ok(!second.host.one("nbl-stacks").hidden);
});

test("a view that leaves the page while a scroll is on its way leaves the next one at the end", (t) => {
  const { delta, view } = opened(t);
  const first = view();
  delta(...chunk(numbered(0, 100)));
  first.log.clientHeight = 0;
  scroll(first.log, 0); // what a browser says of an element that is not on the page
  const second = view();
  first.close();
  assert.equal(button(second.host, "Pause")?.textContent, "Pause");
  assert.equal(rows(second.host).at(-1), "[rank 0] line 99");
});

test("a second view has the search and its hit, whichever view goes first", (t) => {
  const { delta, view } = opened(t);
  const first = view();
  delta(...chunk(numbered(0, 100)));
  const input = first.host.one("nbl-find");
  input.value = "Line 4";
  input.fire("keydown", { key: "Enter" });
  input.fire("keydown", { key: "Enter", shiftKey: true });
  assert.equal(first.host.one("nbl-found").textContent, "10/11");
  const second = view();
  first.close();
  assert.equal(second.host.one("nbl-find").value, "Line 4");
  assert.equal(second.host.one("nbl-found").textContent, "10/11");
  assert.deepEqual(
    second.host.all("nbl-hit").map((row) => row.textContent),
    ["[rank 0] line 48"],
  );
  assert.equal(second.log.scrollTop, first.log.scrollTop);
});

test("a log counts its lines, and keeps the last ones", (t) => {
  const { delta, view } = opened(t);
  const { host } = view();
  delta(...chunk(numbered(0, 11_000)));
  assert.equal(host.one("nbl-lines").textContent, "11,000 lines, not all shown");
});

test("a second click is remembered, the second of a double click is not", (t) => {
  const { model, view } = opened(t);
  const { host } = view();
  const stop = host.one("nbl-stop");
  const { launch } = model.state.info;
  model.sentMessages.length = 0;
  stop.fire("click");
  stop.fire("click", { detail: 2 });
  model.deliver({ kind: "acknowledged", action: "stop", launch });
  assert.deepEqual(model.kinds(), ["stop"]);
  stop.fire("click");
  model.deliver({ kind: "acknowledged", action: "kill", launch });
  assert.deepEqual(model.kinds(), ["stop", "kill"]);
});

test("a second click on a session's cell says what it costs", (t) => {
  const { delta, view } = opened(t, { is_session: true });
  const { host } = view();
  const stop = host.one("nbl-stop");
  assert.equal(stop.textContent, "Stop");
  assert.match(stop.getAttribute("title"), /keep their variables/);
  delta({ state: { name: "stopping" } });
  assert.equal(stop.textContent, "Kill ranks, lose variables");
});

test("metrics with one value, and constants, stand below those with a chart", (t) => {
  const { delta, view } = opened(t);
  delta({
    charts: ["loss", "accuracy", "lr"].map((name) => [[[name, "training", false]], "", ""]),
    metrics: [0, 1, 2].flatMap((x) => [
      [x ? "loss" : "accuracy", 0, x, x, Math.max(0, x - 1)],
      ["lr", 0, x, 3e-4, x],
    ]),
  });
  const { host } = view();
  const names = (part) =>
    host
      .one(part)
      .all("nbl-metric-name")
      .map((node) => node.textContent);
  assert.deepEqual([names("nbl-charts"), names("nbl-single")], [["loss"], ["accuracy", "lr"]]);
});

test("validation stands beside training, and the arrow keys read both", (t) => {
  const { delta, view } = opened(t);
  const lines = [
    ["loss", "training", false],
    ["valid_loss", "valid", false],
  ];
  delta({
    charts: [[lines, "down", ""]],
    metrics: [
      ...[1, 2, 3].map((x) => ["loss", 0, x, 1 / x, x - 1]),
      ...[2, 3].map((x) => ["valid_loss", 0, x, x / 4, x - 2]),
    ],
    best: [["valid_loss", 2, 0.5]],
  });
  const { host } = view();
  const [chart] = host.all("nbl-chart");
  const label =
    "Chart of loss 0.3333, best 0.3333; valid_loss 0.75, best 0.5 at step 2. Use the arrow keys to read its steps";
  assert.equal(chart.getAttribute("aria-label"), label);
  const detail = host.one("nbl-point");
  const press = (key) => {
    for (const act of chart.listeners.keydown) act({ key, preventDefault() {}, stopPropagation() {} });
    return detail.textContent;
  };
  assert.equal(press("ArrowLeft"), "step 2: 0.5, valid_loss 0.5");
  assert.equal(press("Home"), "step 1: 1");
  assert.equal(press("ArrowLeft"), "step 1: 1");
  assert.equal(press("Escape"), "step 3");
});

test("the legend of ranks stands in the card of their chart", (t) => {
  const { delta, view } = opened(t);
  const points = (name, ranks) => ranks.flatMap((rank) => [1, 2].map((x) => [name, rank, x, x + rank, x - 1]));
  delta({
    charts: ["a", "b", "c"].map((name) => [[[name, "training", false]], "", ""]),
    metrics: [...points("a", [0, 3]), ...points("b", [0]), ...points("c", [0, 1, 2, 3, 4, 5, 6, 7, 8])],
  });
  const { host } = view();
  assert.deepEqual(
    host.all("nbl-legend").map((node) => node.textContent),
    ["meanrank 0rank 3", "", "mean9 ranks"],
  );
});

test("the time left goes by the steps of this run", (t) => {
  const { delta, view } = opened(t, { hosts: [] });
  delta({ ranks: [[0, "running"]], progress: [[0, "fit", 60, 100, 10, 40, 0]] });
  const { host } = view();
  assert.equal(host.one("nbl-count").textContent, "60/100 · 0:20 left");
});

test("finished bars become one line, and an inner bar that a rank has left goes", (t) => {
  const { delta, view } = opened(t, { hosts: [], world_size: 1 });
  const { host } = view();
  const bar = (name, done, total = 45, level = 0) => [0, name, done, total, 10, 0, level];
  const shown = () =>
    host.all("nbl-progress").map((box) => [box.textContent, box.one("nbl-track").hidden ? "" : "a bar"].join(" "));
  delta({ ranks: [[0, "running"]], progress: [bar("epoch 1", 45), bar("epoch 2", 45), bar("eval", 9, 18)] });
  assert.deepEqual(shown(), ["epoch 1, 245/45 ", "eval9/18 · 0:10 left a bar"]);
  delta({ progress: [bar("epoch 1", 45), bar("epoch 2", 45), bar("epoch 3", 45)] });
  assert.deepEqual(shown(), ["epoch 1, 245/45 ", "epoch 345/45 a bar"]); // the next one takes its place
  delta({ ranks: [[0, "failed"]] });
  assert.deepEqual(shown(), ["epoch 1, 2, 345/45 "]);
  delta({ ranks: [[0, "running"]] });
  const inner = [bar("fit", 60, 60), bar("epoch 2", 15, 45, 1)];
  delta({ progress: inner });
  assert.equal(shown().length, 2);
  delta({ ranks: [[0, "returned"]], progress: inner });
  assert.deepEqual(shown(), ["fit60/60 "]);
  delta({ progress: [bar("epochs", 3, 3), bar("batch", 3, 3, 1)] });
  assert.deepEqual(shown(), ["epochs3/3 ", "batch3/3 "]);
  const parts = ["train epoch 1", "valid epoch 1", "train epoch 2"].map((name) => bar(name, 45));
  delta({ progress: parts });
  assert.deepEqual(shown(), ["train epoch 1, 245/45 ", "valid epoch 145/45 "]);
  delta({ ranks: Array.from({ length: 9 }, (_, rank) => [rank, "returned"]) });
  assert.deepEqual(shown(), ["train epoch 1, 245/45 a bar", "valid epoch 145/45 a bar"]); // many ranks have no text
});

test("no grid line strikes through the words of a logarithmic scale", () => {
  globalThis.getComputedStyle = () => ({ color: "black", fontFamily: "sans-serif" });
  const [texts, heights] = [new Map(), []];
  const known = {
    measureText: () => ({ width: 20 }),
    fillText: (text, x, y) => texts.set(text, y),
    lineTo: (x, y) => heights.push(y),
  };
  const context = new Proxy(known, { get: (_, name) => known[name] ?? (() => {}), set: () => true });
  const host = page.host();
  host.clientWidth = 400;
  const chart = new MetricChart(host, () => {});
  chart.canvas.getContext = () => context;
  const [xs, values] = [[1, 2, 3], [1, 0.1, 0.01]]; // prettier-ignore
  chart.update({ xs, ranks: [0], columns: [values], mean: values, beside: [], marks: [] }, "", true);
  assert.ok(Math.min(...heights) > texts.get("log scale") + 3, JSON.stringify([heights, [...texts]]));
  chart.destroy();
});

test("a sign of life draws nothing", (t) => {
  const { delta, view } = opened(t);
  view();
  assert.equal(delta({}), 0);
  assert.ok(delta({ ranks: [[0, "running"]] }) > 0);
});

test("lines that come again leave what is read where it is", (t) => {
  const { delta, view } = opened(t);
  const { host, log } = view();
  delta(...chunk(numbered(0, 100)));
  scroll(log, 70 * 18);
  const first = () =>
    rows(host)[Math.round(log.scrollTop / 18) - Number(host.one("nbl-window").style.transform.match(/\d+/)[0]) / 18];
  const read = first();
  delta(...chunk(numbered(20, 120), 20));
  assert.equal(first(), read);
  assert.equal(log.scrollTop, 70 * 18);
});

test("the pill says when a rank waits for the user, and what timed out", (t) => {
  const { delta, view } = opened(t, { hosts: [] });
  const { host } = view();
  const pill = () => [host.one("nbl-pill").textContent, host.one("nbl-pill").getAttribute("data-state")];
  delta({ state: { name: "running" }, ranks: [[1, "waiting"]] });
  assert.deepEqual(pill(), ["Waiting for you: rank 1", "waiting"]);
  assert.equal(host.all("nbl-rank-state").at(-1).textContent, "waiting for you");
  const names = () => host.all("nbl-rank").map((card) => card.getAttribute("aria-label"));
  assert.deepEqual(names(), ["rank 0, starting", "rank 1, waiting for you"]);
  delta({ ranks: [[1, "running"]] });
  assert.deepEqual(pill(), ["Running", "running"]);
  assert.equal(names()[1], "rank 1, running");
  const buttons = () => [host.one("nbl-restart"), host.one("nbl-follow")].map((node) => node.hidden);
  assert.deepEqual(buttons(), [false, false]);
  delta({ state: { name: "stopped", seconds: 4, message: "LaunchTimeoutError: train took longer than 4 s" } });
  assert.deepEqual(pill(), ["Timed out", "timeout"]);
  assert.deepEqual(buttons(), [true, true]);
});

test("the pill says when the page has lost the kernel, or the kernel says nothing", (t) => {
  t.mock.timers.enable({ apis: ["Date", "setInterval", "setTimeout"] });
  const kernel = new FakeKernel();
  const { delta, view } = opened(t, { hosts: [] }, { kernel });
  const { host } = view();
  const pill = (status) => {
    kernel.connection(status);
    page.draw();
    return host.one("nbl-pill").textContent;
  };
  assert.deepEqual(["connecting", "connected"].map(pill), ["Not connected", "Running"]);
  t.mock.timers.tick(60_000);
  assert.deepEqual(["connected", "connecting"].map(pill), ["No response", "Not connected"]);
  delta({ state: { name: "finished", seconds: 4 } });
  assert.equal(pill("disconnected"), "Finished");
});

test("the ranks of a detached run outlive the kernel", (t) => {
  for (const [run, pill, state] of [
    ["", "Kernel restarted", "ended"],
    ["nightly", "Kernel restarted; the run goes on", "starting"],
  ]) {
    const kernel = new FakeKernel();
    const { delta, view } = opened(t, { hosts: [], run }, { kernel });
    const { host } = view();
    delta({ state: { name: "running" } });
    kernel.status("restarting");
    page.draw();
    assert.equal(host.one("nbl-pill").textContent, pill);
    assert.equal(host.one("nbl-rank-state").textContent, state);
  }
});

test("the log's path stands once, with its label, and names the file of a rank", (t) => {
  const { delta, view } = opened(t);
  const { host } = view();
  const foot = () => host.one("nbl-logs").one("nbl-foot").textContent;
  delta({ state: { name: "running", log_dir: "/logs/a" } });
  assert.equal(foot(), "Logs: /logs/a Copy path");
  tab(host, "rank 1").fire("click");
  assert.equal(foot(), "Logs: /logs/a/rank1.out Copy path");
});

test("what nblaunch says stands above the log, and a snapshot replaces it", (t) => {
  const { model, delta, view } = opened(t);
  const { host } = view();
  assert.ok(host.one("nbl-notes").hidden);
  delta(...chunk("a\n"));
  delta({ notes: [[2, "restarting (1 of 3)"]] });
  assert.deepEqual(rows(host), ["[rank 0] a"]);
  const notes = () => host.all("nbl-note").map((note) => note.textContent);
  assert.deepEqual(notes(), ["restarting (1 of 3)"]);
  model.deliver({ kind: "snapshot", seq: 9, now: 3, changes: { notes: [[3, "done"]] }, requests: [] });
  page.draw();
  assert.deepEqual(notes(), ["done"]);
});

test("lines that wrap take their height, and the end stays in sight", (t) => {
  const { delta, view } = opened(t);
  const { host, log } = view();
  const height = (row) =>
    host.one("nbl-log").classList.contains("nbl-wrap") && /long/.test(row.textContent) ? 54 : 18;
  const proto = Object.getPrototypeOf(log);
  Object.defineProperty(proto, "offsetHeight", {
    configurable: true,
    get() {
      return height(this);
    },
    set() {},
  });
  t.after(() => delete proto.offsetHeight);
  delta(...chunk(Array.from({ length: 100 }, (_, i) => `${i % 2 ? "long" : "short"} ${i}\n`).join("")));
  const bottom = () => parseFloat(host.one("nbl-spacer").style.height);
  assert.equal(log.scrollTop, bottom() - SHOWN);
  assert.equal(rows(host).at(-1), "[rank 0] long 99");
  assert.ok(bottom() > 100 * 18);
  button(host, "Wrap").fire("click");
  assert.equal(bottom(), 100 * 18);
  assert.equal(log.scrollTop, bottom() - SHOWN);
});

test("the tab of a rank that failed comes into sight, once", (t) => {
  const { delta, view } = opened(t, { world_size: 64 });
  const { host } = view();
  const strip = host.one("nbl-tabs");
  Object.assign(strip, { clientWidth: 300, offsetLeft: 100 });
  host.all("nbl-tab").forEach((node, i) => Object.assign(node, { offsetLeft: 100 + 30 * i, offsetWidth: 30 }));
  delta({ ranks: [[0, "running"]] });
  assert.equal(strip.scrollLeft, 0);
  delta({ failure: { ...FAILURE, rank: 37 } });
  assert.equal(strip.scrollLeft, 30 * 38 - 40);
  strip.scrollLeft = 0;
  delta({ failure: { ...FAILURE, rank: 37 } });
  assert.equal(strip.scrollLeft, 0);
});

const encoded = (content) => JSON.stringify({ text: "", width: null, height: null, ...content });
const outputs = (rank, numbers, contents, left = 0) => {
  const texts = contents.map(([, content]) => encoded(content));
  const parts = contents.map(([number], i) => [number, 0, bytes(texts[i]).length, bytes(texts[i]).length]);
  return [{ outputs: [[rank, numbers, left]], parts }, texts.join("")];
};
const text = (body) => ({ kind: "text", body });
const shownBy = (host) => host.all("nbl-output").map((node) => node.textContent);

test("outputs of rank 0 are open, those of others are one click away, and a new view keeps the choice", (t) => {
  const { delta, view } = opened(t);
  const first = view();
  delta(...outputs(1, [1], [[1, text("one")]]));
  delta(...outputs(0, [2, 3], [[2, text("zero")], [3, text("more")]], 4)); // prettier-ignore
  const boxes = (host) => host.one("nbl-outputs").children;
  assert.deepEqual(shownBy(first.host), ["zero", "more", "one"]);
  assert.match(boxes(first.host)[0].textContent, /rank 0.*6 outputs.*4 outputs left out/);
  const one = boxes(first.host)[1];
  one.setAttribute("open", "");
  one.fire("toggle");
  first.close();
  assert.deepEqual(
    boxes(view().host).map((box) => box.open),
    [true, true],
  );
});

test("an image has its source and size, and HTML comes as the kernel made it", (t) => {
  const { delta, view } = opened(t);
  const { host } = view();
  const contents = [
    [1, { kind: "image", body: "data:image/png;base64,AA==", text: "a plot", width: 40 }],
    [2, { kind: "html", body: "<b>x</b>" }],
  ];
  delta(...outputs(0, [1, 2], contents));
  const [image, html] = host.all("nbl-output").map((node) => node.children[0]);
  assert.deepEqual(
    ["src", "alt", "width", "height"].map((name) => image.getAttribute(name)),
    ["data:image/png;base64,AA==", "a plot", "40", null],
  );
  assert.equal(html.innerHTML, "<b>x</b>");
});

test("why ranks wait is shown with what to do, until they go on or are stopped", (t) => {
  const { delta, model, view } = opened(t, { is_session: true });
  const { host } = view();
  const banner = host.one("nbl-stuck");
  assert.ok(banner.hidden);
  const stuck = { lines: ["rank 0 waits", "rank 1 runs"], ranks: [1] };
  delta({ stuck, notes: stuck.lines.map((line) => [2, line]) });
  assert.deepEqual(
    banner.all("nbl-stuck-line").map((node) => node.textContent),
    stuck.lines,
  );
  assert.ok(host.one("nbl-notes").hidden);
  model.sentMessages.length = 0;
  button(host, "Debug rank 1").fire("click");
  button(host, "Free the ranks, keep variables").fire("click");
  assert.deepEqual(model.kinds(), ["look", "stop"]);
  assert.match(button(host, "Free the ranks, keep variables").getAttribute("title"), /^Stop: .*keep their variables/);
  delta({ stuck: { lines: [], ranks: [] } });
  assert.ok(banner.hidden);
  delta({ stuck });
  assert.ok(!banner.hidden);
  delta({ state: { name: "stopping" } });
  assert.ok(banner.hidden);
  assert.equal(host.all("nbl-note").length, 2);
});

test("a notebook that is opened again has a panel of its own", (t) => {
  const info = { launch: "opened twice" };
  const [before, after] = [new FakeModel({ info }), new FakeModel({ info, sent: 1 })];
  const [endOfFirst, end] = [before, after].map((model) => panel.initialize({ model }));
  assert.deepEqual([before.kinds(), after.kinds()], [[], ["resync"]]);
  endOfFirst();
  after.deliver(deltaOf(1, { state: { name: "running" } }));
  const host = page.host();
  t.after(panel.render({ model: after, el: host }));
  t.after(end);
  page.draw();
  assert.equal(host.one("nbl-pill").textContent, "Running");
});
