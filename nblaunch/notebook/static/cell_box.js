// The input boxes of cells. JupyterLab keeps a box after the kernel has stopped waiting for it, and a line that is
// typed there would answer the kernel's next request.

/** Hide the boxes that ask for the line of a rank; return what shows them again.
 * @param {Element} node @param {string} scope selects the ancestor of `node` in which to look
 * @param {boolean} [keepsLast] leaves the newest one */
export function hideCellBoxes(node, scope, keepsLast = false) {
  const prompts = [...(node.closest(scope)?.querySelectorAll(".jp-Stdin-prompt") ?? [])];
  const boxes = prompts.flatMap((prompt) => {
    const box = prompt.closest(".jp-OutputArea-child");
    return box && /^\(rank \d+ of \d+\)/.test(prompt.textContent ?? "") ? [box] : [];
  });
  const hidden = boxes.slice(0, keepsLast ? -1 : undefined).filter((box) => !box.classList.contains("nbl-replaced"));
  for (const box of hidden) box.classList.add("nbl-replaced");
  return () => hidden.forEach((box) => box.classList.remove("nbl-replaced"));
}
