import assert from "node:assert/strict";
import test from "node:test";
import { FakeModel } from "./helpers.mjs";
import loader from "../../../nblaunch/notebook/static/loader.js";

const SCRIPT = `
globalThis.loads = (globalThis.loads ?? 0) + 1;
const shown = [];
export default {
  initialize({ model, early }) {
    shown.push(model.name);
    for (const [content] of early) shown.push(content);
    model.on("msg:custom", (content) => shown.push(content));
    return () => shown.push("no " + model.name);
  },
  render: () => shown.splice(0),
};
`;
const styles = [];
globalThis.document = { createElement: () => ({}), head: { append: (sheet) => styles.push(sheet.textContent) } };
globalThis.Blob = class {
  constructor(parts) {
    this.text = parts.join("");
  }
};
URL.createObjectURL = (blob) => `data:text/javascript,${encodeURIComponent(blob.text)}`;

/** A widget manager whose model of the script appears after so many questions; older ones answer with undefined. */
function managerOf(id, missing = 0, isOld = false) {
  const shared = { get: (name) => ({ script: SCRIPT, sheet: ".nbl-root {}" })[name] };
  return {
    async get_model(asked) {
      if (asked === id && missing-- <= 0) return shared;
      if (isOld) return undefined;
      throw new Error("widget model not found");
    },
  };
}

/** A panel's model. */
function panelOf(manager, name, id) {
  const model = new FakeModel({ manager });
  Object.assign(model.state, { script: `IPY_MODEL_${id}` });
  return Object.assign(model, { name });
}

test("panels of all kernels on a page share one script and one style sheet", async () => {
  const [first, second] = [managerOf("a"), managerOf("b")];
  const models = [panelOf(first, "one", "a"), panelOf(first, "two", "a"), panelOf(second, "three", "b")];
  for (const model of models) loader.initialize({ model });
  assert.deepEqual(await loader.render({ model: models[2] }), ["one", "two", "three"]);
  assert.equal(globalThis.loads, 1);
  assert.deepEqual(styles, [".nbl-root {}"]);
});

for (const isOld of [false, true])
  test(`a script that comes later gets the messages before it${isOld ? ", with an older manager" : ""}`, async () => {
    const model = panelOf(managerOf("c", 3, isOld), "late", "c");
    const end = loader.initialize({ model });
    for (const content of ["first", "second"]) model.deliver(content);
    const shown = await loader.render({ model });
    model.deliver("third");
    await end();
    assert.deepEqual([...shown, ...(await loader.render({ model }))], ["late", "first", "second", "third", "no late"]);
  });

test("a panel that carries the script asks for no model", async () => {
  const model = new FakeModel({ manager: { get_model: () => assert.fail("asked") } });
  Object.assign(model.state, { script: SCRIPT.replace("shown = []", "shown = ['own']"), sheet: "" });
  loader.initialize({ model });
  assert.equal((await loader.render({ model }))[0], "own");
});

test("without its script a panel fails, and does not wait forever", async (t) => {
  t.mock.method(globalThis, "setTimeout", (act) => queueMicrotask(act));
  const said = t.mock.method(console, "error", () => {});
  const model = panelOf(managerOf("d"), "lost", "e");
  const end = loader.initialize({ model });
  await assert.rejects(loader.render({ model }), /not found/);
  await end();
  assert.match(String(said.mock.calls[0].arguments), /this panel has no script,Error: widget model not found/);
});
