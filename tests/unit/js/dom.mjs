// As much of a page as the panel's views need, without layout: a test says how large things are.
class FakeNode {
  constructor(tag) {
    Object.assign(this, {
      tag,
      parent: null,
      childNodes: [],
      attributes: new Map(),
      listeners: {},
      style: {},
      dataset: {},
    });
    Object.assign(this, {
      clientWidth: 0,
      clientHeight: 0,
      offsetLeft: 0,
      offsetTop: 0,
      offsetWidth: 0,
      offsetHeight: 0,
      scrollHeight: 0,
      scrollTop: 0,
      scrollLeft: 0,
      value: "",
      title: "",
      tabIndex: 0,
    });
    const classes = () => new Set((this.getAttribute("class") ?? "").split(" ").filter(Boolean));
    this.classList = {
      contains: (name) => classes().has(name),
      add: (name) => this.setAttribute("class", [...classes().add(name)].join(" ")),
      remove: (name) => this.classList.toggle(name, false),
      toggle: (name, on) => {
        const all = classes();
        if (on) all.add(name);
        else all.delete(name);
        this.setAttribute("class", [...all].join(" "));
      },
    };
  }
  get children() {
    return this.childNodes.filter((node) => node.tag !== "#text");
  }
  get firstChild() {
    return this.childNodes[0] ?? null;
  }
  get nextSibling() {
    const all = this.parent?.childNodes ?? [];
    return all[all.indexOf(this) + 1] ?? null;
  }
  get textContent() {
    return this.tag === "#text" ? this.text : this.childNodes.map((node) => node.textContent).join("");
  }
  set textContent(text) {
    this.replaceChildren(...(text ? [text] : []));
  }
  get hidden() {
    return this.attributes.has("hidden");
  }
  set hidden(on) {
    if (on) this.setAttribute("hidden", "");
    else this.removeAttribute("hidden");
  }
  get open() {
    return this.attributes.has("open");
  }
  setAttribute(name, value) {
    this.attributes.set(name, String(value));
  }
  getAttribute(name) {
    return this.attributes.get(name) ?? null;
  }
  removeAttribute(name) {
    this.attributes.delete(name);
  }
  insertBefore(node, before) {
    node.remove();
    const at = before ? this.childNodes.indexOf(before) : this.childNodes.length;
    this.childNodes.splice(at, 0, node);
    node.parent = this;
  }
  append(...nodes) {
    for (const node of nodes) this.insertBefore(typeof node === "string" ? textNode(node) : node, null);
  }
  replaceChildren(...nodes) {
    for (const node of [...this.childNodes]) node.remove();
    this.append(...nodes);
  }
  remove() {
    if (this.parent) this.parent.childNodes = this.parent.childNodes.filter((node) => node !== this);
    this.parent = null;
  }
  addEventListener(name, listener) {
    (this.listeners[name] ??= []).push(listener);
  }
  fire(name, event = {}) {
    for (const listener of this.listeners[name] ?? [])
      listener({ detail: 1, preventDefault() {}, stopPropagation() {}, ...event });
  }
  focus() {}
  closest() {
    return null;
  }
  getContext() {
    return null;
  }
  /** All elements of this class. */
  all(name) {
    return this.children.flatMap((node) => [...(node.classList.contains(name) ? [node] : []), ...node.all(name)]);
  }
  one(name) {
    return this.all(name)[0];
  }
}

function textNode(text) {
  return Object.assign(new FakeNode("#text"), { text });
}

/** Put a page in place of the browser's. */
export function fakePage() {
  const observers = new Set();
  let frames = [];
  Object.assign(globalThis, {
    document: {
      createElement: (tag) => new FakeNode(tag),
      body: new FakeNode("body"),
      documentElement: new FakeNode("html"),
      getElementsByClassName: () => [],
    },
    ResizeObserver: class {
      constructor(act) {
        this.act = act;
      }
      observe() {
        observers.add(this.act);
      }
      disconnect() {
        observers.delete(this.act);
      }
    },
    MutationObserver: class {
      observe() {}
      disconnect() {}
    },
    requestAnimationFrame: (act) => frames.push(act),
    cancelAnimationFrame() {},
  });
  return {
    host: () => new FakeNode("div"),
    /** Sizes have changed. */
    resized: () => [...observers].forEach((act) => act()),
    /** Draw what is to be drawn; how many frames that took. */
    draw() {
      let count = 0;
      for (; frames.length && count < 20; count++) {
        const due = frames;
        frames = [];
        due.forEach((act) => act());
      }
      return count;
    },
  };
}
