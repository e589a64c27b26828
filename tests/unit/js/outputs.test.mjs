// Outputs of ranks: parts that arrive, replacements, and what a page that missed messages shows.
import assert from "node:assert/strict";
import test from "node:test";
import { OutputStore } from "../../../nblaunch/notebook/static/output_store.js";
import { bytes } from "./helpers.mjs";

const json = (body) => bytes(JSON.stringify({ kind: "text", body, text: "", width: null, height: null }));
const shown = (store, rank = 0) => store.ranks.get(rank).shown.map((content) => content.body);
function send(store, number, body, from = 0, to = Infinity) {
  const data = json(body);
  const piece = data.slice(from, to);
  store.add([[number, from, piece.length, data.length]], piece);
}

test("an output is shown once all its parts are there", () => {
  const store = new OutputStore();
  store.set([0, [1], 0]);
  send(store, 1, "whole", 0, 10);
  assert.deepEqual(shown(store), []);
  send(store, 1, "whole", 10);
  assert.deepEqual(shown(store), ["whole"]);
});

test("several outputs come in one message", () => {
  const store = new OutputStore();
  store.set([1, [1, 2], 0]);
  const [a, b] = [json("a"), json("b")];
  const data = new Uint8Array([...a, ...b]);
  store.add([[1, 0, a.length, a.length], [2, 0, b.length, b.length]], data); // prettier-ignore
  assert.deepEqual(shown(store, 1), ["a", "b"]);
});

test("an output is shown until the one that replaces it has arrived", () => {
  const store = new OutputStore();
  store.set([0, [1], 0]);
  send(store, 1, "old");
  store.set([0, [2], 0]);
  send(store, 2, "new", 0, 5);
  assert.deepEqual(shown(store), ["old"]);
  send(store, 2, "new", 5);
  assert.deepEqual(shown(store), ["new"]);
  assert.deepEqual([...store.contents.keys()], [2]);
});

test("removed outputs go at once", () => {
  const store = new OutputStore();
  store.set([0, [1], 0]);
  send(store, 1, "old");
  store.set([0, [], 3]);
  assert.deepEqual(shown(store), []);
});

test("a part after a missed one waits until the output is sent again", () => {
  const store = new OutputStore();
  store.set([0, [1], 0]);
  send(store, 1, "whole", 0, 5);
  send(store, 1, "whole", 10);
  assert.deepEqual(shown(store), []);
  send(store, 1, "whole", 0, 10);
  send(store, 1, "whole", 10);
  assert.deepEqual(shown(store), ["whole"]);
});

test("a snapshot shows again what the page has", () => {
  const store = new OutputStore();
  store.set([0, [1], 0]);
  store.set([1, [2], 0]);
  send(store, 1, "one");
  send(store, 2, "two");
  store.clear();
  store.set([0, [1], 0]);
  store.set([1, [2], 0]);
  assert.deepEqual([shown(store, 0), shown(store, 1)], [["one"], ["two"]]);
});
