// The input boxes of cells. JupyterLab keeps a box after the kernel has stopped waiting for it.

/** Hide the boxes that ask for the line of a rank; return what shows them again.
 * @param {Element} node @param {string} scope selects the ancestor of `node` in which to look */
export function hideCellBoxes(node, scope) {
  /** @type {Element[]} */
  const hidden = [];
  for (const prompt of node.closest(scope)?.querySelectorAll(".jp-Stdin-prompt") ?? []) {
    const box = prompt.closest(".jp-OutputArea-child");
    if (!box || !/^\(rank \d+ of \d+\)/.test(prompt.textContent ?? "")) continue;
    box.classList.add("nbl-replaced");
    hidden.push(box);
  }
  return () => hidden.forEach((box) => box.classList.remove("nbl-replaced"));
}
