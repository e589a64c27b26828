// When a launch has ended, the notebook holds its record: plain HTML, which needs no kernel. As long as there is one, the
// live panel is shown in the record's place, wherever it stands in the page.

export class RecordKeeper {
  /**
   * @param {string} launch
   * @param {(host: HTMLElement) => () => void} render draws a panel, and returns what removes it
   */
  constructor(launch, render) {
    this.marker = `nblaunch-${launch}`;
    this.render = render;
    /** @type {Map<HTMLElement, {box: HTMLElement, remove: () => void}>} */ this.places =
      new Map();
    this.observer = new MutationObserver(() => this.look());
  }

  /** The launch has ended: from now on its record may appear. */
  start() {
    if (this.started) return;
    this.started = true;
    this.observer.observe(document.body, { childList: true, subtree: true });
    this.look();
  }

  look() {
    for (const [place, shown] of this.places)
      if (!shown.box.isConnected || !place.isConnected) this.#leave(place);
    for (const record of document.getElementsByClassName(this.marker)) {
      // JupyterLab styles all that is inside its own element for HTML: the panel goes beside that.
      const place = /** @type {HTMLElement} */ (
        record.closest(".jp-RenderedHTMLCommon") ?? record
      );
      if (!this.places.has(place)) this.#take(place);
    }
  }

  stop() {
    this.observer.disconnect();
    for (const place of [...this.places.keys()]) this.#leave(place);
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
