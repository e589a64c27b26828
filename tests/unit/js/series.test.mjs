import assert from "node:assert/strict";
import test from "node:test";
import { logTicks, niceTicks, spansDecades, valueRange } from "../../../nblaunch/notebook/static/chart.js";
import {
  bytesText,
  clockText,
  durationText,
  numberText,
  steadyText,
  valueText,
} from "../../../nblaunch/notebook/static/format.js";
import { rowSizes } from "../../../nblaunch/notebook/static/metrics.js";
import { Metric, MetricBook } from "../../../nblaunch/notebook/static/series.js";

const DIRECTIONS = { accuracy: 1, loss: -1 };

function metric(name, points) {
  const made = new Metric(name, DIRECTIONS[name]);
  for (const [, rank, x, y, number] of numbered(points.map((point) => [name, ...point]))) made.push(rank, x, y, number);
  return made;
}

/** Number the points of each metric and rank, as the kernel does. */
function numbered(points) {
  const counts = {};
  return points.map((point) => [
    ...point,
    (counts[`${point[0]} ${point[1]}`] = (counts[`${point[0]} ${point[1]}`] ?? -1) + 1),
  ]);
}

test("the mean goes up to where the slowest rank is, and over what a rank left out", () => {
  const table = metric("loss", [
    [0, 1, 1],
    [1, 1, 3],
    [0, 2, 2],
    [0, 3, 3],
    [1, 3, 5],
    [0, 4, 9],
  ]).table();
  assert.deepEqual(table.xs, [1, 2, 3, 4]);
  assert.deepEqual(table.ranks, [0, 1]);
  assert.deepEqual(table.columns, [
    [1, 2, 3, 9],
    [3, null, 5, null],
  ]);
  assert.deepEqual(table.mean, [2, 3, 4, null]);
});

test("ranks that report at different steps have a mean too", () => {
  const { mean } = metric("loss", [
    [0, 1, 1],
    [1, 2, 3],
    [0, 3, 3],
    [1, 4, 5],
    [0, 5, 5],
  ]).table();
  assert.deepEqual(mean, [1, 2.5, 3.5, 4.5, null]);
});

test("a rank that joins later counts from there on", () => {
  assert.deepEqual(
    metric("loss", [
      [0, 1, 1],
      [0, 2, 2],
      [1, 2, 4],
      [0, 3, 3],
      [1, 3, 5],
    ]).table().mean,
    [1, 3, 4],
  );
});

test("a rank that stopped long before holds up no mean", () => {
  const points = [[1, 1, 3]];
  for (let x = 1; x <= 5; x++) points.push([0, x, 1]);
  assert.deepEqual(metric("loss", points).table().mean, [2, 1, 1, 1, 1]);
});

test("latest is where the slowest rank is, and never better than the best", () => {
  const made = metric("accuracy", [
    [0, 1, 0.1],
    [1, 1, 0.3],
    [0, 2, 0.9],
  ]);
  assert.equal(made.latest, 0.2);
  assert.equal(made.best, 0.2);
  assert.equal(made.table().xs[made.end], 1);
});

test("non-finite values are left out, and reported if no others follow", () => {
  const made = metric("loss", [
    [0, 1, 1],
    [1, 1, 3],
    [0, 2, null],
  ]);
  assert.equal(made.latest, 2);
  assert.equal(made.diverged, false);
  made.push(1, 2, NaN, 1);
  assert.equal(made.latest, 2);
  assert.equal(made.diverged, true);
  assert.equal(metric("x", [[0, 1, null]]).latest, null);
});

test("best goes by the name", () => {
  const points = [
    [0, 1, 0.5],
    [0, 2, 0.9],
    [0, 3, 0.7],
  ];
  const best = (name) => {
    const made = metric(name, points);
    made.table();
    return made.best;
  };
  assert.deepEqual(["accuracy", "loss", "lr"].map(best), [0.9, 0.5, null]);
});

test("best survives thinning", () => {
  const made = new Metric("accuracy", 1);
  for (let i = 0; i < 10_000; i++) {
    made.push(0, i, i === 3 ? 1 : 0.5, i);
    if (i % 50 === 0) made.table();
  }
  assert.equal(made.best, 1);
});

