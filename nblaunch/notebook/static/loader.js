// What each panel's widget carries: it loads the panel's script from the model that holds it for all panels of a kernel.
const PAUSE_MS = 50;
const TRIES = 30; // together less than anywidget waits for a model

const page = /** @type {any} */ (globalThis);
/** Scripts by their text; panels of all notebooks on the page share them. @type {Map<string, Promise<any>>} */
const scripts = (page.nblaunchScripts ??= new Map());

/** Return the model with this id, which may be about to be made. @param {any} manager @param {string} id */
async function modelOf(manager, id) {
  for (let left = TRIES; ; left--) {
    try {
      return await manager.get_model(id);
    } catch (error) {
      if (!left) throw error;
      await new Promise((done) => setTimeout(done, PAUSE_MS));
    }
  }
}

/** @param {any} shared */
async function load(shared) {
  const sheet = document.createElement("style");
  sheet.textContent = shared.get("style");
  document.head.append(sheet);
  const url = URL.createObjectURL(new Blob([shared.get("script")], { type: "text/javascript" }));
  return (await import(url).finally(() => URL.revokeObjectURL(url))).default;
}

/** @param {any} model of a panel */
async function panelScript(model) {
  const shared = await modelOf(model.widget_manager, String(model.get("script")).replace("IPY_MODEL_", ""));
  const text = shared.get("script");
  let loaded = scripts.get(text);
  if (!loaded) scripts.set(text, (loaded = load(shared)));
  return loaded;
}

export default {
  /** @param {{model: any}} context */
  initialize: async (context) => (await panelScript(context.model)).initialize(context),
  /** @param {{model: any}} context */
  render: async (context) => (await panelScript(context.model)).render(context),
};
