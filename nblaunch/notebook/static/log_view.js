// The logs: tabs, find, follow, copy, and the path of the file. log_pane.js shows the lines.
import { stripAnsi } from "./ansi.js";
import { el, FEW_RANKS, rankClass, setAttribute, setText } from "./format.js";
import { LogPane } from "./log_pane.js";
import { lineLabel } from "./log_rows.js";

const FIND_DELAY_MS = 150;
const COPIED_MS = 1500;
let viewCount = 0;

/** @typedef {import("./store.js").Tab} Tab */

export class LogView {
  /** @param {import("./state.js").PanelState} panel */
  constructor(panel) {
    this.panel = panel;
    this.id = `nbl-${++viewCount}-${Math.random().toString(36).slice(2, 8)}`;
    this.pane = new LogPane(panel, () => this.#tools());
    /** @type {Map<Tab, any>} */ this.tabs = new Map();
    /** @type {any} */ this.timer = null;
    this.said = "";
    this.tablist = el("div", {
      class: "nbl-tabs",
      role: "tablist",
      "aria-label": "Logs",
      "data-lm-suppress-shortcuts": "true",
      on_keydown: (/** @type {KeyboardEvent} */ event) => this.#tabKey(event),
    });
    const button = (/** @type {string} */ text, /** @type {string} */ label, /** @type {() => void} */ act) =>
      el(
        "button",
        { type: "button", class: "nbl-button nbl-small", "aria-label": label, title: label, on_click: act },
        text,
      );
    this.input = el("input", {
      class: "nbl-find",
      type: "search",
      placeholder: "Find",
      "aria-label": "Find in the log",
      spellcheck: "false",
      autocomplete: "off",
      "data-lm-suppress-shortcuts": "true",
      on_input: () => this.#findSoon(),
      on_keydown: (/** @type {KeyboardEvent} */ event) => this.#findKey(event),
    });
    this.found = el("span", { class: "nbl-found", role: "status", "aria-live": "polite" });
    this.previous = button("↑", "Previous match", () => this.pane.step(-1));
    this.next = button("↓", "Next match", () => this.pane.step(1));
    this.follow = button("Follow", "Follow the end of the log", () => this.pane.setFollow(!this.pane.follow));
    this.follow.classList.add("nbl-follow");
    this.wrap = button("Wrap", "Wrap long lines", () => this.pane.setWrap(!this.pane.wrap));
    this.copy = button("Copy", "Copy this log", () => this.#copy());
    for (const steady of [this.follow, this.copy]) steady.classList.add("nbl-steady"); // constant width
    this.more = el("button", {
      type: "button",
      class: "nbl-more",
      hidden: true,
      on_click: () => this.pane.setFollow(true),
    });
    this.notes = el("div", { class: "nbl-notes", role: "log", "aria-label": "Notes from nblaunch", hidden: true });
    this.path = el("span", { class: "nbl-path" });
    this.file = el("span", { title: "stdout: rank*.out, stderr: rank*.err" }, "Logs: ", this.path, " ", this.#copier());
    this.count = el("span", { class: "nbl-lines" });
    this.body = el(
      "div",
      { class: "nbl-log-box", role: "tabpanel", id: `${this.id}-panel` },
      this.pane.node,
      this.more,
    );
    this.node = el(
      "section",
      { class: "nbl-logs", "aria-label": "Logs" },
      this.notes,
      el(
        "div",
        { class: "nbl-bar" },
        this.tablist,
        el(
          "div",
          { class: "nbl-tools" },
          el("span", { class: "nbl-search" }, this.input, this.found),
          this.previous,
          this.next,
          this.wrap,
          this.follow,
          this.copy,
        ),
      ),
      this.body,
      el("div", { class: "nbl-foot" }, this.file, this.count),
    );
    this.input.value = panel.reading.query;
    /** @type {number | undefined} */ this.failed = undefined;
    /** @type {Tab | null} */ this.wanted = null; // the tab to scroll to
    if (this.pane.tab !== "all") [this.failed, this.wanted] = [panel.failure?.rank, this.pane.tab];
    this.#makeTabs();
    this.body.setAttribute("aria-labelledby", this.tabs.get(this.pane.tab)?.id ?? "");
  }

  /** @param {Tab} tab @param {boolean} [focus] */
  show(tab, focus = false) {
    this.pane.show(tab);
    for (const [name, button] of this.tabs) {
      button.setAttribute("aria-selected", String(name === tab));
      button.tabIndex = name === tab ? 0 : -1;
    }
    const chosen = this.tabs.get(tab);
    if (focus) chosen?.focus({ preventScroll: true });
    this.wanted = tab;
    this.body.setAttribute("aria-labelledby", chosen?.id ?? "");
    this.update();
  }

  update() {
    if (this.tabs.size !== this.panel.ranks.size + 1) this.#makeTabs();
    this.pane.update();
    this.#showNotes();
    for (const [tab, button] of this.tabs) {
      if (tab === "all") continue;
      const failed = this.panel.failure?.rank === tab;
      if (button.classList.contains("nbl-culprit") === failed) continue;
      button.classList.toggle("nbl-culprit", failed);
      button.setAttribute("aria-label", failed ? `rank ${tab}, failed` : `rank ${tab}`);
    }
    const failed = this.panel.failure?.rank;
    if (failed !== undefined && failed !== this.failed) this.wanted = failed;
    this.failed = failed;
    this.#tools();
  }

  #copier() {
    const label = "Copy path";
    const copy = async () => {
      const done = await copyText(this.path.textContent ?? "", this.node);
      setText(button, done ? "Copied" : "Copy failed");
      setTimeout(() => setText(button, label), COPIED_MS);
    };
    const button = el("button", { type: "button", class: "nbl-link", on_click: copy }, label);
    return button;
  }

  #showNotes() {
    const { state, stuck } = this.panel;
    const inBanner = state.name === "running" ? stuck.lines : [];
    const notes = this.panel.notes.filter(([, text]) => !inBanner.includes(text));
    const said = notes.map(([time, text]) => `${time} ${text}`).join("\n");
    if (said === this.said) return;
    this.said = said;
    this.notes.hidden = !notes.length;
    this.notes.replaceChildren(
      ...notes.map(([time, text]) => el("div", { class: "nbl-note", title: `${time.toFixed(2)} s` }, String(text))),
    );
    this.notes.scrollTop = this.notes.scrollHeight;
  }

  /** Scroll only the strip of tabs to the wanted tab. */
  #reveal() {
    const { tablist } = this;
    if (this.wanted === null || !tablist.clientWidth) return; // not on the page yet
    const tab = this.tabs.get(this.wanted);
    this.wanted = null;
    if (!tab) return;
    const left = tab.offsetLeft - tablist.offsetLeft;
    if (left < tablist.scrollLeft || left + tab.offsetWidth > tablist.scrollLeft + tablist.clientWidth)
      tablist.scrollLeft = Math.max(0, left - 40);
  }

