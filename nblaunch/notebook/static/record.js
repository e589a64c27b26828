// After a launch, the notebook holds its record: plain HTML that needs no kernel. While the kernel lives, the live panel
// takes the record's place.

export class RecordKeeper {
  /**
   * @param {string} launch
   * @param {(host: HTMLElement) => () => void} render draws a panel, and returns what removes it
   */
  constructor(launch, render) {
    this.marker = `nblaunch-${launch}`;
    this.render = render;
    /** @type {Map<HTMLElement, {box: HTMLElement, remove: () => void}>} */ this.places = new Map();
    this.observer = new MutationObserver(() => this.look());
  }

  /** Start looking for the record; the launch has ended. */
  start() {
    if (this.started) return;
    this.started = true;
    this.observer.observe(document.body, { childList: true, subtree: true });
    this.look();
  }

  look() {
    for (const [place, shown] of this.places) if (!shown.box.isConnected || !place.isConnected) this.#leave(place);
    for (const record of document.getElementsByClassName(this.marker)) {
      // JupyterLab styles everything inside its HTML element: place the panel beside it.
      const place = /** @type {HTMLElement} */ (record.closest(".jp-RenderedHTMLCommon") ?? record);
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
