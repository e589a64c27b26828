// Bytes in, the lines of a terminal out; that they are those of lines.py is tested in test_panel_js.py.
import assert from "node:assert/strict";
import test from "node:test";
import { LineAssembler } from "../../../nblaunch/notebook/static/lines.js";
import { bytes, randomSource } from "./helpers.mjs";

/** Every line with its place, whatever is taken back on the way. */
function assembled(pieces) {
  const assembler = new LineAssembler();
  const lines = [];
  const take = ({ lines: more, retract }) => {
    lines.splice(lines.length - retract, retract);
    lines.push(...more);
  };
  for (const piece of pieces) take(assembler.feed(bytes(piece)));
  take(assembler.finish());
  return lines;
}
const linesOf = (...pieces) => assembled(pieces).map((line) => line.text);
const byByte = (text) => [...bytes(text)].map((byte) => new Uint8Array([byte]));

for (const [name, pieces, lines] of [
  ["nothing", [], []],
  ["a line and a rest", ["one\ntwo"], ["one", "two"]],
  ["empty lines", ["\n\na"], ["", "", "a"]],
  ["a line in two pieces", ["on", "e\n"], ["one"]],
  ["Windows line ends", ["windows\r", "\nline\r\n"], ["windows", "line"]],
  ["a tab", ["tab\tstays"], ["tab\tstays"]],
  ["NULs and bells", ["\0a\0\0b\x07\x0b\x0c\x7f"], ["ab"]],
  ["a carriage return", ["50%\r100%\n"], ["100%"]],
  ["a shorter line over a longer one", ["a longer line\rshort\n"], ["shortger line"]],
  ["backspaces", ["abc\b\bX\n", "\b\b\bY\n"], ["aXc", "Y"]],
  ["erasing to the end", ["old text\r\x1b[Knew\n"], ["new"]],
  ["erasing all", ["old text\x1b[2K\rnew\n"], ["new"]],
  ["titles and links", ["\x1b]0;ti", "tle\x07a\x1b]8;;http:\x1b\\b\n"], ["ab"]],
  ["a title that never ends", ["\x1b]0;never ended\nnext"], ["", "next"]],
  ["other sequences", ["\x1b(B\x1b7\x1b=a\x1bM\x1b[?25l\x1b[12;4Hb"], ["ab"]],
  ["a colour in pieces", ["a\x1b[", "3", "1mb\n"], ["a\x1b[31mb\x1b[0m"]],
  ["a colour over lines", ["\x1b[31mone\ntwo\x1b[0m\nthree"], ["\x1b[31mone\x1b[0m", "\x1b[31mtwo\x1b[0m", "three"]],
  ["a colour overwritten", ["\x1b[31mred\x1b[0m\rX"], ["X\x1b[31med\x1b[0m"]],
  ["a bar that wiped itself", ["\r100%|####|", "\r           \r"], []],
]) {
  test(`shows what a terminal would: ${name}`, () => {
    assert.deepEqual(linesOf(...pieces), lines);
    assert.deepEqual(
      assembled(byByte(pieces.join(""))).map((line) => line.text),
      lines,
    );
  });
}

test("bytes that are not UTF-8 become replacement characters, wherever they are cut", () => {
  const data = new Uint8Array([0xff, 0x6f, 0x6b, 0x0a, 0xe2, 0x82, 0x0a, 0xe2, 0x82, 0xac, 0x0a]);
  assert.deepEqual(linesOf(data), ["\ufffdok", "\ufffd", "€"]);
  assert.deepEqual(linesOf(...[...data].map((byte) => new Uint8Array([byte]))), ["\ufffdok", "\ufffd", "€"]);
});

test("tqdm's bar redraws in place, colours included", () => {
  const assembler = new LineAssembler();
  for (let done = 0; done <= 100; done += 10) {
    const { lines } = assembler.feed(bytes(`\r\x1b[32mEpoch\x1b[0m ${done}%|${"█".repeat(done / 10)}|`));
    assert.deepEqual(lines, []);
    assert.deepEqual(assembler.partials, [`\x1b[32mEpoch\x1b[0m ${done}%|${"█".repeat(done / 10)}|`]);
  }
  assert.equal(assembler.feed(bytes("\n")).lines.length, 1);
  assert.deepEqual(assembler.partials, []);
});

test("nested bars stay two lines", () => {
  const assembler = new LineAssembler();
  let finished = 0;
  assembler.feed(bytes("before\nouter 0%"));
  for (let i = 0; i < 50; i++) {
    const { lines, retract } = assembler.feed(bytes(`\n\rinner ${i}%\x1b[A\router ${i}%`));
    finished += lines.length - retract;
  }
  assert.deepEqual(assembler.partials, ["outer 49%", "inner 49%"]);
  assert.equal(finished, 0);
  const after = assembler.feed(bytes("\n\r         \r\x1b[A\nnext\nlast\n"));
  assert.deepEqual(
    after.lines.map((line) => line.text),
    ["outer 49%", "next     ", "last"],
  );
  assert.deepEqual(assembler.partials, []);
});

