// Terminal colours: SGR sequences to runs of text with a class and a style.

export const SGR = /\x1b\[([0-9;:]*)m/;
const EVERY_SGR = /\x1b\[[0-9;:]*m/g;
const SGR_CODE = /(?:^|;)([345]8;5;[0-9]*|[345]8;2;[0-9]*;[0-9]*;[0-9]*|[0-9:]*)/g;
/** @type {Record<number, number[]>} */
const SWITCHED_OFF_BY = {
  22: [1, 2],
  23: [3],
  24: [4, 21],
  25: [5, 6],
  27: [7],
  28: [8],
  29: [9],
  39: [30],
  49: [40],
  55: [53],
  59: [58],
};
/** @type {Record<number, string>} */
const STYLE_CLASSES = {
  1: "nbl-bold",
  2: "nbl-dim",
  3: "nbl-italic",
  4: "nbl-underline",
  9: "nbl-struck",
  21: "nbl-underline",
};

/** @type {Map<string, string>} */
const sgrMemory = new Map();

/** Return the slot that a code sets: 30 foreground, 40 background, else the code; 0 for none.
 * @param {number} code */
function sgrSlot(code) {
  if ((code >= 30 && code <= 38) || (code >= 90 && code <= 97)) return 30;
  if ((code >= 40 && code <= 48) || (code >= 100 && code <= 107)) return 40;
  return (code >= 1 && code <= 9) || code === 21 || code === 53 || code === 58 ? code : 0;
}

/** Return the SGR parameters in force after `parameters` follows `colour` (ECMA-48, 8.3.117, and xterm's).
 * @param {string} colour @param {string} parameters */
export function sgrAfter(colour, parameters) {
  const key = `${colour} ${parameters}`;
  const known = sgrMemory.get(key);
  if (known !== undefined) return known;
  /** @type {Map<number, string>} */
  const active = new Map();
  for (const [, code] of (colour ? `${colour};${parameters}` : parameters).matchAll(SGR_CODE)) {
    const number = parseInt(code, 10) || 0;
    if (number === 0) active.clear();
    for (const slot of SWITCHED_OFF_BY[number] ?? []) active.delete(slot);
    const sets = sgrSlot(number);
    if (sets) {
      active.delete(sets);
      active.set(sets, code);
    }
  }
  if (sgrMemory.size >= 1024) sgrMemory.clear();
  const after = [...active.values()].join(";");
  sgrMemory.set(key, after);
  return after;
}

/** Join [colour, text] pairs; set each colour once per run and reset it afterwards.
 * @param {string[][]} runs */
export function joinRuns(runs) {
  let all = "";
  for (let i = 0; i < runs.length;) {
    const colour = runs[i][0];
    let text = "";
    for (; i < runs.length && runs[i][0] === colour; i++) text += runs[i][1];
    if (text) all += colour ? `\x1b[${colour}m${text}\x1b[0m` : text;
  }
  return all;
}

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
  let colour = "";
  for (let i = 0; i < parts.length; i += 2) {
    if (i) colour = sgrAfter(colour, parts[i - 1]);
    if (parts[i]) runs.push({ text: parts[i], ...sgrLook(colour) });
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
    else if (sgrSlot(number) === 30) front = sgrColour(code, number < 90 ? 30 : 82);
    else if (sgrSlot(number) === 40) back = sgrColour(code, number < 100 ? 40 : 92);
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
