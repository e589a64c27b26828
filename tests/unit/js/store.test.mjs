// The bounded lines of all ranks: order, lines that come again, lines that are taken back, find.
import assert from "node:assert/strict";
import test from "node:test";
import { stripAnsi } from "../../../nblaunch/notebook/static/ansi.js";
import { findLines, LogStore, placeOf } from "../../../nblaunch/notebook/static/store.js";
import { randomSource } from "./helpers.mjs";

const SMALL = { rank: 10, total: 30, open: 8 };

/** Parts of [rank, stream, first, time, lines, unfinished lines]. */
const add = (store, ...parts) =>
  store.add(
    parts.map(([rank, stream, first, time, lines, open = []]) => ({
      attempt: 1,
      rank,
      stream,
      first,
      lines: lines.map((text) => [time, text]),
      open,
    })),
  );
const shown = (store, tab = "all") => {
  const { lines, open } = store.view(tab);
  return [...lines, ...open].map((line) => `${line.source.rank}:${stripAnsi(line.text)}`);
};
const numbered = (from, to) => Array.from({ length: to - from }, (_, i) => `line ${from + i}`);

function consistent(store) {
  const inRanks = [...store.ranks.values()].flat();
  assert.equal(inRanks.length, store.merged.length);
  assert.deepEqual(new Set(inRanks), new Set(store.merged));
  for (const list of [store.merged, ...store.ranks.values()])
    list.forEach((line, i) => assert.equal(placeOf(list, line), i));
}

test("lines of all ranks stand in the order of time", () => {
  const store = new LogStore();
  add(store, [0, "out", 0, 1, ["a"]], [1, "out", 0, 3, ["d"]], [0, "out", 1, 4, ["e"]]);
  add(store, [1, "err", 0, 2, ["b", "c"]], [2, "out", 0, 5, ["f"]]);
  assert.deepEqual(shown(store), ["0:a", "1:b", "1:c", "1:d", "0:e", "2:f"]);
  assert.deepEqual(shown(store, 1), ["1:b", "1:c", "1:d"]);
  consistent(store);
});

test("a line that has not ended stands last, whatever comes", () => {
  const store = new LogStore();
  add(store, [0, "err", 0, 1, [], ["10%"]], [1, "out", 0, 2, ["a"]]);
  assert.deepEqual(shown(store), ["1:a", "0:10%"]);
  add(store, [0, "err", 0, 3, [], ["20%"]], [1, "out", 1, 4, ["b"]]);
  assert.deepEqual(shown(store), ["1:a", "1:b", "0:20%"]);
  add(store, [0, "err", 0, 1.5, ["30%"]]);
  assert.deepEqual(shown(store), ["0:30%", "1:a", "1:b"]);
});

test("lines that did not come are counted, until they come", () => {
  const store = new LogStore();
  add(store, [0, "out", 0, 1, ["a"]], [0, "out", 1234, 2, ["b"]], [1, "out", 5, 3, ["c"]]);
  assert.deepEqual(shown(store), ["0:a", "0:… 1,233 lines not shown …", "0:b", "1:… 5 lines not shown …", "1:c"]);
  assert.deepEqual([store.view("all").total, store.view(1).total], [1241, 6]);
  assert.deepEqual(store.ends, [
    [1, 0, "out", 1],
    [1, 1, "out", 0],
  ]);
  add(store, [1, "out", 0, 3, [...numbered(0, 5), "c"]]);
  assert.deepEqual(store.ends[1], [1, 1, "out", 6]);
  assert.deepEqual(
    shown(store, 1),
    [...numbered(0, 5), "c"].map((line) => `1:${line}`),
  );
  consistent(store);
});

test("lines that come again, or in another form, replace those that are there", () => {
  const random = randomSource(3);
  for (let round = 0; round < 50; round++) {
    const store = new LogStore();
    for (let end = 0; end < 100;) {
      const from = Math.max(0, end - random(20));
      const to = end + 1 + random(30);
      add(store, [0, "out", from, 1, numbered(from, to)], [1, "out", end, 1, numbered(end, to)]);
      end = to;
    }
    assert.deepEqual(shown(store, 0), numbered(0, store.sources.get("1 0 out").end).map((line) => `0:${line}`)); // prettier-ignore
    add(store, [0, "out", 98, 1, ["changed"], ["open again"]]);
    assert.deepEqual(shown(store, 0).slice(97), ["0:line 97", "0:changed", "0:open again"]);
    consistent(store);
  }
});

test("a rank keeps its last lines, and all ranks together are bounded too: the oldest go first", () => {
  const store = new LogStore(SMALL);
  for (let i = 0; i < 100; i += 5) add(store, [0, "out", i, i, numbered(i, i + 5)]);
  assert.deepEqual(shown(store, 0), numbered(90, 100).map((line) => `0:${line}`)); // prettier-ignore
  for (let i = 0; i < 40; i++) add(store, [1 + (i % 5), "out", Math.floor(i / 5), 100 + i, numbered(i, i + 1)]);
  assert.equal(store.merged.length, 30);
  assert.deepEqual([shown(store).at(-1), shown(store, 0)], ["5:line 39", []]);
  consistent(store);
});

test("another attempt has logs of its own", () => {
  const store = new LogStore();
  add(store, [0, "out", 0, 1, ["first", "bar"]]);
  store.add([{ attempt: 2, rank: 0, stream: "out", first: 0, lines: [[5, "second"]], open: [] }]);
  assert.deepEqual(shown(store, 0), ["0:first", "0:bar", "0:second"]);
  assert.deepEqual(store.ends, [
    [1, 0, "out", 2],
    [2, 0, "out", 1],
  ]);
});

test("find looks at what is shown, whatever the case", () => {
  const store = new LogStore();
  add(store, [0, "out", 0, 1, ["Loss 1", "\x1b[31mlo\x1b[0mss 2", "nothing"]]);
  assert.deepEqual(findLines(store.view("all").lines, "LOSS"), [0, 1]);
  assert.deepEqual(findLines(store.view("all").lines, ""), []);
  assert.deepEqual(findLines(store.view("all").lines, "31m"), []);
});

test("a line's place is found again after others have gone, and when it comes again", () => {
  const store = new LogStore(SMALL);
  add(store, [0, "out", 0, 1, numbered(0, 10)]);
  const [line] = store.view(0).lines.slice(9);
  add(store, [0, "out", 10, 2, numbered(10, 13)]);
  assert.equal(placeOf(store.view(0).lines, line), 6);
  add(store, [0, "out", 5, 1, numbered(5, 13)]);
  assert.equal(placeOf(store.view(0).lines, line), 6);
});

test("a flood is taken in fast and stays bounded", () => {
  const store = new LogStore();
  const begin = performance.now();
  for (let i = 0; i < 200_000; i += 2500)
    add(store, [0, "out", i, i, numbered(i, i + 2500)], [1, "out", i, i, numbered(i, i + 2500)]);
  assert.equal(store.merged.length, 20_000);
  assert.ok(performance.now() - begin < 10_000, `${performance.now() - begin} ms`); // a twentieth of that as measured
});
