// Metrics over their steps on a canvas: a thin line for each rank, a thick one for their mean, dashed ones beside them.
import { el, numberText, rankClass, valueText } from "./format.js";

const MIN_HEIGHT = 140;
const LOG_RATIO = 50; // a loss over a wider range has a logarithmic scale, as in charts.py
/** The lines beside the first one, as in charts.py. @type {Record<string, number[]>} */
const DASHES = { training: [3, 4], epoch: [0.1, 5], valid: [6, 5], test: [9, 5, 0.1, 5] };
const PADDING = { top: 8, right: 10, bottom: 19 };
const LOG_HEIGHT = 8; // more at the top, for "log scale": no grid line may strike it through
const MAX_DOTS = 40; // on a dashed line
const RING_RADIUS = 4.5;
const FAINT = { 1: 1, 2: 0.75, 8: 0.5 }; // opacity of rank lines by number of ranks

/** @typedef {import("./series.js").Table} Table */
/** @typedef {{left: number, width: number, height: number, x: (value: number) => number, y: (value: number) => number}} Plot */

/** Return about `count` round numbers between two others. @param {number} low @param {number} high @param {number} count */
export function niceTicks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 5].find((factor) => factor * power >= rough) ?? 10);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9 && ticks.length < 50; i++)
    ticks.push(Number((i * step).toPrecision(12)));
  return ticks;
}

/** Return two to seven round numbers between two powers of 10. @param {number} low @param {number} high */
export function logTicks(low, high) {
  const every = Math.ceil((high - low) / 6);
  const ticks = [];
  for (let decade = Math.floor(low); decade <= high; decade += every)
    for (const factor of high - low < 2.2 ? [1, 2, 5] : [1]) ticks.push(Number(`${factor}e${decade}`));
  return ticks.filter((tick) => Math.log10(tick) >= low - 1e-9 && Math.log10(tick) <= high + 1e-9);
}

