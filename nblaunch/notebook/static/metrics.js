// A card for each chart: the latest and best values of its metrics, and the lines.
import { MetricChart } from "./chart.js";
import { el, FEW_RANKS, numberText, rankClass, setAttribute, setText, steadyText, valueText } from "./format.js";

const REDRAW_PAUSE_MS = 250;
const MIN_WIDTH = 250; // of a card with a chart, in pixels
const GAP = 8;

/** @typedef {import("./series.js").Metric} Metric */
/** @typedef {import("./series.js").MetricGroup} MetricGroup */
/** @typedef {{latest: any, best: any, box: any}} Values of one metric */
/** @typedef {{group: MetricGroup, box: any, values: Map<string, Values>, rows: any, detail: any, legend: any, named: string, host: any,
 *   chart: MetricChart | null, version: string, pointed: number | null}} MetricCard */

export class MetricsView {
  /** @param {import("./state.js").PanelState} panel */
  constructor(panel) {
    this.panel = panel;
    this.charts = el("div", { class: "nbl-charts", role: "list", "aria-label": "Metrics" });
    this.values = el("div", { class: "nbl-single", role: "list", "aria-label": "Metrics without a chart" });
    this.node = el("div", { class: "nbl-metrics", hidden: true }, this.charts, this.values);
    /** @type {Map<string, MetricCard>} */ this.cards = new Map();
    this.order = "";
    this.due = 0;
    /** @type {any} */ this.timer = null;
    this.observer = new ResizeObserver(() => this.#share());
    this.observer.observe(this.charts);
  }

  /** Draw at most four times a second while the launch runs. */
  update() {
    const wait = this.panel.active ? this.due - performance.now() : 0;
    if (wait <= 0) {
      clearTimeout(this.timer);
      this.timer = null;
      return this.#draw();
    }
    if (this.timer !== null) return;
    this.timer = setTimeout(() => {
      this.timer = null;
      this.panel.changed();
    }, wait);
  }

  dispose() {
    clearTimeout(this.timer);
    this.observer.disconnect();
    for (const card of this.cards.values()) card.chart?.destroy();
  }

  #draw() {
    this.due = performance.now() + REDRAW_PAUSE_MS;
    const groups = this.panel.metrics.groups();
    this.node.hidden = !groups.length;
    const cards = groups.map((group) => this.#card(group));
    const order = groups.map((group) => `${group.hasChart} ${group.name}`).join("\n");
    if (order !== this.order) {
      this.order = order;
      this.#dropOthers(new Set(groups.map((group) => group.name)));
      for (const [node, charted] of [
        [this.charts, true],
        [this.values, false],
      ]) {
        const boxes = cards.filter((card) => card.group.hasChart === charted).map((card) => card.box);
        node.replaceChildren(...boxes);
        node.hidden = !boxes.length;
      }
      this.#share();
    }
    for (const card of cards) this.#drawCard(card);
  }

  /** Divide the width among the cards with charts, so that they fill every row. */
  #share() {
    const boxes = [...this.charts.children];
    const sizes = rowSizes(boxes.length, this.charts.clientWidth);
    boxes.forEach((box, i) => (box.style.flexBasis = `calc((100% - ${GAP * (sizes[i] - 1)}px) / ${sizes[i]} - 0.1px)`));
  }

