// A page that is not Jupyter's, with the panel's real scripts: what VS Code and Colab give to a widget, and what not.
window.open = async ({ loader, state, models, isVsCode }) => {
  const listeners = new Set();
  const failed = new Map(); // Colab's manager keeps a failure
  const refuse = () => Promise.reject(new Error("there is no such server"));
  const kernel = {
    serverSettings: { wsUrl: "BOGUS_PVSC" },
    clientId: "page",
    interrupt: refuse,
    restart: refuse,
    sendControlMessage: (message) => window.control(message.header.msg_type),
  };
  const manager = {
    get_model: (id) => {
      if (!failed.has(id) && models[id]) return Promise.resolve({ get: (name) => models[id][name] });
      failed.set(id, failed.get(id) ?? Promise.reject(new Error("not found")));
      return failed.get(id);
    },
    ...(isVsCode && { kernel }),
  };
  const model = {
    widget_manager: manager,
    get: (name) => state[name],
    on: (event, listener) => event === "msg:custom" && listeners.add(listener),
    off: (_, listener) => listeners.delete(listener),
    send: (content) => window.queue.push(content),
  };
  window.queue = []; // sent to the kernel when the cell has ended
  window.deliver = (content, data) => {
    const buffer = Uint8Array.from(atob(data), (char) => char.charCodeAt(0)).buffer;
    for (const listener of [...listeners]) listener(content, [new DataView(buffer)]);
  };
  const url = URL.createObjectURL(new Blob([loader], { type: "text/javascript" }));
  const widget = (await import(url)).default;
  widget.initialize({ model });
  await widget.render({ model, el: document.body });
};
