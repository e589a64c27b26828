// The record of a launch in the notebook: plain HTML that needs no kernel. While the kernel lives, the live panel is in
// its place. Where the page gives access to the notebook (JupyterLab, Notebook 7), the record is there from the start, and
// this script keeps it current: an update by the kernel does not reach a page that was reloaded.
import { ACTIVE_STATES, exitText } from "./kernel.js";

const WIDGET = "application/vnd.jupyter.widget-view+json";
const FIRST_REFRESH_MS = 5000;
const MAX_REFRESH_MS = 60000;
const RUNNING = "nblaunch-running";
const UNSAVED = "To save the record of this launch, show its result in a new cell.";

/** @typedef {import("./page_messages.js").RecordText} RecordText */

/** The outputs of a notebook that hold a record; there may be several: a result in a later cell shows its record, too. */
class NotebookOutputs {
  /** @param {any} model of a panel @param {string} marker */
  constructor(model, marker) {
    this.model = model;
    this.start = `<div class="${marker} `;
  }

  /** The cells; null where the page does not give access to them. @returns {any[] | null} */
  get cells() {
    try {
      return [...this.model.widget_manager.context.model.cells];
    } catch {
      return null;
    }
  }

  /** @returns {{outputs: any, at: number, html: string, json: any}[]} */
  find() {
    const found = [];
    for (const { outputs } of this.cells ?? []) {
      for (let at = 0; at < (outputs?.length ?? 0); at++) {
        const json = outputs.get(at).toJSON();
        const html = [json.data?.["text/html"] ?? ""].flat().join("");
        if (html.startsWith(this.start)) found.push({ outputs, at, html, json });
      }
    }
    return found;
  }

  /** True if a record is of the launch as it runs. */
  get isBehind() {
    return this.find().some(({ html }) => html.startsWith(this.start + RUNNING));
  }

  /** Replace records of the launch as it runs, without their widgets. Return false if there is no record at all.
   * @param {(html: string) => Partial<RecordText>} change */
  rewrite(change) {
    const found = this.find();
    for (const { outputs, at, html, json } of found) {
      if (!html.startsWith(this.start + RUNNING)) continue;
      const { html: newHtml = html, text = json.data["text/plain"] } = change(html);
      if (newHtml === html && !json.data[WIDGET]) continue;
      outputs.set(at, { ...json, data: { "text/html": newHtml, "text/plain": text } });
    }
    return found.length > 0;
  }
}

export class RecordKeeper {
  /**
   * @param {import("./state.js").PanelState} panel
   * @param {(host: HTMLElement) => () => void} render draws a panel, and returns what removes it
   */
  constructor(panel, render) {
    this.panel = panel;
    this.marker = `nblaunch-${panel.info.launch}`;
    this.notebook = new NotebookOutputs(panel.model, this.marker);
    this.render = render;
    /** @type {Map<HTMLElement, {box: HTMLElement, remove: () => void}>} */ this.places = new Map();
    this.observer = new MutationObserver(() => this.look());
    this.started = this.saved = this.asked = this.restores = false;
    panel.keeper = this;
  }

  /** Write the record that the kernel has sent into the notebook. @param {RecordText} record */
  keep(record) {
    if (!this.notebook.rewrite(() => record) && this.restores) this.#restore(record);
    this.restores = false; // the user may clear it later
  }

  /** Bring the notebook up to date with the launch. */
  update() {
    const { kernel, state } = this.panel;
    const runs = ACTIVE_STATES.includes(state.name);
    if (!this.started && (!runs || this.notebook.cells)) this.#start();
    if (runs && this.started && this.panel.isReopened && this.panel.seq && !this.asked) {
      this.asked = this.restores = true;
      kernel.askRecord(); // the notebook may have been saved long before
    }
    if (this.saved || !(kernel.gone || !runs)) return;
    this.saved = true;
    this.#stopRefreshing();
    if (runs) this.notebook.rewrite((html) => ({ html: ended(html, exitText(kernel.gone, this.panel.info.run)) }));
    else if (this.notebook.isBehind)
      kernel.askRecord(); // the kernel's own update has not reached this page
    else if (this.notebook.cells) return;
    else if (this.panel.isReopened && !this.#isShown()) kernel.launch.notify(UNSAVED);
  }

  /** Let the record alone stand in the notebook, for the widget of an output. Return false if this page cannot. */
  takePlace() {
    if (!this.notebook.isBehind) return false;
    setTimeout(() => this.notebook.rewrite((html) => ({ html })));
    return true;
  }

  /** False if the notebook was not saved before its page was closed, and lacks the record. */
  get isInNotebook() {
    return !this.notebook.cells || this.notebook.find().length > 0;
  }

  look() {
    if (this.panel.model.widget_manager?.context?.isDisposed) return this.stop(); // the notebook was closed in this page
    for (const [place, shown] of this.places) if (!shown.box.isConnected || !place.isConnected) this.#leave(place);
    for (const record of document.getElementsByClassName(this.marker)) {
      // JupyterLab styles everything inside its HTML element: place the panel beside it.
      const place = /** @type {HTMLElement} */ (record.closest(".jp-RenderedHTMLCommon") ?? record);
      if (!place.classList.contains("nbl-replaced")) this.#take(place); // else it is taken, maybe for another notebook
    }
  }

  stop() {
    this.#stopRefreshing();
    this.observer.disconnect();
    for (const place of [...this.places.keys()]) this.#leave(place);
  }

  /** Start looking for the record in the page. */
  #start() {
    this.started = true;
    this.observer.observe(document.body, { childList: true, subtree: true });
    this.look();
    if (this.notebook.cells) this.#refreshIn(FIRST_REFRESH_MS);
  }

  /** @param {number} ms */
  #refreshIn(ms) {
    const refresh = () => {
      this.panel.kernel.askRecord();
      this.#refreshIn(Math.min(MAX_REFRESH_MS, 2 * ms));
    };
    this.refreshing = this.panel.kernel.clock.set(refresh, ms);
  }

  #stopRefreshing() {
    this.panel.kernel.clock.clear(this.refreshing);
  }

  /** Show a launch that runs in its cell again: the notebook was not saved before the reload. @param {RecordText} record */
  #restore({ html, text }) {
    const cell = this.notebook.cells?.find(({ id }) => id === this.panel.info.cell);
    cell?.outputs?.add({
      output_type: "display_data",
      data: { "text/html": html, "text/plain": text },
      metadata: {},
    });
  }

  #isShown() {
    return [...document.getElementsByClassName(this.marker)].some((record) => !record.classList.contains(RUNNING));
  }

  /** @param {HTMLElement} place */
  #take(place) {
    const box = document.createElement("div");
    box.className = "nbl-place jp-OutputArea-output";
    place.before(box);
    place.classList.add("nbl-replaced");
    this.places.set(place, { box, remove: this.render(box) });
  }

  /** @param {HTMLElement} place */
  #leave(place) {
    const shown = this.places.get(place);
    this.places.delete(place);
    place.classList.remove("nbl-replaced");
    shown?.remove();
    shown?.box.remove();
  }
}

/** Return the record of a launch whose kernel has exited. @param {string} html of the launch as it ran @param {string} words */
function ended(html, words) {
  const style = "padding:1px 9px;border:1px solid rgba(128,128,128,0.45);border-radius:10px;font-size:12px";
  const pill = `<b style="${style}">■ ${words}</b>`;
  return html.replace(`${RUNNING} `, "").replace(/<b style="[^"]*">… Running<.b>( <span[^>]*>)for /, `${pill}$1after `);
}
