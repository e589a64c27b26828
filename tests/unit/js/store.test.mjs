// The bounded lines of all ranks: order, gaps, overlap, older lines, find.
import assert from "node:assert/strict";
import test from "node:test";
import { findLines, placeOf, plainText } from "../../../nblaunch/notebook/static/line_order.js";
import { LogStore } from "../../../nblaunch/notebook/static/store.js";
import { bytes, randomSource } from "./helpers.mjs";

const SMALL = { rank: 10, total: 30, reading: 25, pinned: 8 };

/** Chunks of [rank, stream, offset, time, text]. */
function add(store, ...chunks) {
  const data = chunks.map(([, , , , text]) => bytes(text));
  const all = new Uint8Array(data.reduce((size, piece) => size + piece.length, 0));
  let at = 0;
  for (const piece of data) {
    all.set(piece, at);
    at += piece.length;
  }
  store.add(
    chunks.map(([rank, stream, offset, time], i) => ({ attempt: 1, rank, stream, offset, size: data[i].length, time })),
    all,
  );
}
const shown = (store, tab = "all") => {
  const { lines, open } = store.view(tab);
  return [...lines, ...open].map((line) =>
    line.kind === "gap" ? `<${line.start}-${line.end}>` : `${line.source.rank}:${plainText(line)}`,
  );
};
const numbered = (from, to) =>
  Array.from({ length: to - from }, (_, i) => `line ${String(from + i).padStart(4, "0")}\n`).join("");
const SIZE = numbered(0, 1).length;

function consistent(store) {
  const inRanks = [...store.ranks.values()].flat();
  assert.equal(inRanks.length, store.merged.length);
  assert.deepEqual(new Set(inRanks), new Set(store.merged));
  for (const list of [store.merged, ...store.ranks.values()]) {
    for (let i = 1; i < list.length; i++)
      assert.ok(
        list[i - 1].time < list[i].time || (list[i - 1].time === list[i].time && list[i - 1].order < list[i].order),
      );
    assert.ok(list.every((line) => !line.gone));
  }
}

test("lines of all ranks stand in the order of time", () => {
  const store = new LogStore();
  add(store, [0, "out", 0, 1, "a\n"], [1, "out", 0, 3, "d\n"], [0, "out", 2, 4, "e\n"]);
  add(store, [1, "err", 0, 2, "b\nc\n"], [2, "out", 0, 5, "f\n"]);
  assert.deepEqual(shown(store), ["0:a", "1:b", "1:c", "1:d", "0:e", "2:f"]);
  assert.deepEqual(shown(store, 1), ["1:b", "1:c", "1:d"]);
  consistent(store);
});

test("a line that has not ended stands last, whatever comes", () => {
  const store = new LogStore();
  add(store, [0, "err", 0, 1, "\r10%"], [1, "out", 0, 2, "a\n"]);
  assert.deepEqual(shown(store), ["1:a", "0:10%"]);
  add(store, [0, "err", 4, 3, "\r20%"], [1, "out", 2, 4, "b\n"]);
  assert.deepEqual(shown(store), ["1:a", "1:b", "0:20%"]);
  add(store, [0, "err", 8, 5, "\r30%\n"]);
  assert.deepEqual(shown(store), ["1:a", "1:b", "0:30%"]);
  assert.deepEqual(store.view("all").open, []);
});

test("when the launch is over it stands where it was written, until more of it comes after all", () => {
  const store = new LogStore();
  add(store, [0, "err", 0, 1, "\r10%"], [1, "out", 0, 2, "a\n"]);
  store.settle();
  assert.deepEqual(shown(store), ["0:10%", "1:a"]);
  consistent(store);
  add(store, [0, "err", 4, 3, " and the rest\n"]);
  assert.deepEqual(shown(store), ["1:a", "0:10% and the rest"]);
  consistent(store);
});

test("bytes that were skipped are a gap", () => {
  const store = new LogStore();
  add(store, [0, "out", 0, 1, "a\nhalf"], [0, "out", 100, 2, "b\n"], [1, "out", 50, 3, "c\n"]);
  assert.deepEqual(shown(store), ["0:a", "0:half", "<6-100>", "0:b", "<0-50>", "1:c"]);
});

test("bytes that come twice are trimmed", () => {
  const store = new LogStore();
  add(store, [0, "out", 0, 1, "one\ntw"]);
  add(store, [0, "out", 0, 1, "one\n"], [0, "out", 4, 1, "two\nthree\n"], [0, "out", 4, 1, "two\n"]);
  assert.deepEqual(shown(store), ["0:one", "0:two", "0:three"]);
});

