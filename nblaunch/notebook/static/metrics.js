// A card for each metric: its latest and best value, and its chart.
import { MetricChart } from "./chart.js";
import { el, numberText, setText } from "./format.js";

const REDRAW_PAUSE_MS = 250;

/** @typedef {{metric: import("./series.js").Metric, box: any, latest: any, best: any, detail: any, host: any,
 *   chart: MetricChart | null, version: number, pointed: number | null}} MetricCard */

export class MetricsView {
  /** @param {import("./state.js").PanelState} panel */
  constructor(panel) {
    this.panel = panel;
    this.charts = el("div", { class: "nbl-charts", role: "list", "aria-label": "Metrics" });
    this.values = el("div", { class: "nbl-single", role: "list", "aria-label": "Metrics with one value" });
    this.node = el("div", { class: "nbl-metrics", hidden: true }, this.charts, this.values);
    /** @type {Map<string, MetricCard>} */ this.cards = new Map();
    this.order = "";
    this.due = 0;
    /** @type {any} */ this.timer = null;
  }

  /** Draw at most four times a second. */
  update() {
    if (this.timer !== null) return;
    const wait = this.due - performance.now();
    if (wait <= 0) return this.#draw();
    this.timer = setTimeout(() => {
      this.timer = null;
      this.panel.changed();
    }, wait);
  }

  dispose() {
    clearTimeout(this.timer);
    for (const card of this.cards.values()) card.chart?.destroy();
  }

  #draw() {
    this.due = performance.now() + REDRAW_PAUSE_MS;
    const metrics = this.panel.metrics.sorted();
    this.node.hidden = !metrics.length;
    const cards = metrics.map((metric) => this.#card(metric));
    const order = metrics.map((metric) => `${hasChart(metric)} ${metric.name}`).join("\n");
    if (order !== this.order) {
      this.order = order;
      this.#dropOthers(new Set(metrics.map((metric) => metric.name)));
      for (const [node, charted] of [
        [this.charts, true],
        [this.values, false],
      ]) {
        const boxes = cards.filter((card) => hasChart(card.metric) === charted).map((card) => card.box);
        node.replaceChildren(...boxes);
        node.hidden = !boxes.length;
      }
    }
    for (const card of cards) this.#drawCard(card);
  }

  /** @param {Set<string>} names */
  #dropOthers(names) {
    for (const [name, card] of this.cards) {
      if (names.has(name)) continue;
      card.chart?.destroy();
      this.cards.delete(name);
    }
  }

  /** @param {import("./series.js").Metric} metric @returns {MetricCard} */
  #card(metric) {
    let card = this.cards.get(metric.name);
    if (!card) {
      const [latest, best, detail] = [
        el("span", { class: "nbl-latest" }),
        el("span", { class: "nbl-best" }),
        el("span", { class: "nbl-point" }),
      ];
      const host = el("div", {
        class: "nbl-chart",
        role: "img",
        "aria-label": `Chart of ${metric.name}`,
        hidden: true,
      });
      const box = el(
        "div",
        { class: "nbl-card", role: "listitem" },
        el(
          "div",
          { class: "nbl-metric-top" },
          el("span", { class: "nbl-metric-name", title: metric.name }, metric.name),
          detail,
        ),
        el("div", { class: "nbl-values" }, latest, best),
        host,
      );
      card = { metric, box, latest, best, detail, host, chart: null, version: -1, pointed: null };
      this.cards.set(metric.name, card);
    }
    if (card.metric !== metric) Object.assign(card, { metric, version: -1 });
    return card;
  }

  /** @param {MetricCard} card */
  #drawCard(card) {
    const { metric } = card;
    if (card.version === metric.version) return;
    const table = metric.table();
    setText(card.latest, metric.diverged ? "NaN" : numberText(metric.latest));
    setText(card.best, metric.best === null ? "" : `best ${numberText(metric.best)}`);
    card.host.hidden = card.detail.hidden = !hasChart(metric);
    if (!hasChart(metric)) {
      card.version = metric.version;
      return;
    }
    card.chart ??= new MetricChart(card.host, (i) => this.#describe(card, (card.pointed = i)));
    card.chart.update(table);
    card.version = metric.version;
    this.#describe(card, card.pointed);
  }

  /** Show the values under the pointer, else the latest step. @param {MetricCard} card @param {number | null} i */
  #describe(card, i) {
    const { xs, columns, mean, ranks } = card.metric.table();
    const step = card.metric.byIndex ? "report" : "step";
    if (i === null || xs[i] === undefined) {
      const { end } = card.metric;
      return setText(card.detail, `${step} ${numberText(xs[end < 0 ? xs.length - 1 : end])}`);
    }
    const values = columns.map((column) => column[i]).filter((value) => value !== null);
    const spread =
      ranks.length > 1 && values.length
        ? ` (${numberText(Math.min(...values))} to ${numberText(Math.max(...values))})`
        : "";
    const value = ranks.length > 1 && mean[i] !== null ? mean[i] : values[0];
    setText(card.detail, `${step} ${numberText(xs[i])}: ${numberText(value ?? null)}${spread}`);
  }
}

/** Return true if a metric has a line to draw. @param {import("./series.js").Metric} metric */
function hasChart(metric) {
  return metric.table().xs.length > 1;
}
