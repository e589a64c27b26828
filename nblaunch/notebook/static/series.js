// Reported metrics: a bounded series for each name and rank, their mean, and the latest and best value.

const MAX_POINTS = 2000;
const FRONT = 64; // recent reports that are not thinned yet: slower ranks may still reach them

/** @typedef {import("./page_messages.js").ChartEntry} ChartEntry */
/** What a chart draws: its metrics at all their steps. The first metric has a column for each rank; the others are one line.
 * @typedef {object} Table
 * @property {number[]} xs
 * @property {number[]} ranks
 * @property {(number | null)[][]} columns
 * @property {(number | null)[]} mean
 * @property {{part: string, values: (number | null)[]}[]} beside
 * @property {{part: string, x: number, y: number}[]} marks the best points */

/** Return a finite number, or null. @param {unknown} given */
export function numberOf(given) {
  const value = typeof given === "string" && given.trim() ? Number(given) : given;
  return typeof value === "number" && Number.isFinite(value) ? value : null;
}

/** Points of one rank. */
class RankSeries {
  constructor() {
    /** @type {number[]} */ this.xs = [];
    /** @type {(number | null)[]} */ this.ys = [];
    /** @type {number[]} */ this.reports = []; // the kernel's number of each point: messages may leave points out
    this.count = 0;
    this.loose = false; // the next point replaces the last one
  }

  /** @param {number} x @param {number | null} y @param {number} report @param {boolean} stays */
  push(x, y, report, stays) {
    if (this.loose) for (const list of [this.xs, this.ys, this.reports]) list.pop();
    this.xs.push(x);
    this.ys.push(y);
    this.reports.push(report);
    this.count = report + 1;
    this.loose = !stays;
  }

  /** Keep these points and the last one. @param {(report: number) => boolean} stays */
  thin(stays) {
    const last = this.reports.length - 1;
    const kept = this.reports.map((report, i) => stays(report) || i === last);
    this.loose = last >= 0 && !stays(this.reports[last]);
    this.xs = this.xs.filter((_, i) => kept[i]);
    this.ys = this.ys.filter((_, i) => kept[i]);
    this.reports = this.reports.filter((_, i) => kept[i]);
  }
}

/** One metric over all ranks. */
export class Metric {
  /** @param {string} name @param {number} [direction] 1 if greater is better, -1 if smaller, 0 if unknown */
  constructor(name, direction = 0) {
    this.name = name;
    this.direction = direction;
    this.part = "training";
    /** @type {{x: number, y: number | null} | null} the best step, if one is marked */ this.marked = null;
    /** @type {Map<number, RankSeries>} */ this.ranks = new Map();
    this.byIndex = false; // steps went back: the numbers of the reports take their place
    this.block = 4; // two reports are kept of each block of this size ...
    this.thinned = 0; // ... among reports before this one
    /** @type {Set<number>} */ this.kept = new Set();
    /** @type {number | null} */ this.best = null;
    this.version = 0;
    this.drawn = -1;
    /** @type {{xs: number[], ranks: number[], columns: (number | null)[][], mean: (number | null)[]}} */
    this.cached = { xs: [], ranks: [], columns: [], mean: [] };
  }

  /** @param {number} rank @param {number} x @param {number | null} y @param {number} report */
  push(rank, x, y, report) {
    let series = this.ranks.get(rank);
    if (!series) this.ranks.set(rank, (series = new RankSeries()));
    series.push(x, numberOf(y), report, this.#stays(report));
    this.version++;
  }

  /** Thin ranks with more than MAX_POINTS points: keep the lowest and highest report of each block, and double the block
   * while that is too much. All ranks keep the same reports, so that their mean needs no interpolation. */
  thin() {
    const most = () => Math.max(0, ...[...this.ranks.values()].map((series) => series.xs.length));
    if (most() <= MAX_POINTS) return;
    this.#thinOnce();
    while (most() > 0.75 * MAX_POINTS) {
      this.block *= 2;
      this.#thinOnce();
    }
  }

  #thinOnce() {
    const all = [...this.ranks.values()];
    /** @type {Map<number, (number | null)[]>} */
    const values = new Map();
    for (const { reports, ys } of all) {
      reports.forEach((report, i) => {
        const known = values.get(report);
        if (known) known.push(ys[i]);
        else values.set(report, [ys[i]]);
      });
    }
    const step = Math.min(this.block, FRONT);
    this.thinned = step * Math.floor(Math.max(...all.map((series) => series.count)) / step);
    const means = [...values]
      .filter(([report]) => report < this.thinned)
      .map(([report, ys]) => ({ report, y: meanOf(ys) }));
    this.kept = keptReports(means, this.block);
    for (const series of all) series.thin((report) => this.#stays(report));
  }

  /** @param {number} report */
  #stays(report) {
    return report >= this.thinned || this.kept.has(report);
  }