/** @param {[string, string][][]} charts the metrics of each chart with their parts */
function arranged(charts, direction = "down", kind = "") {
  const book = new MetricBook();
  book.arrange(charts.map((lines) => [lines, direction, kind]));
  return book;
}

test("charts stand as the kernel says, once their metrics have points", () => {
  const book = arranged([
    [
      ["loss", "training"],
      ["valid_loss", "valid"],
    ],
    [["lr", "training"]],
  ]);
  assert.deepEqual(book.groups(), []);
  book.add(
    numbered([
      ["lr", 0, 1, 1e-3],
      ["valid_loss", 0, 1, 2],
    ]),
  );
  const names = () => book.groups().map((group) => group.metrics.map((made) => made.name));
  assert.deepEqual(names(), [["valid_loss"], ["lr"]]);
  book.add(numbered([["loss", 0, 1, 3]]));
  assert.deepEqual(names(), [["loss", "valid_loss"], ["lr"]]);
});

test("a chart has the steps of all its metrics, and their best points", () => {
  const book = arranged([
    [
      ["loss", "training"],
      ["valid_loss", "valid"],
    ],
  ]);
  book.add(numbered([1, 2, 3, 4].map((x) => ["loss", 0, x, 1 / x])));
  book.add(
    numbered([
      ["valid_loss", 0, 2, 0.9],
      ["valid_loss", 0, 5, 0.7],
      ["valid_loss", 1, 5, 0.9],
    ]),
  );
  book.mark([
    ["valid_loss", 2, 0.9],
    ["loss", 9, null],
  ]);
  const [group] = book.groups();
  const { xs, columns, beside, marks } = group.table();
  assert.deepEqual(xs, [1, 2, 3, 4, 5]);
  assert.deepEqual(columns, [[1, 1 / 2, 1 / 3, 1 / 4, null]]);
  assert.deepEqual(beside, [{ part: "valid", values: [null, 0.9, null, null, 0.8] }]);
  assert.deepEqual(marks, [{ part: "valid", x: 2, y: 0.9 }]);
  assert.deepEqual(
    group.metrics.map((made) => [made.best, made.differs]),
    [
      [0.25, false],
      [0.8, true],
    ],
  );
});

test("a metric whose x are the numbers of reports has no best step", () => {
  const book = arranged([[["loss", "training", true]], [["valid_loss", "valid", false]]]);
  book.add(numbered([3, 1, 2].map((x) => ["loss", 0, x, x])));
  book.add(numbered([["valid_loss", 0, 3, 1]]));
  book.mark([
    ["loss", 1, 1],
    ["valid_loss", 3, 1],
  ]);
  assert.deepEqual(
    book.groups().map((group) => [group.name, group.table().marks.length]),
    [
      ["loss", 0],
      ["valid_loss", 1],
    ],
  );
});

test("rates and learning rates have their own writing", () => {
  const texts = (kind, values) => values.map((value) => valueText(value, kind));
  assert.deepEqual(texts("lr", [3e-4, 1.25e-5, 0.1, 0, null]), ["3e-4", "1.25e-5", "0.1", "0", "–"]);
  assert.deepEqual(texts("rate", [0.5, 12.34, 1234.5, 123456, 999700]), [
    "0.5/s",
    "12.3/s",
    "1.23k/s",
    "123k/s",
    "1M/s",
  ]);
  assert.deepEqual(texts("", [0.25]), ["0.25"]);
});

test("names of a hostile kind are names", () => {
  const book = arranged(["<b>", "__proto__", "constructor"].map((name) => [[name, "training"]]));
  book.add(
    numbered([
      ["__proto__", 0, 1, 1],
      ["constructor", 0, 1, 2],
      ["<b>", 0, 1, 3],
    ]),
  );
  assert.deepEqual(
    book.groups().map(({ name, first }) => [name, first.latest]),
    [
      ["<b>", 3],
      ["__proto__", 1],
      ["constructor", 2],
    ],
  );
});

