// What the ranks display: rank 0 open, the others folded.
import { el, setText } from "./format.js";

/** @typedef {import("./page_messages.js").OutputContent} OutputContent */
/** @typedef {{box: any, count: any, list: any, left: any, drawn: {content: OutputContent, node: any}[]}} Drawn */

export class OutputsView {
  /** @param {import("./state.js").PanelState} panel */
  constructor(panel) {
    this.panel = panel;
    this.node = el("section", { class: "nbl-outputs", "aria-label": "Outputs of the ranks", hidden: true });
    /** @type {Map<number, Drawn>} */ this.ranks = new Map();
    this.version = -1;
  }

  update() {
    const { outputs } = this.panel;
    if (outputs.version === this.version) return;
    this.version = outputs.version;
    const shown = [...outputs.ranks].filter(([, { numbers, left }]) => numbers.length || left);
    shown.sort(([a], [b]) => a - b);
    this.node.hidden = !shown.length;
    for (const [rank, drawn] of this.ranks) if (!shown.some(([other]) => other === rank)) this.#remove(rank, drawn);
    shown.forEach(([rank, found], place) => this.#update(rank, found, place));
  }

  /** @param {number} rank @param {Drawn} drawn */
  #remove(rank, drawn) {
    drawn.box.remove();
    this.ranks.delete(rank);
  }

  /** @param {number} rank @param {import("./output_store.js").RankOutputs} found @param {number} place */
  #update(rank, { numbers, left, shown }, place) {
    const drawn = this.ranks.get(rank) ?? this.#add(rank, place);
    const count = numbers.length + left;
    setText(drawn.count, `${count} output${count === 1 ? "" : "s"}`);
    setText(drawn.left, left ? `${left} output${left === 1 ? "" : "s"} left out` : "");
    drawn.left.hidden = !left;
    shown.forEach((content, at) => {
      const before = drawn.drawn[at];
      if (before?.content === content) return;
      const node = el("div", { class: "nbl-output" }, outputNode(content));
      if (before) before.node.replaceWith(node);
      else drawn.list.append(node);
      drawn.drawn[at] = { content, node };
    });
    for (const { node } of drawn.drawn.splice(shown.length)) node.remove();
  }

  /** @param {number} rank @param {number} place @returns {Drawn} */
  #add(rank, place) {
    const { opened } = this.panel.reading;
    const [count, list] = [el("span", { class: "nbl-soft" }), el("div", {})];
    const left = el("div", { class: "nbl-soft", hidden: true });
    const box = el(
      "details",
      { class: "nbl-details", open: opened.get(rank) ?? rank === 0, on_toggle: () => opened.set(rank, box.open) },
      el("summary", {}, el("strong", {}, `rank ${rank}`), " ", count),
      list,
      left,
    );
    const drawn = { box, count, list, left, drawn: [] };
    this.ranks.set(rank, drawn);
    this.node.insertBefore(box, this.node.children[place] ?? null);
    return drawn;
  }
}

/** @param {OutputContent} content */
function outputNode({ kind, body, text, width, height }) {
  if (kind === "image") return el("img", { src: body, alt: text.slice(0, 200), width, height });
  if (kind === "text") return el("pre", {}, body.replace(/\x1b\[[0-9;:]*m/g, ""));
  const node = el("div", { class: "nbl-html jp-RenderedHTMLCommon" });
  node.innerHTML = body; // the kernel's safe_html.py has made it
  return node;
}
