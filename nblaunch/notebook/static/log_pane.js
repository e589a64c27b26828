// A scrolling box of lines: only visible lines have elements. Follows the end until the reader scrolls up.
import { el, setText } from "./format.js";
import { rowElement } from "./log_rows.js";
import { findLines, placeOf } from "./store.js";

const LINE_HEIGHT = 18; // pixels, as in panel.css
const MARGIN = 10; // lines rendered beyond the visible ones
const CHARACTER_WIDTH = 7.25; // pixels, estimated: the heights of lines that were not drawn yet follow from it
const LINE_PADDING = 26;
const MAX_PAINTS = 4; // until the drawn lines have the heights that were assumed

/** @typedef {import("./store.js").Line} Line */
/** @typedef {import("./store.js").Tab} Tab */

export class LogPane {
  /** @param {import("./state.js").PanelState} panel @param {() => void} onChange called when following or the hits have changed */
  constructor(panel, onChange) {
    this.panel = panel;
    this.onChange = onChange;
    this.window = el("div", { class: "nbl-window" });
    this.spacer = el("div", { class: "nbl-spacer" }, this.window);
    this.empty = el("div", { class: "nbl-empty" });
    this.node = el(
      "div",
      {
        class: "nbl-log",
        role: "log",
        "aria-live": "off",
        "aria-label": "Log",
        tabindex: 0,
        "data-lm-suppress-shortcuts": "true",
      },
      this.spacer,
      this.empty,
    );
    this.node.addEventListener("scroll", () => this.#scrolled(), { passive: true });
    this.node.addEventListener(
      "wheel",
      (/** @type {WheelEvent} */ event) => event.deltaY < 0 && this.top > 0 && this.setFollow(false),
      { passive: true },
    );
    this.node.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => this.#key(event));
    this.sizes = new ResizeObserver(() => this.#resized());
    this.sizes.observe(this.node);
    this.height = this.width = this.total = this.widest = 0;
    /** @type {WeakMap<Line, number>} */ this.heights = new WeakMap(); // of lines that were drawn, in pixels
    /** @type {number[]} */ this.tops = [0]; // of each line, then the end of the last, in pixels
    this.version = -1;
    /** @type {Map<Line, HTMLElement>} */ this.rows = new Map();
    /** @type {number[]} */ this.hits = [];
    const { tab, follow, top, anchor, lastSeen, query, hit, height, wrap } = panel.reading;
    this.wrap = wrap;
    this.node.classList.toggle("nbl-wrap", wrap);
    /** @type {Tab} */ this.tab = tab;
    this.follow = follow;
    this.top = top;
    /** @type {{line: Line, offset: number} | null} */ this.anchor = anchor;
    /** @type {Line | undefined} */ this.lastSeen = lastSeen;
    this.query = query.toLowerCase();
    /** @type {Line | null} */ this.hit = hit;
    this.node.style.height = height;
    this.view = panel.logs.view(this.tab);
  }

  /** @param {Tab} tab */
  show(tab) {
    this.tab = tab;
    this.version = -1;
    this.widest = 0;
    this.heights = new WeakMap();
    this.hit = null;
    this.rows.clear();
    this.setFollow(true);
    this.update();
    this.#keep();
  }

  /** @param {boolean} follow */
  setFollow(follow) {
    if (this.follow === follow) return;
    this.follow = follow;
    this.lastSeen = follow ? undefined : this.view.lines[this.view.lines.length - 1];
    this.#remember();
    if (follow) {
      this.#toEnd();
      this.#paint();
    }
    this.#keep();
    this.onChange();
  }

  /** @param {boolean} wrap long lines */
  setWrap(wrap) {
    this.wrap = this.panel.reading.wrap = wrap;
    this.node.classList.toggle("nbl-wrap", wrap);
    this.#remember();
    this.#measureAgain();
    this.#paint();
    this.onChange();
  }

  /** Save the position for the next view. */
  #keep() {
    const { tab, follow, top, anchor, lastSeen, hit } = this;
    Object.assign(this.panel.reading, { tab, follow, top, anchor, lastSeen, hit });
  }

  /** The number of lines since the reader stopped following. */
  get unseen() {
    const { lines } = this.view;
    if (this.follow || !lines.length) return 0;
    return this.lastSeen ? Math.max(0, lines.length - 1 - placeOf(lines, this.lastSeen)) : lines.length;
  }

  /** Show changed lines. */
  update() {
    const { logs } = this.panel;
    if (this.version !== logs.version) {
      this.version = logs.version;
      this.view = logs.view(this.tab);
      this.total = this.view.lines.length + this.view.open.length;
      if (this.query) this.hits = findLines(this.view.lines, this.query);
      this.#layOut();
    }
    this.empty.hidden = this.total > 0;
    setText(this.empty, this.panel.active ? "Nothing printed yet" : "Nothing was printed");
    this.#paint();
  }

  /** @param {string} query */
  find(query) {
    this.panel.reading.query = query;
    this.query = query.toLowerCase();
    this.hits = findLines(this.view.lines, this.query);
    this.hit = null;
    this.rows.clear();
    if (this.hits.length) this.step(-1);
    else this.#paint();
    this.#keep();
    this.onChange();
  }

  /** Go to the next (1) or previous (-1) hit; initially to the last. @param {number} direction */
  step(direction) {
    if (!this.hits.length) return;
    const at = this.#hitPlace();
    const next = at < 0 ? this.hits.length - 1 : (at + direction + this.hits.length) % this.hits.length;
    this.hit = this.view.lines[this.hits[next]];
    this.setFollow(false);
    this.#scrollTo(this.tops[this.hits[next]] - this.height / 2);
    this.#remember();
    this.#keep();
    this.#paint();
    this.onChange();
  }

  get findText() {
    if (!this.query) return "";
    return this.hits.length ? `${this.#hitPlace() + 1}/${this.hits.length}` : "none";
  }

  dispose() {
    this.sizes.disconnect();
  }

  #hitPlace() {
    return this.hit ? this.hits.indexOf(placeOf(this.view.lines, this.hit)) : -1;
  }