test("a long series keeps its peaks: one odd point among 10,000 is the best", () => {
  for (const [name, odd] of [
    ["accuracy", 1],
    ["loss", -1],
  ]) {
    for (const at of [0, 1, 2, 3, 6001, 9998, 9999]) {
      const made = new Metric(name, DIRECTIONS[name]);
      for (let i = 0; i < 10_000; i++)
        for (const rank of [0, 1]) made.push(rank, i, i === at ? odd : i % 7 ? 0.5 + (i % 3) / 100 : NaN, i);
      const { xs, mean } = made.table();
      assert.ok(xs.length <= 2000 && xs.length > 700, String(xs.length));
      assert.deepEqual([made.best, mean[xs.indexOf(at)]], [odd, odd], `${name} ${at}`);
    }
  }
});

test("peaks stay through every thinning, and all ranks keep the same steps", () => {
  const made = new Metric("accuracy", 1);
  for (let i = 0; i < 300_000; i++) {
    for (let rank = 0; rank < 2; rank++)
      made.push(rank, i, i === 70_001 ? 1 : ((i * 7919 + rank * 31) % 1000) / 2000, i);
    if (i % 1500 === 0) made.thin();
  }
  const { xs, columns } = made.table();
  assert.equal(made.best, 1);
  assert.ok(xs.length <= 2002, String(xs.length));
  assert.ok(columns.flat().every((y) => y !== null));
});

test("a series that never has a number is thinned too", () => {
  const made = new Metric("loss");
  for (let i = 0; i < 10_000; i++) made.push(0, i, null, i);
  assert.ok(made.table().xs.length <= 2000);
  assert.deepEqual([made.latest, made.best, made.diverged], [null, null, true]);
});

test("points are thinned as they come, before anyone draws them", () => {
  const book = arranged([[["loss", "training"]]]);
  book.add(numbered(Array.from({ length: 9000 }, (_, i) => ["loss", 0, i, i === 4321 ? -1 : 1])));
  const made = book.groups()[0].first;
  assert.ok(made.ranks.get(0).xs.length <= 2000);
  made.table();
  assert.equal(made.best, -1);
});

test("a long series keeps at most 2,000 points, evenly, the first and the last among them", () => {
  const made = new Metric("loss");
  for (let i = 0; i < 50_000; i++) {
    made.push(0, i, i, i);
    made.push(1, i, i + 2, i);
  }
  const { xs, columns, mean } = made.table();
  assert.ok(xs.length <= 2001 && xs.length > 700, String(xs.length));
  assert.deepEqual([xs[0], xs.at(-1)], [0, 49_999]);
  assert.deepEqual(columns[0], xs);
  assert.ok(mean.every((y, i) => y === xs[i] + 1));
  assert.ok(Math.max(...xs.slice(1).map((x, i) => x - xs[i])) < 128);
});

test("where steps went back the kernel's numbers are the steps, also of points that have come", () => {
  const book = arranged([[["loss", "training", false]]]);
  book.add([
    ["loss", 0, 10, 1, 0],
    ["loss", 0, 20, 2, 1],
    ["loss", 1, 10, 5, 0],
  ]);
  const { first } = book.groups()[0];
  assert.deepEqual(first.table().xs, [10, 20]);
  book.arrange([[[["loss", "training", true]], "down", ""]]);
  assert.deepEqual(first.table().xs, [0, 1]);
  book.add([
    ["loss", 0, 10, 3, 4], // the message with the points between did not come
    ["loss", 1, 10, 7, 4],
  ]);
  const { xs, columns, mean } = first.table();
  assert.deepEqual(xs, [0, 1, 4]);
  assert.deepEqual(columns, [
    [1, 2, 3],
    [5, null, 7],
  ]);
  assert.deepEqual(mean, [3, 3.75, 5]);
});

test("ticks are round", () => {
  assert.deepEqual(niceTicks(0, 1, 5), [0, 0.2, 0.4, 0.6, 0.8, 1]);
  assert.deepEqual(niceTicks(0.1, 0.85, 5), [0.2, 0.4, 0.6, 0.8]);
  assert.deepEqual(niceTicks(-3, 3, 3), [-2, 0, 2]);
  assert.deepEqual(niceTicks(1e-9, 3e-9, 2), [1e-9, 2e-9, 3e-9]);
  assert.ok(niceTicks(0, 1e300, 5).length < 12);
});

