// The debug console: what debuggers have printed, the line that the user types, and buttons for the ranks.
import { hideCellBoxes } from "./cell_box.js";
import { el, setAttribute, setText } from "./format.js";
import { textElement } from "./log_rows.js";

const IDLE_MS = 300; // a rank that steps asks again sooner: its line looks as before until then
const FOCUS_MS = 5000; // for a rank to ask after a click or a line that was meant for it
const BOX_MS = 500; // for the cell to open its own box, which takes the focus
const MAX_RANK_BUTTONS = 8;
const MAX_CANDIDATES = 60;
const OVER = ["returned", "failed", "ended"]; // states of ranks that show nothing

export class DebugView {
  /** @param {import("./state.js").PanelState} panel */
  constructor(panel) {
    this.panel = panel;
    this.epoch = -1;
    this.drawn = 0; // finished lines on the page
    this.at = panel.reading.typed.length; // the place in the history
    this.draft = ""; // what was in the line before the user looked at the history
    this.number = -1; // the prompt that the line is for; 0: the rank runs
    this.sent = 0; // the prompt that was answered here last
    this.asked = 0; // the last request for completions
    this.follows = true; // the end of the text stays in sight
    this.showBoxes = () => {}; // those that were hidden for the line that was sent last
    this.showIdleBoxes = () => {}; // those that were hidden because no line was waited for
    /** @type {any} */ this.idle = null;
    /** @type {any} */ this.newer = null;
    this.focusUntil = -Infinity;
    this.text = el("div", { class: "nbl-debug-text" });
    this.partial = el("div", { class: "nbl-debug-line" });
    this.screen = el(
      "div",
      {
        class: "nbl-debug-screen",
        tabindex: 0,
        role: "log",
        "aria-label": "Debugger",
        "data-lm-suppress-shortcuts": "true",
        on_scroll: () => this.#scrolled(),
      },
      this.text,
      this.partial,
    );
    this.prompt = el("label", { class: "nbl-debug-prompt" });
    this.input = el("input", {
      class: "nbl-debug-input",
      "aria-label": "Line for the debugger",
      type: "text",
      spellcheck: "false",
      autocomplete: "off",
      autocapitalize: "off",
      "data-lm-suppress-shortcuts": "true",
      on_keydown: (/** @type {KeyboardEvent} */ event) => this.#key(event),
      on_input: () => this.#offer([]),
      on_blur: (/** @type {FocusEvent} */ event) => this.#blurred(event),
    });
    this.candidates = el("div", { class: "nbl-candidates", role: "status", "aria-live": "polite", hidden: true });
    this.entry = el("div", { class: "nbl-debug-entry" }, this.prompt, this.input);
    this.ranks = el("div", { class: "nbl-buttons", role: "group", "aria-label": "Turn to a rank" });
    /** @type {Map<number, any>} */ this.buttons = new Map();
    this.node = el(
      "section",
      { class: "nbl-debug", "aria-label": "Debugger", hidden: true },
      el("div", { class: "nbl-bar" }, el("strong", {}, "Debugger"), this.ranks),
      this.screen,
      this.entry,
      this.candidates,
    );
  }

  update() {
    const { debug, active } = this.panel;
    this.node.hidden = !debug.isShown;
    if (!debug.isShown) return;
    this.#drawText();
    this.entry.hidden = this.ranks.hidden = !active;
    if (!active) return this.#end();
    this.#drawButtons();
    this.#drawPrompt();
    const { completions } = debug;
    if (completions && completions.request === this.asked) {
      this.asked = 0;
      this.#complete(completions.names);
    }
  }

  /** Look at a rank, and let the user type once it asks for a line. @param {number} rank */
  turnTo(rank) {
    this.focusUntil = Date.now() + FOCUS_MS;
    this.panel.kernel.look(rank);
  }

  dispose() {
    clearTimeout(this.idle);
    clearTimeout(this.newer);
  }

