import assert from "node:assert/strict";
import test from "node:test";
import loader from "../../../nblaunch/notebook/static/loader.js";

const SCRIPT = `
globalThis.loads = (globalThis.loads ?? 0) + 1;
const shown = [];
export default { initialize: ({ model }) => shown.push(model.name), render: () => [...shown] };
`;
const styles = [];
globalThis.document = { createElement: () => ({}), head: { append: (sheet) => styles.push(sheet.textContent) } };
globalThis.Blob = class {
  constructor(parts) {
    this.text = parts.join("");
  }
};
URL.createObjectURL = (blob) => `data:text/javascript,${encodeURIComponent(blob.text)}`;

/** A widget manager whose model of the script appears after so many questions. */
function managerOf(id, missing = 0) {
  const shared = { get: (name) => ({ script: SCRIPT, style: ".nbl-root {}" })[name] };
  return {
    async get_model(asked) {
      if (asked !== id || missing-- > 0) throw new Error("widget model not found");
      return shared;
    },
  };
}

/** A panel's model. */
function panelOf(manager, name, id) {
  return { name, widget_manager: manager, get: (key) => (key === "script" ? `IPY_MODEL_${id}` : null) };
}

test("panels of all kernels on a page share one script and one style sheet", async () => {
  const [first, second] = [managerOf("a"), managerOf("b")];
  await loader.initialize({ model: panelOf(first, "one", "a") });
  await loader.initialize({ model: panelOf(first, "two", "a") });
  await loader.initialize({ model: panelOf(second, "three", "b") });
  assert.deepEqual(await loader.render({ model: panelOf(second, "three", "b") }), ["one", "two", "three"]);
  assert.equal(globalThis.loads, 1);
  assert.deepEqual(styles, [".nbl-root {}"]);
});

test("a script that comes a little later is waited for", async () => {
  await loader.initialize({ model: panelOf(managerOf("c", 3), "late", "c") });
  assert.ok((await loader.render({ model: panelOf(managerOf("c"), "late", "c") })).includes("late"));
});

test("without its script a panel fails, and does not wait forever", async () => {
  await assert.rejects(loader.initialize({ model: panelOf(managerOf("d"), "lost", "e") }), /not found/);
});