/** Return the lowest and the highest value. @param {(number | null)[][]} columns */
function extremes(columns) {
  let [low, high] = [Infinity, -Infinity];
  for (const column of columns) {
    for (const value of column) {
      if (value === null) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  return [low, high];
}

/** Return true if a loss needs a logarithmic scale. @param {(number | null)[][]} columns */
export function spansDecades(columns) {
  const [low, high] = extremes(columns);
  return low > 0 && high >= LOG_RATIO * low && high < Infinity;
}

/** Return the range of all values, with a margin. @param {(number | null)[][]} columns */
export function valueRange(columns) {
  const [low, high] = extremes(columns);
  if (low > high) return [0, 1];
  const air = high > low ? 0.06 * (high - low) : Math.abs(high) * 0.1 || 1;
  return [low - air, high + air];
}

export class MetricChart {
  /** @param {any} host @param {(i: number | null) => void} onPoint called with the row of the table under the pointer */
  constructor(host, onPoint) {
    this.host = host;
    this.onPoint = onPoint;
    /** @type {Table} */ this.table = { xs: [], ranks: [], columns: [], mean: [], beside: [], marks: [] };
    this.kind = "";
    this.mayBeLog = false;
    /** @type {number | null} */ this.pointed = null;
    /** @type {Plot | null} */ this.plot = null;
    this.canvas = el("canvas", { class: "nbl-canvas", "aria-hidden": "true" });
    this.cursor = el("div", { class: "nbl-cursor", hidden: true });
    /** @type {Map<string, string>} */ this.colours = new Map();
    this.theme = el("i", { class: "nbl-ink-axis nbl-theme", "aria-hidden": "true" }); // its colour is the theme's
    this.themeColour = "";
    const redraw = () => requestAnimationFrame(() => this.draw()); // while the theme changes, the host has no width
    for (const end of ["transitionend", "transitioncancel"]) this.theme.addEventListener(end, redraw);
    host.append(this.canvas, this.cursor, this.theme);
    host.addEventListener("pointermove", (/** @type {PointerEvent} */ event) => this.#point(event.clientX));
    host.addEventListener("pointerleave", () => this.#show(null));
    host.addEventListener("blur", () => this.#show(null));
    host.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => this.#key(event));
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(host);
  }

  /** @param {Table} table @param {string} kind how to write the values @param {boolean} mayBeLog as for losses */
  update(table, kind, mayBeLog) {
    Object.assign(this, { table, kind, mayBeLog });
    this.draw();
  }

  destroy() {
    this.observer.disconnect();
    this.host.replaceChildren();
  }

  draw() {
    const [width, height] = [this.host.clientWidth, Math.max(MIN_HEIGHT, this.host.clientHeight || 0)];
    const context = this.canvas.getContext("2d");
    if (!width || !context || this.table.xs.length < 2) return;
    const scale = globalThis.devicePixelRatio || 1;
    const [w, h] = [Math.round(width * scale), Math.round(height * scale)];
    if (this.canvas.width !== w || this.canvas.height !== h) Object.assign(this.canvas, { width: w, height: h });
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    const { color } = getComputedStyle(this.theme);
    if (color !== this.themeColour) this.colours.clear();
    this.themeColour = color;
    context.font = `10px ${getComputedStyle(this.host).fontFamily}`;
    this.#axes(context, width, height);
    this.#lines(context);
  }

  /** @param {CanvasRenderingContext2D} context @param {number} width @param {number} whole height */
  #axes(context, width, whole) {
    const { xs, columns, beside, marks } = this.table;
    const more = [...beside.map((line) => line.values), marks.map((mark) => mark.y), this.kind === "rate" ? [0] : []];
    const values = [...columns, ...more];
    const isLog = this.mayBeLog && spansDecades(values);
    const place = isLog ? Math.log10 : (/** @type {number} */ value) => value;
    const [low, high] = valueRange(isLog ? values.map((line) => line.map((y) => y && Math.log10(y))) : values);
    const [first, last] = [xs[0], xs[xs.length - 1]];
    const top = PADDING.top + (isLog ? LOG_HEIGHT : 0);
    const height = whole - top - PADDING.bottom;
    const [lowest, highest] = extremes(values);
    const flat = lowest === highest ? [lowest] : niceTicks(low, high, height / 22);
    const levels = isLog ? logTicks(low, high) : flat;
    const labels = levels.map((level) => this.#label(level, Math.max(...levels)));
    const left = Math.ceil(Math.max(22, ...labels.map((label) => context.measureText(label).width))) + 6;
    const plot = {
      left,
      width: width - left - PADDING.right,
      height,
      x: (/** @type {number} */ value) => left + ((value - first) / (last - first)) * (width - left - PADDING.right),
      y: (/** @type {number} */ value) => top + ((high - place(value)) / (high - low)) * height,
    };
    this.plot = plot;
    context.strokeStyle = this.#colour("nbl-ink-grid");
    context.fillStyle = this.#colour("nbl-ink-axis");
    context.lineWidth = 1;
    context.beginPath();
    context.textBaseline = "middle";
    context.textAlign = "right";
    levels.forEach((level, i) => {
      const y = Math.round(plot.y(level)) + 0.5;
      context.moveTo(left, y);
      context.lineTo(width - PADDING.right, y);
      context.fillText(labels[i], left - 6, y);
    });
    context.stroke();
    context.textBaseline = "alphabetic";
    if (isLog) context.fillText("log scale", width - PADDING.right, top - 6);
    for (const value of niceTicks(first, last, plot.width / 48).filter(Number.isInteger)) {
      const x = plot.x(value);
      context.textAlign = x > width - 24 ? "right" : "center";
      context.fillText(numberText(value), x > width - 24 ? width - 2 : x, whole - 5);
    }
  }

  /** Write the numbers of an axis alike. @param {number} level @param {number} highest */
  #label(level, highest) {
    return level ? valueText(level, this.kind === "lr" && highest >= 0.01 ? "" : this.kind) : "0";
  }

  /** @param {CanvasRenderingContext2D} context */
  #lines(context) {
    const { ranks, columns, mean, beside, marks, xs } = this.table;
    const several = ranks.length > 1;
    context.lineJoin = context.lineCap = "round";
    context.globalAlpha = ranks.length >= 8 ? FAINT[8] : several ? FAINT[2] : FAINT[1];
    ranks.forEach((rank, i) =>
      this.#line(context, columns[i], this.#colour(`nbl-ink ${rankClass(rank)}`), several ? 1 : 2),
    );
    context.globalAlpha = 1;
    if (several) this.#line(context, mean, this.#colour("nbl-ink-mean"), 2);
    for (const { part, values } of beside)
      this.#line(context, values, this.#colour(`nbl-ink-${part}`), 2, DASHES[part]);
    const plot = /** @type {Plot} */ (this.plot);
    context.lineWidth = 2;
    for (const { part, x, y } of marks) {
      if (x < xs[0] || x > xs[xs.length - 1]) continue;
      const first = several ? "nbl-ink-mean" : `nbl-ink ${rankClass(ranks[0])}`;
      context.strokeStyle = this.#colour(part === "training" ? first : `nbl-ink-${part}`);
      context.beginPath();
      context.arc(plot.x(x), plot.y(y), RING_RADIUS, 0, 2 * Math.PI);
      context.stroke();
    }
  }

  /** @param {CanvasRenderingContext2D} context @param {(number | null)[]} values @param {string} colour @param {number} width
   * @param {number[]} [dashes] */
  #line(context, values, colour, width, dashes = []) {
    const plot = /** @type {Plot} */ (this.plot);
    const { xs, ranks } = this.table;
    const many = ranks.length > 16 && !dashes.length;
    const every = many ? Math.ceil(values.length / plot.width) : 1; // with many lines, skip some points
    /** @type {[number, number][]} */
    const dots = [];
    let [end, length] = [/** @type {[number, number]} */ ([0, 0]), 0];
    context.setLineDash(dashes);
    context.strokeStyle = context.fillStyle = colour;
    context.lineWidth = width;
    context.beginPath();
    for (let i = 0; i < values.length; i++) {
      const value = values[i];
      if (value === null || (every > 1 && i % every && i !== values.length - 1)) continue;
      end = [plot.x(xs[i]), plot.y(value)];
      if (length++) context.lineTo(end[0], end[1]);
      else context.moveTo(end[0], end[1]);
      if (dashes.length && dots.length <= MAX_DOTS) dots.push(end);
    }
    context.stroke();
    context.setLineDash([]);
    if (!length) return;
    for (const [x, y] of dots.length > 0 && dots.length <= MAX_DOTS ? dots : [end]) {
      context.beginPath();
      context.arc(x, y, width, 0, 2 * Math.PI);
      context.fill();
    }
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    const last = this.table.xs.length - 1;
    const at = this.pointed ?? last;
    /** @type {Record<string, number | null>} */
    const moves = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last, Escape: null };
    if (!(event.key in moves) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation();
    const moved = moves[event.key];
    this.#show(moved === null ? null : Math.max(0, Math.min(last, moved)));
  }

  /** @param {number} clientX */
  #point(clientX) {
    const {
      plot,
      table: { xs },
    } = this;
    if (!plot) return;
    const share = (clientX - this.host.getBoundingClientRect().left - plot.left) / plot.width;
    const wanted = xs[0] + Math.max(0, Math.min(1, share)) * (xs[xs.length - 1] - xs[0]);
    let nearest = 0;
    for (let i = 1; i < xs.length; i++) if (Math.abs(xs[i] - wanted) < Math.abs(xs[nearest] - wanted)) nearest = i;
    this.#show(nearest);
  }

  /** Show the cursor at a row of the table; null hides it. @param {number | null} row */
  #show(row) {
    this.pointed = row;
    this.cursor.hidden = row === null || !this.plot;
    if (row !== null && this.plot) this.cursor.style.left = `${this.plot.x(this.table.xs[row])}px`;
    this.onPoint(row);
  }

  /** Return the computed colour of a class, for the canvas. @param {string} cls */
  #colour(cls) {
    let colour = this.colours.get(cls);
    if (!colour) {
      const probe = el("i", { class: cls });
      this.host.append(probe);
      colour = getComputedStyle(probe).color;
      probe.remove();
      this.colours.set(cls, colour);
    }
    return colour;
  }
}