  #end() {
    const { reading } = this.panel;
    this.#offer([]);
    if (reading.hasBox) hideCellBoxes(this.node, ".jp-OutputArea");
    reading.hasBox = false;
  }

  #drawText() {
    const { epoch, lines, assembler } = this.panel.debug;
    if (epoch !== this.epoch) {
      [this.epoch, this.drawn] = [epoch, 0];
      this.text.replaceChildren();
    }
    const row = (/** @type {string} */ line) => el("div", { class: "nbl-debug-line" }, textElement(line, ""));
    this.text.append(...lines.slice(this.drawn).map(row));
    this.drawn = lines.length;
    const rest = assembler.partials.join("\n");
    if (rest !== this.partial.textContent) this.partial.replaceChildren(textElement(rest, ""));
    this.partial.hidden = !rest;
    if (this.follows) this.screen.scrollTop = this.screen.scrollHeight;
  }

  #scrolled() {
    const { scrollTop, clientHeight, scrollHeight } = this.screen;
    if (clientHeight) this.follows = scrollTop + clientHeight >= scrollHeight - 20;
  }

  #drawButtons() {
    const { debug, info } = this.panel;
    const all = info.world_size <= MAX_RANK_BUTTONS;
    const ranks = all ? Array.from({ length: info.world_size }, (_, rank) => rank) : debug.ranks;
    if (ranks.join() !== [...this.buttons.keys()].join()) {
      this.buttons = new Map(ranks.map((rank) => [rank, this.#button(rank)]));
      this.ranks.replaceChildren(...this.buttons.values());
    }
    for (const [rank, button] of this.buttons) {
      const waits = debug.ranks.includes(rank);
      button.disabled = !waits && OVER.includes(this.panel.ranks.get(rank) ?? "");
      setAttribute(button, "aria-pressed", String(debug.prompt?.rank === rank));
      setAttribute(
        button,
        "title",
        waits ? `Rank ${rank} waits for you: type its commands` : `Show where rank ${rank} is; it runs on`,
      );
    }
  }

  /** @param {number} rank */
  #button(rank) {
    return el(
      "button",
      { type: "button", class: "nbl-button nbl-small", on_click: () => this.turnTo(rank) },
      `rank ${rank}`,
    );
  }

  #drawPrompt() {
    const { input, panel } = this;
    const { prompt: latest } = panel.debug;
    const prompt = latest?.number === panel.kernel.answered ? null : latest;
    if (this.number === (prompt?.number ?? 0)) return;
    const isFirst = this.number < 0;
    this.number = prompt?.number ?? 0;
    clearTimeout(this.idle);
    input.readOnly = !prompt; // not disabled: it keeps the focus
    if (!prompt) {
      const rest = () => {
        this.#show("", "the rank runs");
        this.showIdleBoxes = hideCellBoxes(this.node, ".jp-OutputArea");
      };
      if (isFirst) rest();
      else this.idle = setTimeout(rest, IDLE_MS);
      return;
    }
    this.showIdleBoxes(); // the newest may have come before this prompt
    this.showIdleBoxes = () => {};
    this.#hideOlderBoxes();
    clearTimeout(this.newer);
    this.newer = setTimeout(() => this.#hideOlderBoxes(), BOX_MS);
    if (prompt.number === this.sent) this.showBoxes(); // the kernel has not taken the line
    panel.reading.hasBox = panel.info.blocking;
    const type = prompt.is_secret ? "password" : "text";
    if (input.getAttribute("type") !== type) input.value = "";
    setAttribute(input, "type", type);
    this.#show(prompt.text, "type here");
    if (Date.now() > this.focusUntil) return;
    this.focusUntil = Date.now() + BOX_MS;
    input.focus();
  }

  #hideOlderBoxes() {
    hideCellBoxes(this.node, ".jp-OutputArea", true);
  }

  /** Take the focus back from a box that the cell has opened for the same line. @param {FocusEvent} event */
  #blurred({ relatedTarget }) {
    const isBox = relatedTarget instanceof Element && relatedTarget.closest(".jp-Stdin");
    if (isBox && Date.now() < this.focusUntil) setTimeout(() => this.input.focus());
  }

  /** @param {string} prompt @param {string} placeholder */
  #show(prompt, placeholder) {
    this.prompt.replaceChildren(textElement(prompt, ""));
    this.prompt.hidden = !prompt;
    setAttribute(this.input, "aria-label", prompt || "The rank runs");
    setAttribute(this.input, "placeholder", placeholder);
  }

  // ------------------------------------------------------------ keys
  /** @param {KeyboardEvent} event */
  #key(event) {
    event.stopPropagation(); // Shift+Enter would run the cell
    const { input } = this;
    const { key } = event;
    const isEnd = key === "d" && event.ctrlKey && !input.value;
    const completes = key === "Tab" && !event.shiftKey && input.value && input.getAttribute("type") !== "password";
    if (!(["Enter", "ArrowUp", "ArrowDown"].includes(key) || isEnd || completes)) return;
    event.preventDefault();
    if (key === "ArrowUp" || key === "ArrowDown") this.#recall(key === "ArrowUp" ? -1 : 1);
    else if (input.readOnly) return;
    else if (completes) this.asked = this.panel.kernel.complete(this.#word());
    else this.#send(isEnd ? null : input.value);
  }

  /** @param {string | null} line */
  #send(line) {
    const { typed } = this.panel.reading;
    if (line?.trim() && this.input.getAttribute("type") !== "password" && typed.at(-1) !== line) typed.push(line);
    this.at = typed.length;
    this.input.value = this.draft = "";
    this.#offer([]);
    this.sent = this.number;
    this.focusUntil = Date.now() + FOCUS_MS;
    this.showBoxes = hideCellBoxes(this.node, ".jp-Notebook");
    this.panel.kernel.type(this.number, line);
  }

  /** Walk the history. @param {number} step */
  #recall(step) {
    const { typed } = this.panel.reading;
    const { input } = this;
    const to = this.at + step;
    if (input.getAttribute("type") === "password" || to < 0 || to > typed.length) return;
    if (this.at === typed.length) this.draft = input.value;
    this.at = to;
    input.value = typed[to] ?? this.draft;
    this.#offer([]);
  }

  // ------------------------------------------------------------ completion
  /** Return the name before the cursor, as far as it is typed. */
  #word() {
    const { value, selectionStart } = this.input;
    return /[\w.]*$/.exec(value.slice(0, selectionStart ?? value.length))?.[0] ?? "";
  }

  /** @param {readonly string[]} names */
  #complete(names) {
    const word = this.#word();
    const found = names.filter((name) => name.startsWith(word));
    if (!found.length) return this.#offer([]);
    let common = found[0];
    for (const name of found) while (!name.startsWith(common)) common = common.slice(0, -1);
    this.#insert(common);
    this.#offer(found.length > 1 ? found : []);
  }

  /** Put a name in the place of what is typed of it. @param {string} name */
  #insert(name) {
    const { input } = this;
    const end = input.selectionStart ?? input.value.length;
    const start = end - this.#word().length;
    input.value = input.value.slice(0, start) + name + input.value.slice(end);
    input.setSelectionRange?.(start + name.length, start + name.length);
  }

  /** @param {readonly string[]} names */
  #offer(names) {
    this.candidates.hidden = !names.length;
    const buttons = names.slice(0, MAX_CANDIDATES).map((name) => {
      const choose = () => {
        this.#insert(name);
        this.#offer([]);
        this.input.focus();
      };
      const text = name.slice(name.lastIndexOf(".") + 1);
      return el("button", { type: "button", class: "nbl-candidate", on_click: choose }, text);
    });
    const more = names.length - buttons.length;
    this.candidates.replaceChildren(...buttons, ...(more > 0 ? [el("span", {}, `and ${more} more`)] : []));
    if (names.length) setAttribute(this.candidates, "aria-label", `${names.length} names`);
  }
}