  dispose() {
    clearTimeout(this.timer);
    this.pane.dispose();
  }

  #makeTabs() {
    const ranks = [...this.panel.ranks.keys()].sort((x, y) => x - y);
    const tabs = ranks.length > 1 ? /** @type {Tab[]} */ (["all", ...ranks]) : /** @type {Tab[]} */ (["all"]);
    this.tablist.hidden = tabs.length < 2;
    this.tabs = new Map(tabs.map((tab) => [tab, this.#tab(tab, ranks.length > FEW_RANKS)]));
    if (ranks.length === 1) this.tabs.set(ranks[0], el("span"));
    this.tablist.replaceChildren(...this.tabs.values());
  }

  /** @param {Tab} tab @param {boolean} short */
  #tab(tab, short) {
    const chosen = tab === this.pane.tab;
    const text = tab === "all" ? "All ranks" : short ? String(tab) : `rank ${tab}`;
    return el(
      "button",
      {
        type: "button",
        class: `nbl-tab ${tab === "all" ? "" : rankClass(tab)}`,
        role: "tab",
        id: `${this.id}-${tab}`,
        "aria-controls": `${this.id}-panel`,
        "aria-selected": String(chosen),
        tabindex: chosen ? 0 : -1,
        "aria-label": tab === "all" ? "All ranks" : `rank ${tab}`,
        on_click: () => this.show(tab),
      },
      text,
    );
  }

  /** @param {KeyboardEvent} event */
  #tabKey(event) {
    const tabs = [...this.tabs.keys()];
    const at = tabs.indexOf(this.pane.tab);
    /** @type {Record<string, number>} */
    const moves = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tabs.length - 1 };
    if (!(event.key in moves)) return;
    event.preventDefault();
    event.stopPropagation();
    this.show(tabs[(moves[event.key] + tabs.length) % tabs.length], true);
  }

  #findSoon() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.pane.find(this.input.value), FIND_DELAY_MS);
  }

  /** @param {KeyboardEvent} event */
  #findKey(event) {
    event.stopPropagation(); // Shift+Enter would run the cell
    if (event.key === "Escape") this.input.value = "";
    if (event.key !== "Enter" && event.key !== "Escape") return;
    event.preventDefault();
    clearTimeout(this.timer);
    if (this.pane.query === this.input.value.toLowerCase()) this.pane.step(event.shiftKey ? -1 : 1);
    else this.pane.find(this.input.value);
  }

  #tools() {
    const { pane, panel } = this;
    this.#reveal();
    setText(this.found, pane.findText);
    this.previous.disabled = this.next.disabled = !pane.hits.length || !pane.query;
    setAttribute(this.wrap, "aria-pressed", String(pane.wrap));
    this.follow.hidden = !panel.active; // nothing more comes
    setText(this.follow, pane.follow ? "Pause" : "Follow");
    const label = pane.follow ? "Pause: stay here while new lines arrive" : "Follow the end of the log";
    for (const name of ["aria-label", "title"]) setAttribute(this.follow, name, label);
    const { unseen } = pane;
    this.more.hidden = unseen === 0;
    if (unseen) setText(this.more, `↓ ${unseen.toLocaleString("en-US")} new ${unseen === 1 ? "line" : "lines"}`);
    const { log_dir } = panel.state;
    this.file.hidden = !log_dir;
    setText(this.path, pane.tab === "all" ? log_dir : `${log_dir}/rank${pane.tab}.out`);
    const { lines, total } = pane.view;
    const rest = lines.length < total ? ", not all shown" : "";
    setText(this.count, total ? `${total.toLocaleString("en-US")} ${total === 1 ? "line" : "lines"}${rest}` : "");
  }

  async #copy() {
    const labels = this.pane.tab === "all" && this.panel.info.world_size > 1;
    const { lines, open } = this.pane.view;
    const text = [...lines, ...open]
      .map((line) => (labels ? `${lineLabel(line)} ` : "") + stripAnsi(line.text))
      .join("\n");
    const done = await copyText(text, this.node);
    setText(this.copy, done ? "Copied" : "Copy failed");
    setTimeout(() => setText(this.copy, "Copy"), COPIED_MS);
  }
}

/** @param {string} text @param {HTMLElement} near */
async function copyText(text, near) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // pages without a secure connection have no clipboard
    const area = el("textarea", { class: "nbl-offscreen", "aria-hidden": "true" });
    area.value = text;
    near.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}
