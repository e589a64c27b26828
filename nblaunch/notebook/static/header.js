// The header of a panel: name, state, elapsed time and buttons.
import { ACTIVE_STATES, exitText } from "./kernel.js";
import { clockText, durationText, el, setAttribute, setText } from "./format.js";

/** @type {Record<string, string>} */
const STATE_WORDS = {
  starting: "Starting",
  running: "Running",
  stopping: "Stopping",
  finished: "Finished",
  failed: "Failed",
  stopped: "Stopped",
  waiting: "Waiting for you",
  timeout: "Timed out",
  offline: "Not connected",
  silent: "No response",
};

/** @param {import("./state.js").PanelState} panel */
function shownState(panel) {
  const { name, message } = panel.state;
  if (panel.kernel.gone && ACTIVE_STATES.includes(name)) return "gone";
  if (panel.active && panel.kernel.isOffline) return "offline";
  if (panel.active && panel.kernel.silence) return "silent";
  if (name === "running" && panel.waiting.length) return "waiting";
  return name === "stopped" && message.startsWith("LaunchTimeoutError") ? "timeout" : name;
}

export class HeaderView {
  /** @param {import("./state.js").PanelState} panel */
  constructor(panel) {
    this.panel = panel;
    const { info, kernel } = panel;
    this.pill = el("span", { class: "nbl-pill" });
    this.live = el("span", { class: "nbl-live", role: "status", "aria-live": "polite" }, this.pill);
    this.time = el("span", { class: "nbl-time", role: "timer", "aria-label": "Elapsed time", "aria-live": "off" });
    this.where = el("span", { class: "nbl-where" }, [info.ranks, info.device].filter(Boolean).join(" · "));
    // Ignore the second click of a double click: it would kill ranks that save checkpoints.
    const stop = (/** @type {MouseEvent} */ event) => event.detail < 2 && kernel.stop();
    this.stop = el("button", { type: "button", class: "nbl-button nbl-stop", on_click: stop });
    this.stacks = el(
      "button",
      {
        type: "button",
        class: "nbl-button",
        title: "Show the Python stack of each rank without stopping it",
        on_click: () => kernel.stacks(),
      },
      "Stacks",
    );
    this.profile = el(
      "button",
      {
        type: "button",
        class: "nbl-button",
        title: "Record for 2 s where the time of each rank goes, without stopping it",
        on_click: () => kernel.profile(),
      },
      "Profile",
    );
    this.restart = el("button", {
      type: "button",
      class: "nbl-button nbl-restart",
      title: "End all ranks and lose all variables",
      on_click: () => kernel.restart(),
    });
    this.attempt = el("span", { class: "nbl-where" });
    this.notice = el("div", { class: "nbl-notice", role: "status", "aria-live": "polite" });
    this.spoken = el("span", { class: "nbl-offscreen", role: "status", "aria-live": "assertive" });
    this.node = el(
      "div",
      { class: "nbl-head" },
      el(
        "div",
        { class: "nbl-title" },
        el("span", { class: "nbl-name", title: info.name }, info.name || "launch"),
        this.live,
        this.time,
        this.where,
        this.attempt,
      ),
      el(
        "div",
        { class: "nbl-buttons", role: "group", "aria-label": "Launch" },
        this.stop,
        this.stacks,
        this.profile,
        this.restart,
      ),
      this.notice,
      this.spoken,
    );
  }

  update() {
    const { panel } = this;
    const { kernel, state } = panel;
    setText(this.attempt, state.attempt > 0 ? `attempt ${state.attempt + 1}` : "");
    for (const button of [this.stop, this.stacks, this.restart]) button.hidden = !panel.active;
    this.profile.hidden = !panel.active || state.name !== "running";
    this.profile.disabled = kernel.isProfiling;
    const kills = kernel.asked || state.name === "stopping";
    const isSession = panel.info.is_session;
    setText(this.stop, kills ? (isSession ? "Kill ranks, lose variables" : "Kill now") : "Stop");
    const killing = isSession
      ? "Kill the ranks that still run this cell; the session loses their variables"
      : "Do not wait for checkpoints: kill all ranks";
    const stopping = isSession
      ? "Interrupt the cell; the ranks keep their variables"
      : "Ask all ranks to stop; they may save a checkpoint";
    setAttribute(this.stop, "title", kills ? killing : stopping);
    setText(this.restart, kernel.armed ? "Click again to restart" : "Restart kernel");
    this.restart.classList.toggle("nbl-armed", kernel.armed);
    setText(
      this.spoken,
      kernel.armed ? "A restart ends all ranks and loses all variables. Click again to restart." : "",
    );
    this.tick();
  }

  #noticeText() {
    const { notice, state, info, failure, kernel } = this.panel;
    const silence = kernel.silence ? `No message from the kernel for ${kernel.silence} s. ` : "";
    if (silence || notice) return silence + notice;
    if (state.name === "stopping") return state.countdown || "Stopping …";
    if (state.name === "starting" && !info.is_session && !kernel.asked)
      return "Starting the ranks: they import torch and join the process group …";
    if (ACTIVE_STATES.includes(state.name) && kernel.asked)
      return kernel.again || kernel.asked === "kill" ? "Kill requested …" : "Stop requested …";
    return failure ? "" : state.message;
  }

  /** Update what changes with the time; called once a second. */
  tick() {
    const { state, elapsed, waiting } = this.panel;
    const name = shownState(this.panel);
    const who = name === "waiting" ? `: rank${waiting.length > 1 ? "s" : ""} ${waiting.join(", ")}` : "";
    setText(this.pill, (STATE_WORDS[name] ?? exitText(this.panel.kernel.gone, this.panel.info.run)) + who);
    for (const node of [this.pill, this.notice]) setAttribute(node, "data-state", name);
    setText(this.notice, this.#noticeText());
    setText(this.time, state.seconds === null ? clockText(elapsed) : durationText(state.seconds));
  }
}
