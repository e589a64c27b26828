// Where the time of the ranks goes: the last profile, and its trace as a file to save.
import { el, setText } from "./format.js";

export class ProfileView {
  /** @param {import("./state.js").PanelState} panel */
  constructor(panel) {
    this.panel = panel;
    this.title = el("strong", {});
    this.body = el("div", { class: "nbl-profile-body" });
    const kind = { type: "button", class: "nbl-button nbl-small" };
    const title = "Save the trace of all ranks, for https://ui.perfetto.dev";
    this.save = el("button", { ...kind, title, on_click: () => panel.kernel.trace() }, "Save trace");
    const label = "Close the profile";
    const close = el("button", { ...kind, "aria-label": label, on_click: () => this.#close() }, "Close");
    this.node = el(
      "section",
      { class: "nbl-profile", "aria-label": "Profile", hidden: true },
      el("div", { class: "nbl-bar" }, this.title, el("span", { class: "nbl-buttons" }, this.save, close)),
      this.body,
    );
    /** @type {unknown} */ this.drawn = null;
  }

  #close() {
    this.panel.reading.closedProfile = this.panel.profile?.time ?? null; // a snapshot may bring it again
    this.panel.changed();
  }

  update() {
    const { profile: last, reading } = this.panel;
    const profile = last?.time === reading.closedProfile ? null : last;
    if (profile === this.drawn) return;
    this.drawn = profile;
    this.node.hidden = !profile;
    if (!profile) return this.body.replaceChildren();
    setText(this.title, `Where the time went, at ${Number(profile.time).toFixed(1)} s`);
    this.save.hidden = !profile.has_trace;
    this.body.innerHTML = profile.html; // safe: the kernel makes it, as it makes the record
  }
}

/** Save a trace as a file, where the page can. @param {string} name @param {Uint8Array} bytes */
export function saveTrace(name, bytes) {
  const blob = new Blob([/** @type {any} */ (bytes)], { type: "application/gzip" });
  const link = el("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
