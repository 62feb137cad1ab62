// Elements are made from data as text nodes only: nothing that a run holds is ever parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(3)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
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
  replace(tip, typeof rows === "string" ? document.createTextNode(rows) : h("dl", {}, rows.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])));
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

export const clock = (seconds) => new Date(seconds * 1000).toLocaleString(undefined, { dateStyle: "short", timeStyle: "medium" });
