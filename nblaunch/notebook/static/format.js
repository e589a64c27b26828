// Elements, and numbers in readable form.
import { numberOf } from "./series.js";

/** Create an element. Text becomes text nodes, so no output of a rank can become markup.
 * @param {string} tag @param {Record<string, any>} [attributes] `class`, attributes, and listeners as on_click
 * @param {...(Node | string | null | undefined)} children @returns {any} */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on_")) node.addEventListener(name.slice(3), value);
    else if (value !== null && value !== undefined && value !== false)
      node.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children) if (child !== null && child !== undefined) node.append(child);
  return node;
}

/** Set a text only if it differs, to keep selections and the position of screen readers.
 * @param {Node} node @param {string} text */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** @param {Element} node @param {string} name @param {string | number | null} value null removes the attribute */
export function setAttribute(node, name, value) {
  if (value === null) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, String(value));
}

/** @param {number} seconds such as 0:07, 12:05, 1:02:03 */
export function clockText(seconds) {
  const whole = Math.max(0, Math.floor(seconds) || 0);
  const two = (/** @type {number} */ n) => String(n).padStart(2, "0");
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60];
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}

/** Format a duration. @param {number} seconds */
export function durationText(seconds) {
  seconds = Number(seconds) || 0;
  if (seconds > 0 && seconds < 0.0995) return `${Math.ceil(seconds * 1000)} ms`;
  return seconds < 59.95 ? `${seconds.toFixed(1)} s` : clockText(seconds);
}

/** @param {number} bytes */
export function bytesText(bytes) {
  let [value, unit] = [Number(bytes) || 0, 0];
  while (value >= 999.5 && unit < 4) {
    value /= 1000;
    unit++;
  }
  return `${unit && value < 9.95 ? value.toFixed(1) : value.toFixed(0)} ${["B", "kB", "MB", "GB", "TB"][unit]}`;
}

/** Format a number with four significant digits; anything else as a dash. @param {unknown} given */
export function numberText(given) {
  const value = numberOf(given);
  if (value === null) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e6) return value.toLocaleString("en-US");
  if (size !== 0 && (size < 1e-4 || size >= 1e6)) return value.toExponential(2).replace(/\.?0+e/, "e");
  return size >= 1e3 ? value.toFixed(0) : String(Number(value.toPrecision(4)));
}

/** Format a value of a metric. @param {unknown} given @param {string} [kind] "rate": 1.2k/s, "lr": 3e-4 */
export function valueText(given, kind = "") {
  const value = numberOf(given);
  if (value === null || !kind) return numberText(value);
  const size = Math.abs(value);
  const three = (/** @type {number} */ part) => String(Number(part.toPrecision(3)));
  if (kind === "lr") return size && size < 0.01 ? value.toExponential(2).replace(/\.?0+e/, "e") : three(value);
  const [unit, factor] = size >= 999500 ? ["M", 1e6] : size >= 999.5 ? ["k", 1e3] : ["", 1];
  return `${three(value / factor)}${unit}/s`;
}

/** Format a value that changes, always as wide. @param {unknown} given @param {string} [kind] as for `valueText` */
export function steadyText(given, kind = "") {
  const text = valueText(given, kind);
  const [, digits, rest] = /^(-?[\d.]+)(|[kM]?\/s)$/.exec(text) ?? [];
  if (digits === undefined || kind === "lr") return text;
  const isWhole = !kind && Number.isInteger(numberOf(given));
  return isWhole || Math.abs(Number(digits)) >= 1000 ? text : Number(digits).toPrecision(kind ? 3 : 4) + rest;
}

export const FEW_RANKS = 8; // as many as there are colours: a legend names them all

/** @param {number} rank */
export function rankClass(rank) {
  return rank < 0 ? "nbl-own" : `nbl-r${rank % FEW_RANKS}`;
}