  /** The last row of the table with a mean; -1 if there is none. */
  get end() {
    return this.table().mean.findLastIndex((y) => y !== null);
  }

  /** The latest mean. */
  get latest() {
    return this.end < 0 ? null : this.table().mean[this.end];
  }

  /** True if the last value of every rank was NaN or infinite. */
  get diverged() {
    return [...this.ranks.values()].every((series) => series.ys[series.ys.length - 1] === null);
  }

  /** True if its points have several steps and several values. */
  get varies() {
    const { xs, columns } = this.table();
    const first = columns.map((column) => column.find((y) => y !== null)).find((y) => y !== undefined);
    return xs.length > 1 && columns.some((column) => column.some((y) => y !== null && y !== first));
  }

  /** True if the ranks differ where the latest mean is. */
  get differs() {
    const { columns } = this.table();
    return new Set(columns.map((column) => column[this.end] ?? null).filter((y) => y !== null)).size > 1;
  }

  /** Return all points by x: a column for each rank, and their mean up to the slowest rank. Ignore ranks that stopped
   * long before. */
  table() {
    if (this.drawn === this.version) return this.cached;
    this.thin();
    this.drawn = this.version;
    const ranks = [...this.ranks.keys()].sort((x, y) => x - y);
    const all = ranks.map((rank) => /** @type {RankSeries} */ (this.ranks.get(rank)));
    const xsOf = (/** @type {RankSeries} */ series) => (this.byIndex ? series.reports : series.xs);
    const xs = [...new Set(all.flatMap(xsOf))].sort((x, y) => x - y);
    const row = new Map(xs.map((x, i) => [x, i]));
    const columns = all.map((series) => {
      /** @type {(number | null)[]} */
      const column = new Array(xs.length).fill(null);
      xsOf(series).forEach((x, i) => (column[/** @type {number} */ (row.get(x))] = series.ys[i]));
      return column;
    });
    const filled = columns.map((column) => bridged(xs, column));
    const most = Math.max(...all.map((series) => series.count));
    const ends = filled.map((column, i) =>
      2 * all[i].count < most ? Infinity : column.findLastIndex((y) => y !== null),
    );
    const end = Math.min(...ends.filter((last) => last >= 0));
    const mean = xs.map((_, i) => (i > end ? null : meanOf(filled.map((column) => column[i]))));
    this.cached = { xs, ranks, columns, mean };
    this.#noteBest(mean);
    return this.cached;
  }

  /** @param {(number | null)[]} mean */
  #noteBest(mean) {
    if (!this.direction) return;
    for (const y of mean) {
      if (y !== null && (this.best === null || (y - this.best) * this.direction > 0)) this.best = y;
    }
  }
}

/** Interpolate missing values of a column linearly.
 * @param {number[]} xs @param {(number | null)[]} column */
function bridged(xs, column) {
  const filled = column.slice();
  let before = -1;
  column.forEach((y, i) => {
    if (y === null) return;
    for (let j = before + 1; before >= 0 && j < i; j++) {
      const from = /** @type {number} */ (column[before]);
      filled[j] = from + ((y - from) * (xs[j] - xs[before])) / (xs[i] - xs[before]);
    }
    before = i;
  });
  return filled;
}

/** Return the reports with the lowest and the highest mean of each block, and report 0. A block without numbers keeps
 * its first report. @param {{report: number, y: number | null}[]} means @param {number} size */
