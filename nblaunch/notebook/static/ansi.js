// Terminal colours: SGR sequences to runs of text with a class and a style. The kernel has made each set a whole style.

const SGR = /\x1b\[([0-9;:]*)m/;
const EVERY_SGR = /\x1b\[[0-9;:]*m/g;
const SGR_CODE = /(?:^|;)([345]8;5;[0-9]*|[345]8;2;[0-9]*;[0-9]*;[0-9]*|[0-9:]*)/g;
/** @type {Record<number, string>} */
const STYLE_CLASSES = {
  1: "nbl-bold",
  2: "nbl-dim",
  3: "nbl-italic",
  4: "nbl-underline",
  9: "nbl-struck",
  21: "nbl-underline",
};

/** @param {string} text */
export function stripAnsi(text) {
  return text.includes("\x1b") ? text.replace(EVERY_SGR, "") : text;
}

/** Split a line into runs of one style. @param {string} line
 * @returns {{text: string, cls: string, style: {color?: string, background?: string}}[]} */
export function ansiRuns(line) {
  if (!line.includes("\x1b")) return line ? [{ text: line, cls: "", style: {} }] : [];
  const parts = line.split(SGR);
  const runs = [];
  for (let i = 0; i < parts.length; i += 2) {
    if (parts[i]) runs.push({ text: parts[i], ...sgrLook(i ? parts[i - 1] : "") });
  }
  return runs;
}

/** @param {string} colour */
function sgrLook(colour) {
  const classes = [];
  /** @type {{color?: string, background?: string}} */
  const style = {};
  let [front, back] = ["", ""];
  let inverse = false;
  for (const [, code] of colour.matchAll(SGR_CODE)) {
    const number = parseInt(code, 10) || 0;
    if (number === 7) inverse = true;
    else if (STYLE_CLASSES[number]) classes.push(STYLE_CLASSES[number]);
    else if ((number >= 30 && number <= 38) || (number >= 90 && number <= 97))
      front = sgrColour(code, number < 90 ? 30 : 82);
    else if ((number >= 40 && number <= 48) || (number >= 100 && number <= 107))
      back = sgrColour(code, number < 100 ? 40 : 92);
  }
  if (inverse) [front, back] = [back || (/^\d/.test(front) ? "" : "paper"), front || "ink"]; // backgrounds of the 16 theme colours are pale
  if (front.startsWith("rgb(")) style.color = front;
  else if (front) classes.push(`nbl-fg-${front}`);
  if (back.startsWith("rgb(")) style.background = back;
  else if (back) classes.push(`nbl-bg-${back}`);
  return { cls: classes.join(" "), style };
}

/** Return "0" to "15" for a theme colour, else "rgb(...)" made of numbers; "" for no colour.
 * @param {string} code @param {number} base */
function sgrColour(code, base) {
  const numbers = code.split(/[;:]+/).map((part) => Math.min(255, parseInt(part, 10) || 0));
  if (numbers.length === 1) return numbers[0] === 38 || numbers[0] === 48 ? "" : String(numbers[0] - base);
  const last = numbers.length - 1;
  if (numbers[1] === 2) return last >= 4 ? `rgb(${numbers.slice(-3).join(", ")})` : "";
  const index = numbers[last];
  if (numbers[1] !== 5 || last !== 2) return "";
  if (index < 16) return String(index);
  if (index >= 232) {
    const grey = 8 + 10 * (index - 232);
    return `rgb(${grey}, ${grey}, ${grey})`;
  }
  const level = (/** @type {number} */ step) => (step ? 55 + 40 * step : 0);
  const cube = index - 16;
  return `rgb(${level(Math.floor(cube / 36))}, ${level(Math.floor(cube / 6) % 6)}, ${level(cube % 6)})`;
}
