// The live panel of one launch, an anywidget. All views of a model share one state.
import { FailureView, StacksView } from "./failure.js";
import { HeaderView } from "./header.js";
import { el } from "./format.js";
import { LogView } from "./log_view.js";
import { MetricsView } from "./metrics.js";
import { OutputsView } from "./outputs.js";
import { ProfileView } from "./profile.js";
import { RanksView } from "./ranks.js";
import { RecordKeeper } from "./record.js";
import { PanelState } from "./state.js";
import { StuckView } from "./stuck.js";

/** Panels by launch, of each notebook: a page may show a launch in two, and one that is opened again makes new models.
 * @type {WeakMap<object, Map<string, PanelState>>} */
const notebooks = new WeakMap();

/** @param {any} model */
function panelOf(model) {
  let panels = notebooks.get(model.widget_manager);
  if (!panels) notebooks.set(model.widget_manager, (panels = new Map()));
  const id = String(model.get("info")?.launch ?? "");
  let panel = panels.get(id);
  if (!panel) {
    panels.set(id, (panel = new PanelState(model)));
    panel.open();
  }
  return panel;
}

/** @param {{model: any, early?: any[][]}} context with the messages that came before this script */
function initialize({ model, early = [] }) {
  const panel = panelOf(model);
  for (const [content, buffers] of early) panel.receive(content, buffers);
  const keeper = new RecordKeeper(panel, (host) => draw(panel, host));
  const update = () => keeper.update();
  panel.views.add(update);
  update();
  return () => {
    panel.views.delete(update);
    keeper.stop();
    panel.dispose();
    notebooks.get(model.widget_manager)?.delete(panel.info.launch);
  };
}

/** Draw a panel for the widget of an output, unless the notebook can do without it.
 * @param {{model: any, el: HTMLElement}} context */
function render({ model, el: host }) {
  const panel = panelOf(model);
  return panel.keeper?.takePlace() ? () => {} : draw(panel, host);
}

/** @param {PanelState} panel @param {HTMLElement} host */
function draw(panel, host) {
  const logs = new LogView(panel);
  const showLog = (/** @type {number} */ rank) => logs.show(rank);
  const [header, metrics] = [new HeaderView(panel), new MetricsView(panel)];
  const parts = [
    header,
    new StuckView(panel),
    new FailureView(panel, showLog),
    new RanksView(panel, showLog),
    new StacksView(panel),
    new ProfileView(panel),
    new OutputsView(panel),
    metrics,
    logs,
  ];
  const root = el(
    "div",
    { class: "nbl-root", role: "region", "aria-label": `Launch ${panel.info.name}` },
    ...parts.map((part) => part.node),
  );
  host.append(root);

  let frame = 0;
  const attempt = (/** @type {() => void} */ act) => {
    try {
      act();
    } catch (error) {
      panel.drawingFailed(error); // the other parts are still drawn
    }
  };
  const paint = () => {
    frame = 0;
    for (const part of parts) attempt(() => part.update());
  };
  const soon = () => (frame ||= requestAnimationFrame(paint));
  const ticks = setInterval(() => panel.active && attempt(() => header.tick()), 1000);
  panel.views.add(soon);
  paint();
  return () => {
    panel.views.delete(soon);
    cancelAnimationFrame(frame);
    clearInterval(ticks);
    logs.dispose();
    metrics.dispose();
    root.remove();
  };
}

export default { initialize, render };