test("any overlap gives the same lines", () => {
  const random = randomSource(3);
  const text = bytes(numbered(0, 200).replaceAll("line 0", "lïne \r0"));
  for (let round = 0; round < 50; round++) {
    const store = new LogStore();
    for (let end = 0; end < text.length;) {
      const from = Math.max(0, end - random(40));
      const to = Math.min(text.length, end + 1 + random(60));
      store.add(
        [{ attempt: 1, rank: 0, stream: "out", offset: from, size: to - from, time: end }],
        text.slice(from, to),
      );
      end = to;
    }
    const whole = new LogStore();
    whole.add([{ attempt: 1, rank: 0, stream: "out", offset: 0, size: text.length, time: 0 }], text);
    assert.deepEqual(shown(store), shown(whole));
  }
});

test("a rank keeps its last lines, and the others are one gap that can be fetched", () => {
  const store = new LogStore(SMALL);
  for (let i = 0; i < 100; i += 5) add(store, [0, "out", i * SIZE, i, numbered(i, i + 5)]);
  const kept = shown(store, 0);
  assert.equal(kept.length, 10);
  assert.equal(kept[0], `<0-${91 * SIZE}>`);
  assert.deepEqual(
    kept.slice(1),
    numbered(91, 100)
      .trim()
      .split("\n")
      .map((line) => `0:${line}`),
  );
  consistent(store);
});

test("each stream has a gap of its own, and a gap on the way is swallowed", () => {
  const store = new LogStore(SMALL);
  add(store, [0, "err", 0, 0, "first\n"], [0, "out", 0, 1, numbered(0, 2)], [0, "out", 1000, 2, numbered(2, 4)]);
  for (let i = 0; i < 30; i++) add(store, [0, "out", 1000 + (2 + i) * SIZE, 3 + i, numbered(i, i + 1)]);
  const kept = shown(store, 0);
  assert.deepEqual(kept.slice(0, 2), ["<0-6>", `<0-${1000 + 24 * SIZE}>`]);
  assert.equal(kept.length, 10);
  consistent(store);
});

test("all ranks together are bounded too: the oldest go first", () => {
  const store = new LogStore(SMALL);
  for (let i = 0; i < 40; i++) add(store, [i % 5, "out", Math.floor(i / 5) * SIZE, i, numbered(i, i + 1)]);
  assert.ok(store.merged.length <= 30 + 5);
  assert.equal(shown(store).at(-1), "4:line 0039");
  assert.ok(store.view(0).lines.some((line) => line.kind === "gap"));
  consistent(store);
});

/** The kernel's answer with the last `most` bytes of a gap of numbered lines. */
function answer(gap, most) {
  const from = Math.max(gap.start, gap.end - most * SIZE);
  const data = bytes(numbered(from / SIZE, gap.end / SIZE));
  return [
    {
      attempt: 1,
      rank: gap.source.rank,
      stream: gap.source.stream,
      start: from,
      end: gap.end,
      spans: [[data.length, 0.5]],
    },
    data,
  ];
}

test("older lines come before those that are there, and stay while the reader reads", () => {
  const store = new LogStore(SMALL);
  for (let i = 0; i < 50; i++)
    add(store, [0, "out", i * SIZE, i, numbered(i, i + 1)], [1, "out", i * SIZE, i + 0.5, numbered(i, i + 1)]);
  const reader = {};
  store.hold(reader, [0]);
  store.fill(...answer(store.view(0).lines[0], 8));
  assert.deepEqual(shown(store, 0).slice(0, 3), [`<0-${33 * SIZE}>`, "0:line 0033", "0:line 0034"]);
  assert.equal(shown(store, 0).length, 18);
  consistent(store);
  add(store, [0, "out", 50 * SIZE, 60, numbered(50, 51)]);
  assert.equal(shown(store, 0).length, 19);
  assert.deepEqual(shown(store, 1).length, 10);
  store.hold(reader);
  assert.equal(shown(store, 0).length, 10);
  consistent(store);
});

test("the beginning of the file leaves no gap", () => {
  const store = new LogStore(SMALL);
  add(store, [0, "out", 4 * SIZE, 2, numbered(4, 6)]);
  store.fill(...answer(store.view(0).lines[0], 100));
  assert.deepEqual(
    shown(store, 0),
    numbered(0, 6)
      .trim()
      .split("\n")
      .map((line) => `0:${line}`),
  );
  consistent(store);
});

