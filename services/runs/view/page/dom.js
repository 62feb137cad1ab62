// Elements are made from data as text nodes only: nothing that a run holds is ever parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

// Controls, overrides of direction, what has no width, halves of characters. A joiner has a use between other letters than ours.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff\uffa0\ufff9-\ufffb\u{e0000}-\u{e0fff}\p{Cs}]|(?<=^|[\0-\u024f])[\u200c\u200d]|[\u200c\u200d](?=[\0-\u024f]|$)/gu;
const FLOOD = /(\p{M}{6})(\p{M}+)/gu;

// As terminals get it, too: text of a run turns nothing round, hides nothing, and grows over nothing.
export function visible(text) {
  const escaped = (each) => { const code = each.codePointAt(0); return `\\${code < 256 ? "x" : code < 65536 ? "u" : "U"}${code.toString(16).padStart(code < 256 ? 2 : code < 65536 ? 4 : 8, "0")}`; };
  return String(text).replace(FLOOD, (_, first, rest) => `${first}(${[...rest].length} more marks)`).replace(HIDDEN, escaped);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else element.setAttribute(name, value === true ? "" : name === "title" || name === "aria-label" ? visible(value) : String(value));
  }
  for (const child of children.flat(3)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(visible(child)));
  }
  return element;
}

export const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
export const s = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

export const append = (element, ...children) => fill(element, {}, children);

export const replace = (element, ...children) => element.replaceChildren(...children.flat(3).filter(Boolean));

const tip = document.getElementById("tip");

// Rows of [name, value], or one text.
export function showTip(event, rows) {
  tip.hidden = false;
  replace(tip, typeof rows === "string" ? document.createTextNode(visible(rows)) : h("dl", {}, rows.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])));
  const box = tip.getBoundingClientRect();
  const left = Math.min(Math.max(6, event.clientX + 14), innerWidth - box.width - 6);
  const below = event.clientY + 18;
  tip.style.left = `${left}px`;
  tip.style.top = `${below + box.height > innerHeight ? Math.max(6, event.clientY - box.height - 12) : below}px`;
}

export function hideTip() {
  tip.hidden = true;
}

export const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size >= 1000) return value.toLocaleString("en", { maximumFractionDigits: 0 });
  if (size < 1e-3 && size > 0) return value.toExponential(digits - 1);
  return value.toFixed(size >= 100 ? 1 : digits);
}

export const exact = (value) => (value === null || value === undefined ? "–" : Number(value).toPrecision(7).replace(/\.?0+$/, "").replace(/\.?0+e/, "e"));

// A duration, in the two largest units.
export function span(seconds) {
  const whole = Math.round(seconds);
  const units = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  const first = units.findIndex(([, size]) => whole >= size);
  if (first < 0) return "0 s";
  const [name, size] = units[first];
  const [next, small] = units[first + 1] || ["", 1];
  const rest = Math.floor((whole % size) / small);
  return `${Math.floor(whole / size)} ${name}${next && rest ? ` ${rest} ${next}` : ""}`;
}

export const clock = (seconds) => new Date(seconds * 1000).toLocaleString(undefined, { dateStyle: "short", timeStyle: "medium" });