  /** @param {Set<string>} names */
  #dropOthers(names) {
    for (const [name, card] of this.cards) {
      if (names.has(name)) continue;
      card.chart?.destroy();
      this.cards.delete(name);
    }
  }

  /** @param {MetricGroup} group @returns {MetricCard} */
  #card(group) {
    let card = this.cards.get(group.name);
    if (!card) {
      const [detail, rows] = [el("span", { class: "nbl-point", "aria-live": "off" }), el("div")];
      const legend = el("div", { class: "nbl-legend", "aria-hidden": "true" });
      const host = el("div", {
        class: "nbl-chart",
        role: "img",
        tabindex: 0,
        title: "",
        "data-lm-suppress-shortcuts": "true",
        on_focus: () => setAttribute(detail, "aria-live", "polite"), // the arrow keys move along the steps
        on_blur: () => setAttribute(detail, "aria-live", "off"),
        hidden: true,
      });
      const box = el(
        "div",
        { class: "nbl-card", role: "listitem" },
        el(
          "div",
          { class: "nbl-metric-top" },
          el("span", { class: "nbl-metric-name", title: group.name }, group.name),
          detail,
        ),
        rows,
        legend,
        host,
      );
      card = {
        group,
        box,
        values: new Map(),
        rows,
        detail,
        legend,
        named: "",
        host,
        chart: null,
        version: "",
        pointed: null,
      };
      this.cards.set(group.name, card);
    }
    card.group = group;
    return card;
  }

  /** @param {MetricCard} card */
  #drawCard(card) {
    const { group } = card;
    if (card.version === group.version) return;
    card.version = group.version;
    for (const [name, { box }] of card.values) {
      if (group.metrics.some((metric) => metric.name === name)) continue;
      box.remove();
      card.values.delete(name);
    }
    const said = group.metrics.map((metric) => this.#drawValues(card, metric));
    card.host.hidden = card.detail.hidden = card.legend.hidden = !group.hasChart;
    if (!group.hasChart) return;
    setAttribute(card.host, "aria-label", `Chart of ${said.join("; ")}. Use the arrow keys to read its steps`);
    card.chart ??= new MetricChart(card.host, (i) => this.#describe(card, (card.pointed = i)));
    card.chart.update(group.table(), group.kind, group.first.direction < 0);
    this.#drawLegend(card);
    this.#describe(card, card.pointed);
  }

  /** Show which line is which rank's. @param {MetricCard} card */
  #drawLegend(card) {
    const { ranks } = card.group.table();
    if (card.named === ranks.join()) return;
    card.named = ranks.join();
    const keys = ranks.map((rank) => key(`nbl-ink ${rankClass(rank)}`, `rank ${rank}`));
    const shown = ranks.length > FEW_RANKS ? [el("span", {}, `${ranks.length} ranks`)] : keys;
    card.legend.replaceChildren(...(ranks.length > 1 ? [key("nbl-ink-mean", "mean"), ...shown] : []));
  }

  /** Show the numbers of a metric, and return them as a text. @param {MetricCard} card @param {Metric} metric */
  #drawValues(card, metric) {
    const isFirst = metric === card.group.first;
    let values = card.values.get(metric.name);
    if (!values) {
      const [latest, best] = [el("span", { class: "nbl-latest" }), el("span", { class: "nbl-best" })];
      const box = el("div", { class: isFirst ? "nbl-values" : "nbl-values nbl-beside" });
      if (!isFirst) {
        const line = el("span", { class: `nbl-dashes nbl-ink-${metric.part}`, "aria-hidden": "true" });
        box.append(line, el("span", { class: "nbl-metric-name", title: metric.name }, metric.name));
      }
      box.append(latest, best);
      values = { latest, best, box };
      card.values.set(metric.name, values);
      card.rows.append(box);
    }
    metric.table(); // finds the best
    const { kind } = card.group;
    const latest = metric.diverged ? "NaN" : valueText(metric.latest, kind);
    const facts = [bestText(metric, kind), metric.differs ? `mean of ${metric.ranks.size} ranks` : ""].filter(Boolean);
    setText(values.latest, metric.diverged ? latest : steadyText(metric.latest, kind));
    const shown = isFirst && card.group.hasChart ? facts.slice(0, 1) : facts; // its legend names the mean
    setText(values.best, shown.join(" · ").replace(" at step ", " at "));
    setAttribute(values.best, "title", facts.join(" · ") || null);
    return [`${metric.name} ${latest}`, ...facts].join(", ");
  }

  /** Show the values under the cursor, else the latest step. @param {MetricCard} card @param {number | null} i */
  #describe(card, i) {
    const { group } = card;
    const { xs, columns, mean, ranks, beside } = group.table();
    const step = group.first.byIndex ? "report" : "step";
    if (i === null || xs[i] === undefined) {
      const { end } = group.first;
      const { xs: own } = group.first.table();
      return setText(card.detail, `${step} ${numberText(own[end < 0 ? own.length - 1 : end])}`);
    }
    const text = (/** @type {unknown} */ value) => valueText(value, group.kind);
    const values = columns.map((column) => column[i]).filter((value) => value !== null);
    const [low, high] = [Math.min(...values), Math.max(...values)];
    const spread = low < high ? ` (${text(low)} to ${text(high)})` : "";
    const value = ranks.length > 1 && mean[i] !== null ? mean[i] : values[0];
    const others = beside.flatMap(({ values: line }, k) =>
      line[i] === null ? [] : [`${group.metrics[k + 1].name} ${text(line[i])}`],
    );
    const own = value === undefined && others.length ? [] : [`${text(value ?? null)}${spread}`];
    setText(card.detail, `${step} ${numberText(xs[i])}: ${[...own, ...others].join(", ")}`);
  }
}

/** Return how many cards stand in each row, at most one more in a row than in the one before.
 * @param {number} count @param {number} width of a row in pixels @returns {number[]} the size of each card's row */
export function rowSizes(count, width) {
  const most = Math.max(1, Math.floor((width + GAP) / (MIN_WIDTH + GAP)));
  const rows = Math.ceil(count / most);
  const ends = Array.from({ length: rows + 1 }, (_, row) => Math.floor((count * row) / rows));
  return ends.slice(1).flatMap((end, row) => new Array(end - ends[row]).fill(end - ends[row]));
}

/** @param {string} ink @param {string} text */
function key(ink, text) {
  return el("span", { class: "nbl-key" }, el("i", { class: `nbl-dashes ${ink}` }), text);
}

/** @param {Metric} metric @param {string} kind */
function bestText({ marked, best }, kind) {
  if (marked) {
    const value = marked.y === null ? "" : ` ${valueText(marked.y, kind)}`;
    return `best${value} at step ${numberText(marked.x)}`;
  }
  return best === null ? "" : `best ${valueText(best, kind)}`;
}