test("a gap that grew meanwhile is filled where the answer belongs", () => {
  const store = new LogStore(SMALL);
  for (let i = 0; i < 20; i++) add(store, [0, "out", i * SIZE, i, numbered(i, i + 1)]);
  const late = answer(store.view(0).lines[0], 3);
  const { end: to } = late[0];
  for (let i = 20; i < 22; i++) add(store, [0, "out", i * SIZE, i, numbered(i, i + 1)]);
  store.fill(...late);
  const lines = shown(store, 0);
  assert.deepEqual(lines.slice(0, 5), [
    `<0-${to - 3 * SIZE}>`,
    ...[8, 9, 10].map((i) => `0:line ${String(i).padStart(4, "0")}`),
    `<${to}-${to + 2 * SIZE}>`,
  ]);
  consistent(store);
});

test("an empty answer says that the file has no more", () => {
  const store = new LogStore(SMALL);
  add(store, [0, "out", 100, 2, "a\n"]);
  const gap = store.view(0).lines[0];
  store.fill({ attempt: 1, rank: 0, stream: "out", start: 0, end: 0, spans: [] }, new Uint8Array(0));
  assert.equal(gap.state, "lost");
  assert.equal(store.mayLoad(gap), false);
});

test("no more is loaded than a reader may hold", () => {
  const store = new LogStore(SMALL);
  add(store, [0, "out", 100 * SIZE, 2, numbered(100, 105)]);
  store.hold(store, [0]);
  store.fill(...answer(store.view(0).lines[0], 30));
  assert.equal(store.mayLoad(store.view(0).lines[0]), false);
});

test("lines that come unasked never take the place of newer ones", () => {
  const whole = (limits, before) => {
    const store = new LogStore(limits);
    add(
      store,
      [0, "out", 0, 0.1, numbered(0, 1)],
      [0, "out", 20 * SIZE, 2, numbered(20, 20 + before)],
      [1, "out", 0, 2, numbered(0, 3)],
    );
    const newest = shown(store, 0).slice(2);
    const [part, data] = answer(store.view(0).lines[1], 3);
    store.fillUnrequested(part, data);
    assert.deepEqual(shown(store, 0).slice(-before), newest);
    consistent(store);
    add(store, [0, "out", (20 + before) * SIZE, 3, "x\n"]); // what is too much goes now
    return shown(store, 0).includes("0:line 0017");
  };
  assert.deepEqual([whole(SMALL, 3), whole(SMALL, 7)], [true, false]);
  assert.deepEqual([whole({ ...SMALL, total: 12 }, 3), whole({ ...SMALL, total: 11 }, 3)], [true, false]);
});

test("another attempt has files of its own", () => {
  const store = new LogStore();
  add(store, [0, "out", 0, 1, "first\nbar"]);
  store.add([{ attempt: 2, rank: 0, stream: "out", offset: 0, size: 7, time: 5 }], bytes("second\n"));
  assert.deepEqual(shown(store, 0), ["0:first", "0:bar", "0:second"]);
});

test("lines that the cursor moved up to are taken back", () => {
  const store = new LogStore();
  add(store, [0, "out", 0, 1, "one\n"], [1, "out", 0, 1.5, "other\n"]);
  add(store, [0, "out", 4, 2, "two\x1b[A\rONE"]);
  assert.deepEqual(shown(store), ["1:other", "0:ONE", "0:two"]);
  consistent(store);
});

test("find looks at what is shown, whatever the case", () => {
  const store = new LogStore();
  add(store, [0, "out", 0, 1, "Loss 1\n\x1b[31mlo\x1b[0mss 2\nnothing\n"]);
  assert.deepEqual(findLines(store.view("all").lines, "LOSS"), [0, 1]);
  assert.deepEqual(findLines(store.view("all").lines, ""), []);
  assert.deepEqual(findLines(store.view("all").lines, "31m"), []);
});

test("a line's place is found again after others have gone", () => {
  const store = new LogStore(SMALL);
  for (let i = 0; i < 12; i++) add(store, [0, "out", i * SIZE, i, numbered(i, i + 1)]);
  const { lines } = store.view(0);
  lines.forEach((line, i) => assert.equal(placeOf(lines, line), i));
  for (let i = 12; i < 15; i++) add(store, [0, "out", i * SIZE, i, numbered(i, i + 1)]);
  assert.equal(placeOf(store.view(0).lines, lines[9]), 6);
});

test("a flood is taken in fast and stays bounded", () => {
  const store = new LogStore();
  const begin = performance.now();
  let at = 0;
  for (let i = 0; i < 80; i++) {
    const text = bytes(numbered(i * 2500, i * 2500 + 2500));
    for (const rank of [0, 1]) {
      store.add([{ attempt: 1, rank, stream: "out", offset: at, size: text.length, time: i }], text);
    }
    at += text.length;
  }
  assert.equal(store.merged.length, 20_000);
  assert.ok(performance.now() - begin < 10_000, `${performance.now() - begin} ms`); // a twentieth of that as measured
});