test("a loss over decades has a logarithmic scale with round numbers", () => {
  assert.deepEqual([[[1, null], [0.02]], [[1, 0.021]], [[1, 0]], [[1, -1]], [[null]]].map(spansDecades), [
    true,
    false,
    false,
    false,
    false,
  ]);
  assert.deepEqual(logTicks(-1.7, 0), [0.02, 0.05, 0.1, 0.2, 0.5, 1]);
  assert.deepEqual(logTicks(-3.8, 0), [0.001, 0.01, 0.1, 1]);
  assert.deepEqual(logTicks(-12, 0), [1e-12, 1e-10, 1e-8, 1e-6, 1e-4, 0.01, 1]);
});

test("a range has air, also around one value", () => {
  assert.deepEqual(valueRange([[1, null], [2]]), [0.94, 2.06]);
  assert.deepEqual(valueRange([[5]]), [4.5, 5.5]);
  assert.deepEqual(valueRange([[0]]), [-1, 1]);
  assert.deepEqual(valueRange([[null]]), [0, 1]);
});

test("cards fill every row, and rows differ by one card at most", () => {
  assert.deepEqual(rowSizes(0, 900), []);
  assert.deepEqual(rowSizes(1, 900), [1]);
  assert.deepEqual(rowSizes(3, 900), [3, 3, 3]);
  assert.deepEqual(rowSizes(4, 900), [2, 2, 2, 2]);
  assert.deepEqual(rowSizes(5, 900), [2, 2, 3, 3, 3]);
  assert.deepEqual(rowSizes(5, 600), [1, 2, 2, 2, 2]);
  assert.deepEqual(rowSizes(2, 100), [1, 1]);
  assert.deepEqual(rowSizes(4, 1400), [4, 4, 4, 4]);
});

test("a value that changes is always as wide", () => {
  assert.deepEqual(
    [0.362, 0.3619, 1.5, -0.25, 3, 12345.6, 1.5e-7, null].map((value) => steadyText(value)),
    ["0.3620", "0.3619", "1.500", "-0.2500", "3", "12346", "1.5e-7", "–"],
  );
  assert.deepEqual(
    [1100, 1130, 850, 99.97].map((value) => steadyText(value, "rate")),
    ["1.10k/s", "1.13k/s", "850/s", "100/s"],
  );
  assert.deepEqual(
    [3e-4, 0.01].map((value) => steadyText(value, "lr")),
    ["3e-4", "0.01"],
  );
});

test("what is no number is a dash, and never an error", () => {
  assert.deepEqual(
    [undefined, null, NaN, Infinity, -Infinity, "inf", "nan", "", " ", "ten", {}, [], true].map(numberText),
    Array(13).fill("–"),
  );
  assert.deepEqual(["10", "1e7", " 2.5 "].map(numberText), ["10", "1e+7", "2.5"]);
  for (const text of [clockText, durationText, bytesText])
    for (const value of [null, undefined, NaN, "inf", "10", {}]) assert.match(text(value), /^1?0/);
});

test("numbers as people read them", () => {
  assert.deepEqual([0.98765, 12345, 1234.5, 0.0000123, 1.5e9, 3, -0.5, 0, null].map(numberText), [
    "0.9877",
    "12,345",
    "1235",
    "1.23e-5",
    "1.5e+9",
    "3",
    "-0.5",
    "0",
    "–",
  ]);
  assert.deepEqual([7, 725, 3723].map(clockText), ["0:07", "12:05", "1:02:03"]);
  assert.deepEqual([0.123, 59.94, 60].map(durationText), ["0.1 s", "59.9 s", "1:00"]);
  assert.deepEqual([0, 999, 1234, 1_234_567, 15_000_000_000].map(bytesText), [
    "0 B",
    "999 B",
    "1.2 kB",
    "1.2 MB",
    "15 GB",
  ]);
});