  get #lowest() {
    return Math.max(0, this.tops[this.total] - this.height);
  }

  /** Place the lines, and keep what is read in its place. @param {number} first that may have moved */
  #layOut(first = 0) {
    const { lines, open } = this.view;
    const columns = this.wrap && this.width ? Math.max(10, (this.width - LINE_PADDING) / CHARACTER_WIDTH) : Infinity;
    this.tops.length = first + 1;
    for (let i = first, top = this.tops[first]; i < this.total; i++) {
      const line = i < lines.length ? lines[i] : open[i - lines.length];
      top += this.heights.get(line) ?? LINE_HEIGHT * Math.max(1, Math.ceil(line.text.length / columns));
      this.tops.push(top);
    }
    this.spacer.style.height = `${this.tops[this.total]}px`;
    if (this.follow) this.#toEnd();
    else if (this.anchor) this.#scrollTo(this.tops[placeOf(lines, this.anchor.line)] + this.anchor.offset);
  }

  /** Return the line at a height. @param {number} top */
  #at(top) {
    let [low, high] = [0, this.total];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.tops[middle + 1] <= top) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  #measureAgain() {
    this.heights = new WeakMap();
    this.rows.clear();
    this.#layOut();
  }

  #toEnd() {
    this.#scrollTo(this.#lowest);
  }

  /** @param {number} top */
  #scrollTo(top) {
    const to = Math.max(0, Math.min(top, this.#lowest));
    if (Math.abs(to - this.top) < 0.5 && !this.follow) return;
    this.top = to;
    this.node.scrollTop = to;
  }

  #scrolled() {
    const top = this.node.scrollTop;
    if (!this.height || !this.node.clientHeight || Math.abs(top - this.top) < 2) return; // not on the page
    const down = top > this.top;
    this.top = top;
    this.setFollow(down ? top >= this.#lowest - LINE_HEIGHT / 2 : this.follow && top >= this.#lowest - 2);
    this.#remember();
    this.#keep();
    this.#paint();
  }

  #resized() {
    const before = this.height;
    this.height = this.node.clientHeight;
    if (!this.height) return;
    if (this.width !== this.node.clientWidth) {
      this.width = this.node.clientWidth;
      if (this.wrap) this.#measureAgain();
    }
    if (this.node.style.height) this.panel.reading.height = this.node.style.height;
    if (this.follow) this.#toEnd();
    else if (!before) this.node.scrollTop = this.top = Math.min(this.top, this.#lowest); // the browser forgot it off the page
    this.#paint();
    if (!before) this.onChange();
  }

  /** Anchor the visible lines, so that changes above do not move them. */
  #remember() {
    const { lines } = this.view;
    const at = this.#at(this.top);
    this.anchor = this.follow || at >= lines.length ? null : { line: lines[at], offset: this.top - this.tops[at] };
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    if (["ArrowUp", "PageUp", "Home"].includes(event.key) && this.top > 0) this.setFollow(false);
    if (event.key === "End") this.setFollow(true);
  }

  #paint(paints = MAX_PAINTS) {
    if (!this.height) return;
    const { lines, open } = this.view;
    const first = Math.max(0, this.#at(this.top) - MARGIN);
    const last = Math.min(this.total, this.#at(this.top + this.height) + 1 + MARGIN);
    /** @type {Map<Line, HTMLElement>} */
    const rows = new Map();
    for (let i = first; i < last; i++) {
      const line = i < lines.length ? lines[i] : open[i - lines.length];
      rows.set(line, this.#row(line));
    }
    this.rows = rows;
    this.window.style.minWidth = this.wrap ? "" : `max(100%, ${this.widest + 2}ch)`; // it must not jump sideways
    this.window.style.transform = `translateY(${this.tops[first]}px)`;
    this.#place([...rows.values()]);
    if (this.#measure(first) && paints > 1) this.#paint(paints - 1);
  }

  /** Measure the drawn lines. Return true if others than the assumed heights have moved what is drawn.
   * @param {number} first */
  #measure(first) {
    let moved = false;
    let at = first;
    for (const [line, row] of this.rows) {
      const height = row.offsetHeight || LINE_HEIGHT;
      moved ||= height !== this.tops[at + 1] - this.tops[at];
      this.heights.set(line, height);
      at++;
    }
    if (moved) this.#layOut(first);
    return moved;
  }

  /** @param {Line} line */
  #row(line) {
    let row = this.rows.get(line);
    if (!row) {
      const labels = this.tab === "all" && this.panel.info.world_size > 1;
      row = rowElement(line, { labels, isOpen: this.view.open.includes(line), query: this.query });
      this.widest = Math.max(this.widest, row.textContent?.length ?? 0);
    }
    row.classList.toggle("nbl-hit", line === this.hit);
    return row;
  }

  /** Place the rows, touching only those that come or go: text selections survive.
   * @param {HTMLElement[]} rows */
  #place(rows) {
    const wanted = new Set(rows);
    for (const row of [...this.window.children]) if (!wanted.has(row)) row.remove();
    let at = this.window.firstChild;
    for (const row of rows) {
      if (row === at) at = at.nextSibling;
      else this.window.insertBefore(row, at);
    }
  }
}