function keptReports(means, size) {
  /** @type {Map<number, {low: {report: number, y: number | null}, high: {report: number, y: number | null}}>} */
  const blocks = new Map();
  for (const mean of means) {
    const number = Math.floor(mean.report / size);
    const block = blocks.get(number);
    if (!block || block.low.y === null) {
      if (!block || mean.y !== null) blocks.set(number, { low: mean, high: mean });
    } else if (mean.y !== null) {
      if (mean.y < block.low.y) block.low = mean;
      if (mean.y > /** @type {number} */ (block.high.y)) block.high = mean;
    }
  }
  return new Set([0, ...[...blocks.values()].flatMap(({ low, high }) => [low.report, high.report])]);
}

/** @param {(number | null)[]} values */
function meanOf(values) {
  let [sum, count] = [0, 0];
  for (const value of values) {
    if (value === null) continue;
    sum += value;
    count++;
  }
  return count ? sum / count : null;
}

/** The metrics of one chart: training first, and what stands beside it. */
export class MetricGroup {
  /** @param {Metric[]} metrics @param {ChartEntry[2]} kind how to write their values */
  constructor(metrics, kind) {
    this.metrics = metrics;
    this.kind = kind;
    this.first = metrics[0];
    this.name = this.first.name;
  }

  /** Changes with what is drawn. */
  get version() {
    return this.metrics.map(({ name, version }) => `${name} ${version}`).join();
  }

  /** True if there is a line to draw: a constant is only a number. */
  get hasChart() {
    return this.metrics.some((metric) => metric.varies);
  }

  /** @returns {Table} */
  table() {
    const { xs, ranks, columns, mean } = this.first.table();
    const others = this.metrics.slice(1);
    const tables = others.map((metric) => metric.table());
    const all = tables.length
      ? [...new Set([xs, ...tables.map((table) => table.xs)].flat())].sort((x, y) => x - y)
      : xs;
    const row = new Map(all.map((x, i) => [x, i]));
    const placed = (/** @type {number[]} */ own, /** @type {(number | null)[]} */ values) => {
      /** @type {(number | null)[]} */
      const column = new Array(all.length).fill(null);
      own.forEach((x, i) => (column[/** @type {number} */ (row.get(x))] = values[i]));
      return column;
    };
    return {
      xs: all,
      ranks,
      columns: columns.map((column) => placed(xs, column)),
      mean: placed(xs, mean),
      beside: others.map(({ part }, i) => ({ part, values: placed(tables[i].xs, tables[i].mean) })),
      marks: this.metrics.flatMap(({ marked, part, byIndex }) =>
        marked && marked.y !== null && !byIndex ? [{ part, x: marked.x, y: marked.y }] : [],
      ),
    };
  }
}

/** Every metric of a launch. */
export class MetricBook {
  constructor() {
    /** @type {Map<string, Metric>} */ this.metrics = new Map();
    /** @type {ChartEntry[]} */ this.charts = [];
  }

  /** Set what is drawn in which chart. @param {ChartEntry[]} charts */
  arrange(charts) {
    this.charts = charts;
    for (const [lines, direction] of charts) {
      for (const [name, part, byIndex] of lines) {
        const metric = this.#metric(name);
        if (metric.byIndex !== byIndex) metric.version++;
        Object.assign(metric, { part, byIndex, direction: direction ? (direction === "up" ? 1 : -1) : 0 });
      }
    }
  }

  /** Mark the best steps. @param {import("./page_messages.js").BestEntry[]} entries */
  mark(entries) {
    for (const [name, x, y] of entries) {
      const metric = this.#metric(name);
      metric.marked = { x, y };
      metric.version++;
    }
  }

  /** @param {import("./page_messages.js").PointEntry[]} points */
  add(points) {
    const touched = new Set();
    for (const [name, rank, x, y, report] of points) {
      const metric = this.#metric(String(name));
      metric.push(rank, x, y, report);
      touched.add(metric);
    }
    for (const metric of touched) metric.thin();
  }

  /** @param {string} name */
  #metric(name) {
    let metric = this.metrics.get(name);
    if (!metric) this.metrics.set(name, (metric = new Metric(name)));
    return metric;
  }

  /** Return the metrics with points, in charts. @returns {MetricGroup[]} */
  groups() {
    return this.charts.flatMap(([lines, , kind]) => {
      const metrics = lines.map(([name]) => this.#metric(name)).filter((metric) => metric.ranks.size);
      return metrics.length ? [new MetricGroup(metrics, kind)] : [];
    });
  }
}
