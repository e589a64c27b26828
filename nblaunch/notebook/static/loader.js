// What each panel's widget carries: it loads the panel's script from the model that holds it for all panels of a kernel.
const PAUSE_MS = 50;
const TRIES = 200;

const page = /** @type {any} */ (globalThis);
/** Scripts by their text; panels of all notebooks on the page share them. @type {Map<string, Promise<any>>} */
const scripts = (page.nblaunchScripts ??= new Map());

/** Return the model with this id, which may be about to be made. @param {any} manager @param {string} id */
async function modelOf(manager, id) {
  for (let left = TRIES; ; left--) {
    try {
      const found = await manager.get_model(id); // some managers give undefined for an unknown id
      if (found) return found;
      throw new Error(`the panel's script is not found: ${id}`);
    } catch (error) {
      if (!left) throw error;
      await new Promise((done) => setTimeout(done, PAUSE_MS));
    }
  }
}

/** @param {any} shared */
async function load(shared) {
  const sheet = document.createElement("style");
  sheet.textContent = shared.get("sheet");
  document.head.append(sheet);
  const url = URL.createObjectURL(new Blob([shared.get("script")], { type: "text/javascript" }));
  return (await import(url).finally(() => URL.revokeObjectURL(url))).default;
}

/** @param {any} model of a panel */
async function panelScript(model) {
  const [, id] = String(model.get("script")).match(/^IPY_MODEL_(\w+)$/) ?? [];
  const shared = id ? await modelOf(model.widget_manager, id) : model;
  const text = shared.get("script");
  let loaded = scripts.get(text);
  if (!loaded) scripts.set(text, (loaded = load(shared)));
  return loaded;
}

export default {
  /** Return at once: anywidget drops the messages of a model that is not ready within 2 s. Keep them for the script.
   * @param {{model: any}} context */
  initialize: (context) => {
    const { model } = context;
    /** @type {any[][]} */
    const early = [];
    const keep = (/** @type {any[]} */ ...message) => early.push(message);
    model.on("msg:custom", keep);
    const started = panelScript(model)
      .then((panel) => {
        model.off("msg:custom", keep);
        return panel.initialize({ ...context, early });
      })
      .catch((error) => console.error("nblaunch: this panel has no script", error)); // its views fail, too
    return async () => (await started)?.();
  },
  /** @param {{model: any}} context */
  render: async (context) => (await panelScript(context.model)).render(context),
};
