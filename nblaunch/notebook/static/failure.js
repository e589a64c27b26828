// The root cause of a failure, and the stacks of ranks.
import { el, setText } from "./format.js";

export class FailureView {
  /** @param {import("./state.js").PanelState} panel @param {(rank: number) => void} show shows a rank's log */
  constructor(panel, show) {
    this.panel = panel;
    this.show = show;
    this.node = el("section", { class: "nbl-failure", "aria-label": "Root cause", hidden: true });
    /** @type {unknown} */ this.drawn = null;
  }

  update() {
    const { failure } = this.panel;
    if (failure === this.drawn) return;
    this.drawn = failure;
    this.node.hidden = !failure;
    this.node.replaceChildren(...(failure ? this.#parts(failure) : []));
  }

  /** Build a part that stays open or closed as the reader left it. @param {"traceback" | "others"} name @param {string} cls
   * @param {...Node} children */
  #details(name, cls, ...children) {
    const { reading } = this.panel;
    const details = el(
      "details",
      { class: cls, open: reading[name], on_toggle: () => (reading[name] = details.open) },
      ...children,
    );
    return details;
  }

  /** @param {import("./state.js").FailureEntry} failure */
  #parts(failure) {
    const { rank, headline, details, where, source, traceback, others } = failure;
    const parts = [el("div", { class: "nbl-cause", role: "alert" }, headline)];
    if (details) parts.push(el("pre", { class: "nbl-trace" }, details));
    if (where || source) {
      parts.push(
        el("div", { class: "nbl-at" }, where ? el("span", {}, where) : null, source ? el("code", {}, source) : null),
      );
    }
    if (traceback) {
      parts.push(
        this.#details(
          "traceback",
          "nbl-details",
          el("summary", {}, "Traceback"),
          el(
            "pre",
            { class: "nbl-trace", tabindex: 0, "data-lm-suppress-shortcuts": "true", "aria-label": "Traceback" },
            traceback,
          ),
        ),
      );
    }
    if (others?.length) {
      parts.push(
        this.#details(
          "others",
          "nbl-details nbl-others",
          el(
            "summary",
            {},
            others.length === 1 ? "1 other rank failed after it" : `${others.length} other ranks failed after it`,
          ),
          ...others.map((text) => el("div", {}, String(text))),
        ),
      );
    }
    if (rank >= 0) {
      const show = { type: "button", class: "nbl-link", on_click: () => this.show(rank) };
      parts.push(el("div", { class: "nbl-foot" }, el("button", show, `Show the log of rank ${rank}`)));
    }
    return parts;
  }
}

export class StacksView {
  /** @param {import("./state.js").PanelState} panel */
  constructor(panel) {
    this.panel = panel;
    this.title = el("strong", {});
    this.body = el("div", { class: "nbl-stacks-body", tabindex: 0, "data-lm-suppress-shortcuts": "true" });
    const close = el(
      "button",
      {
        type: "button",
        class: "nbl-button nbl-small",
        "aria-label": "Close the stacks",
        on_click: () => this.#close(),
      },
      "Close",
    );
    this.node = el(
      "section",
      { class: "nbl-stacks", "aria-label": "Stacks", hidden: true },
      el("div", { class: "nbl-bar" }, this.title, close),
      this.body,
    );
    /** @type {unknown} */ this.drawn = null;
  }

  #close() {
    this.panel.reading.closed = this.panel.stacks?.time ?? null; // a snapshot may bring them again
    this.panel.changed();
  }

  update() {
    const { reading } = this.panel;
    const stacks = this.panel.stacks?.time === reading.closed ? null : this.panel.stacks;
    if (stacks === this.drawn) return;
    this.drawn = stacks;
    this.node.hidden = !stacks;
    if (!stacks) return this.body.replaceChildren();
    setText(this.title, `What each rank was doing at ${Number(stacks.time).toFixed(1)} s`);
    /** @type {Map<string, number[]>} */
    const alike = new Map();
    for (const [rank, text] of stacks.ranks) alike.set(text, [...(alike.get(text) ?? []), rank]);
    this.body.replaceChildren(
      ...[...alike].flatMap(([text, ranks]) => [
        el("div", { class: "nbl-stack-ranks" }, `${ranks.length > 1 ? "ranks" : "rank"} ${ranks.join(", ")}`),
        el("pre", {}, String(text)),
      ]),
    );
  }
}