test("the cursor goes up into lines that were finished, and these are taken back", () => {
  const assembler = new LineAssembler();
  assert.deepEqual(
    assembler.feed(bytes("one\ntwo\n")).lines.map((line) => line.text),
    ["one", "two"],
  );
  assert.deepEqual(assembler.feed(bytes("\x1b[2A\rONE")), { lines: [], retract: 2 });
  assert.deepEqual(assembler.partials, ["ONE", "two"]);
  assert.deepEqual(linesOf("one\ntwo\n\x1b[2A\rONE\n\nthree"), ["ONE", "two", "three"]);
});

test("the cursor goes up no further than eight lines", () => {
  const assembler = new LineAssembler();
  assembler.feed(bytes("x\n".repeat(20)));
  assert.equal(assembler.feed(bytes("\x1b[999A")).retract, 7); // and the line that the cursor was on
});

test("a long line keeps its ends", () => {
  const line = "a".repeat(2000) + "-".repeat(96_000) + "z".repeat(2000);
  const kept = `${"a".repeat(2000)}… [96,000 characters left out] …${"z".repeat(2000)}`;
  assert.deepEqual(linesOf(line), [kept]);
  assert.deepEqual(linesOf(`${line}\n`), [kept]);
  assert.deepEqual(linesOf(...line.match(/.{1,5000}/g)), [kept]);
  assert.deepEqual(linesOf(`${line}\rB\x1b[K`), ["B"]);
  assert.deepEqual(linesOf("a".repeat(4000)), ["a".repeat(4000)]);
});

test("5 MB without a line end stay small", () => {
  const assembler = new LineAssembler();
  const piece = bytes("x".repeat(50_000));
  for (let i = 0; i < 100; i++) assembler.feed(piece);
  assert.ok(assembler.rows[0].cells.length <= 16_000 + 4000);
  assert.ok(assembler.partials[0].length < 4100);
});

test("every line knows where its bytes are", () => {
  const text = "é1\n\r50%\r100%\n\x1b[31m…\x1b[0m\nrest";
  const data = bytes(text);
  for (const lines of [assembled([text]), assembled(byByte(text))]) {
    assert.deepEqual(
      lines.map((line) => line.start),
      [0, ...lines.slice(0, -1).map((line) => line.end)],
    );
    assert.equal(lines.at(-1).end, data.length);
    assert.deepEqual(
      lines.slice(0, -1).map((line) => data[line.end - 1]),
      [10, 10, 10],
    );
  }
});

test("it does not matter how bytes are split", () => {
  const random = randomSource(5);
  const tokens = [
    "a",
    "bc",
    "\n",
    "\t",
    "é",
    "😀",
    "x".repeat(2100),
    "\0",
    "\x07",
    "\r",
    "\r\n",
    "\b",
    "\x1b[K",
    "\x1b[2K",
    "\x1b[A",
    "\x1b[2A",
    "\x1b[B",
    "\x1b",
    "[",
    "]",
    "0;",
    "31m",
    "\\",
    "\x1b[31m",
    "\x1b[0m",
    "\n",
    "word ",
  ];
  for (let round = 0; round < 300; round++) {
    const data = bytes(Array.from({ length: random(40) }, () => tokens[random(tokens.length)]).join(""));
    const whole = assembled([data]);
    const pieces = [];
    for (let at = 0; at < data.length;) {
      const size = 1 + random(9);
      pieces.push(data.slice(at, at + size));
      at += size;
    }
    const texts = (lines) => lines.map((line) => line.text);
    assert.deepEqual(texts(assembled(pieces)), texts(whole), JSON.stringify(new TextDecoder().decode(data)));
    assert.deepEqual(texts(assembled([...data].map((byte) => new Uint8Array([byte])))), texts(whole));
  }
});

test("it is quadratic in nothing", () => {
  const begin = performance.now();
  linesOf(("x".repeat(49) + "\n").repeat(100_000));
  linesOf(("\r" + "x".repeat(60)).repeat(50_000));
  linesOf(...Array(50_000).fill(";").concat("\n"));
  linesOf("\x1b[", ...Array(50_000).fill(";"));
  linesOf(...Array(20).fill("\x1b[31mx".repeat(1000) + "\x07"));
  linesOf("a\nb\n\x1b[2A".repeat(20_000));
  assert.ok(performance.now() - begin < 8000, `${performance.now() - begin} ms`); // a tenth of that as measured
});
