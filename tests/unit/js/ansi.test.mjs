import assert from "node:assert/strict";
import test from "node:test";
import { ansiRuns, stripAnsi } from "../../../nblaunch/notebook/static/ansi.js";

const looks = (line) => ansiRuns(line).map(({ text, cls, style }) => [text, cls, style]);

test("plain text is one run", () => {
  assert.deepEqual(looks("plain <b>"), [["plain <b>", "", {}]]);
  assert.deepEqual(looks(""), []);
});

test("the sixteen colours are classes, for the theme to decide", () => {
  assert.deepEqual(looks("a\x1b[31mb\x1b[0mc"), [
    ["a", "", {}],
    ["b", "nbl-fg-1", {}],
    ["c", "", {}],
  ]);
  assert.deepEqual(looks("\x1b[92;44mx"), [["x", "nbl-fg-10 nbl-bg-4", {}]]);
  assert.deepEqual(looks("\x1b[90;100mx"), [["x", "nbl-fg-8 nbl-bg-8", {}]]);
  assert.deepEqual(looks("\x1b[30;47mx"), [["x", "nbl-fg-0 nbl-bg-7", {}]]);
  assert.deepEqual(looks("\x1b[38;5;9mx"), [["x", "nbl-fg-9", {}]]);
});

test("256 and true colours are computed from numbers", () => {
  assert.deepEqual(looks("\x1b[38;5;196mx")[0][2], { color: "rgb(255, 0, 0)" });
  assert.deepEqual(looks("\x1b[48;5;240mx")[0][2], { background: "rgb(88, 88, 88)" });
  assert.deepEqual(looks("\x1b[38;2;1;2;3mx")[0][2], { color: "rgb(1, 2, 3)" });
  assert.deepEqual(looks("\x1b[38:2::1:2:3mx")[0][2], { color: "rgb(1, 2, 3)" });
  assert.deepEqual(looks("\x1b[38;2;999;2;3mx")[0][2], { color: "rgb(255, 2, 3)" });
});

test("bold, dim, italic, underline and inverse", () => {
  assert.deepEqual(looks("\x1b[1;2;3;4mx"), [["x", "nbl-bold nbl-dim nbl-italic nbl-underline", {}]]);
  assert.deepEqual(looks("\x1b[7mx"), [["x", "nbl-fg-paper nbl-bg-ink", {}]]);
  assert.deepEqual(looks("\x1b[7;31mx"), [["x", "nbl-bg-1", {}]]);
  assert.deepEqual(looks("\x1b[1mx\x1b[0my"), [
    ["x", "nbl-bold", {}],
    ["y", "", {}],
  ]);
});

test("what is no colour is none", () => {
  for (const code of ["38", "38;5", "38;2;1", "48;5", "38:2:1", "38;5;", "99", ";;"]) {
    for (const { cls, style } of ansiRuns(`\x1b[${code}mx`)) {
      assert.match(cls, /^(nbl-[fb]g-\d+ ?|nbl-[a-z]+ ?)*$/);
      assert.match(style.color ?? "rgb(0, 0, 0)", /^rgb\(\d+, \d+, \d+\)$/);
    }
  }
});

test("colours can be taken out", () => {
  assert.equal(stripAnsi("a\x1b[1;31mb\x1b[0mc"), "abc");
});
