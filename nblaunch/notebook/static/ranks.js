// A cell for each rank: state, progress bars, resource usage.
import { bytesText, clockText, el, FEW_RANKS, numberText, rankClass, setAttribute, setText } from "./format.js";

/** @typedef {import("./state.js").Bar} Bar */
/** @typedef {{box: any, state: any, use: any, bars: any, drawn: Map<string, any>, failed: boolean}} Cell */
const ACTIVE_RANKS = ["starting", "running", "waiting", "stopping"];
const FULL = "full"; // how the keys of bars without a track begin

export class RanksView {
  /** @param {import("./state.js").PanelState} panel @param {(rank: number) => void} show shows a rank's log */
  constructor(panel, show) {
    this.panel = panel;
    this.show = show;
    this.node = el("div", { class: "nbl-ranks", role: "list", "aria-label": "Ranks" });
    /** @type {Map<number, Cell>} */ this.cells = new Map();
  }

  update() {
    const { panel } = this;
    this.node.classList.toggle("nbl-many", panel.ranks.size > FEW_RANKS);
    this.node.classList.toggle("nbl-with-use", panel.resources.size > 0);
    const haveEnded = panel.kernel.gone && !panel.info.run;
    for (const [rank, state] of panel.ranks)
      this.#update(rank, haveEnded && ACTIVE_RANKS.includes(state) ? "ended" : state);
  }

  /** @param {number} rank @returns {Cell} */
  #cell(rank) {
    const known = this.cells.get(rank);
    if (known) return known;
    const cell = {
      state: el("span", { class: "nbl-rank-state" }),
      use: el("div", { class: "nbl-use" }),
      bars: el("div", { class: "nbl-bars" }),
      drawn: new Map(),
      box: null,
      failed: false,
    };
    const button = el(
      "button",
      {
        type: "button",
        class: "nbl-rank-name",
        title: `Show the log of rank ${rank}`,
        on_click: () => this.show(rank),
      },
      this.panel.info.hosts.length ? `rank ${rank} · ${this.panel.info.hosts[rank]}` : `rank ${rank}`,
    );
    cell.box = el(
      "div",
      { class: `nbl-rank ${rankClass(rank)}`, role: "listitem" },
      el(
        "div",
        { class: "nbl-rank-head" },
        el("span", { class: "nbl-swatch", "aria-hidden": "true" }),
        button,
        cell.state,
      ),
      cell.bars,
      cell.use,
    );
    this.cells.set(rank, cell);
    this.node.append(cell.box);
    return cell;
  }

  /** @param {number} rank @param {string} state */
  #update(rank, state) {
    const { panel } = this;
    const cell = this.#cell(rank);
    const failed = panel.failure?.rank === rank || (!panel.failure && state === "failed");
    const word = failed ? "failed" : state === "waiting" ? "waiting for you" : state;
    setText(cell.state, failed ? "✕ failed" : word);
    setAttribute(cell.box, "aria-label", `rank ${rank}, ${word}`);
    setAttribute(cell.box, "data-state", failed ? "culprit" : state);
    const lives = ACTIVE_RANKS.includes(state) && panel.active;
    const use = useText(panel.resources.get(rank), lives);
    setText(cell.use, use);
    cell.box.title = use;
    if (failed && !cell.failed) this.node.scrollTop = cell.box.offsetTop - this.node.offsetTop - 40;
    cell.failed = failed;
    const bars = shownBars([...(panel.progress.get(rank)?.values() ?? [])], state === "returned", lives);
    for (const [key, drawn] of cell.drawn) {
      if (bars.has(key)) continue;
      drawn.box.remove();
      cell.drawn.delete(key);
    }
    for (const [key, bar] of bars) this.#bar(cell, rank, key, bar, lives);
  }

  /** @param {Cell} cell @param {number} rank @param {string} key @param {Bar} bar @param {boolean} lives */
  #bar(cell, rank, key, bar, lives) {
    const { desc } = bar;
    let drawn = cell.drawn.get(key);
    if (!drawn) {
      const fill = el("div", { class: "nbl-fill" });
      const track = el(
        "div",
        {
          class: "nbl-track",
          role: "progressbar",
          "aria-valuemin": 0,
        },
        fill,
      );
      const [name, text] = [el("span", { class: "nbl-desc" }), el("span", { class: "nbl-count" })];
      const box = el("div", { class: "nbl-progress" }, el("div", { class: "nbl-progress-text" }, name, text), track);
      cell.drawn.set(key, (drawn = { box, fill, track, name, text }));
      cell.bars.append(box);
    }
    const share = bar.total ? Math.min(1, bar.done / bar.total) : null;
    const text = barText(bar, share, lives);
    setText(drawn.name, desc);
    drawn.name.title = desc;
    setText(drawn.text, text);
    drawn.track.hidden = key.startsWith(FULL) && this.panel.ranks.size <= FEW_RANKS; // many ranks have no text
    setAttribute(drawn.track, "aria-label", `rank ${rank}: ${desc || "progress"}`);
    setAttribute(drawn.track, "aria-valuenow", share === null ? null : bar.done);
    setAttribute(drawn.track, "aria-valuemax", share === null ? null : bar.total);
    setAttribute(drawn.track, "aria-valuetext", text);
    drawn.track.classList.toggle("nbl-endless", share === null);
    drawn.fill.style.width = share === null ? "" : `${(100 * share).toFixed(1)}%`;
  }
}

/** Return the bars by key. Full ones that differ only in their number become a line of text, such as "epoch 1, 2, 3".
 * The last bar stays a bar while the rank lives, so that the panel keeps its height. Inner bars that a rank has not filled
 * go when the rank returns.
 * @param {Bar[]} bars @param {boolean} isOver @param {boolean} lives @returns {Map<string, Bar>} */
function shownBars(bars, isOver, lives) {
  /** @type {Map<string, Bar>} */
  const shown = new Map();
  for (const bar of bars) {
    const isFull = bar.total !== null && bar.done >= bar.total;
    if (isOver && bar.level && !isFull) continue;
    const stem = bar.desc.replace(/\S*\d\S*$/, ""); // such as "epoch "
    const isLine = isFull && !(lives && bar === bars[bars.length - 1]);
    const key = isLine ? `${FULL} ${bar.level} ${bar.total} ${stem}` : `bar ${bar.desc}`;
    const before = shown.get(key)?.desc;
    shown.set(key, { ...bar, desc: before ? `${before}, ${bar.desc.slice(stem.length)}` : bar.desc });
  }
  return shown;
}

/** @param {Bar} bar @param {number | null} share @param {boolean} lives */
function barText(bar, share, lives) {
  const rate = bar.seconds > 0 ? Math.max(0, bar.done - bar.first) / bar.seconds : 0;
  if (share === null || bar.total === null) {
    return rate ? `${numberText(bar.done)} · ${numberText(Number(rate.toPrecision(3)))}/s` : numberText(bar.done);
  }
  const left = lives && share < 1 && rate ? ` · ${clockText((bar.total - bar.done) / rate)} left` : "";
  return `${numberText(bar.done)}/${numberText(bar.total)}${left}`;
}

/** @param {import("./state.js").Use | undefined} use @param {boolean} lives */
function useText(use, lives) {
  if (!use) return "";
  if (!lives) return `peak ${bytesText(use.peak)}`;
  const text = (/** @type {number} */ value, /** @type {string} */ unit) =>
    unit === "bytes" ? bytesText(value) : `${Math.round(100 * value)}%`;
  return use.values.map(([label, value, unit]) => `${label} ${text(value, unit)}`.trim()).join(" · ");
}
