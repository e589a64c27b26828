// Why ranks wait in a collective, and what to do about it.
import { el } from "./format.js";

export class StuckView {
  /** @param {import("./state.js").PanelState} panel */
  constructor(panel) {
    this.panel = panel;
    this.node = el("section", { class: "nbl-stuck", "aria-label": "Why ranks wait", hidden: true });
    /** @type {unknown} */ this.drawn = null;
  }

  update() {
    const { active, state, stuck } = this.panel;
    this.node.hidden = !stuck.lines.length || !active || state.name === "stopping";
    if (stuck === this.drawn) return;
    this.drawn = stuck;
    this.node.replaceChildren(
      el("div", { role: "alert" }, ...stuck.lines.map((line) => el("div", { class: "nbl-stuck-line" }, line))),
      el("div", { class: "nbl-buttons" }, this.#stop(), ...stuck.ranks.map((rank) => this.#debugButton(rank))),
    );
  }

  #stop() {
    const { info, kernel } = this.panel;
    const title = info.is_session
      ? "Stop: interrupt the cell. The collective raises an exception, and the ranks keep their variables"
      : "Ask all ranks to stop; they may save a checkpoint";
    // Ignore the second click of a double click: it would kill.
    const stop = (/** @type {MouseEvent} */ event) => event.detail < 2 && kernel.stop();
    return el(
      "button",
      { type: "button", class: "nbl-button", title, on_click: stop },
      info.is_session ? "Free the ranks, keep variables" : "Stop",
    );
  }

  /** @param {number} rank */
  #debugButton(rank) {
    const title = `Show the stack frames and variables of rank ${rank} without stopping it`;
    return el(
      "button",
      { type: "button", class: "nbl-button", title, on_click: () => this.panel.kernel.look(rank) },
      `Debug rank ${rank}`,
    );
  }
}
