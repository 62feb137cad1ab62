// A line chart of columns over batches or time, and a strip of events; hovering one chart shows the place in all.

import { clock, h, hideTip, number, replace, s, showTip } from "/static/dom.js";

const HEIGHT = 190;
const PAD = { left: 44, right: 10, top: 10, bottom: 22 };
const charts = new Set();

export function resetCharts() {
  charts.clear();
}

function ticks(low, high, count) {
  const span = high - low || 1;
  const raw = span / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((each) => each * power).find((each) => each >= raw);
  const found = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-9; value += step) found.push(Math.abs(value) < step * 1e-9 ? 0 : value);
  return found;
}

const short = (value) => (Math.abs(value) >= 10000 ? Intl.NumberFormat("en", { notation: "compact" }).format(value) : String(Number(value.toPrecision(4))));

// lines: [{name, xs, ys, colour, dots, faint, width}]; options: {title, zero, unit, x: "batch" | "time", onpick(x), empty}
export function chart(lines, options) {
  const known = lines.filter((line) => line.ys.some((y) => y !== null));
  const latest = known.length && [...known[0].ys].reverse().find((y) => y !== null);
  const legend = h("div", { class: "legend" }, known.length > 1 && known.map((line) => h("span", {}, h("i", { style: { background: line.colour } }), line.name)));
  const svg = s("svg", { role: "img", "aria-label": `${options.title} over ${options.x === "time" ? "time" : "batches"}` });
  const card = h("section", { class: "card chart", "data-chart": options.title }, h("h2", {}, options.title, h("b", {}, known.length ? number(latest) : "")), legend, svg);
  if (!known.length) {
    replace(svg, s("text", { x: 10, y: 30 }, options.empty || "nothing recorded yet"));
    return card;
  }
  const draw = () => drawn(svg, known, options);
  new ResizeObserver(draw).observe(svg);
  return card;
}

function drawn(svg, lines, options) {
  const width = svg.clientWidth;
  if (!width) return;
  const all = lines.flatMap((line) => line.ys.filter((y) => y !== null));
  let [low, high] = [Math.min(...all), Math.max(...all)];
  if (options.zero) low = Math.min(0, low);
  if (low === high) [low, high] = [low - (Math.abs(low) || 1) * 0.05, high + (Math.abs(high) || 1) * 0.05];
  const [first, last] = options.range;
  const x = (value) => PAD.left + ((value - first) / (last - first || 1)) * (width - PAD.left - PAD.right);
  const y = (value) => PAD.top + (1 - (value - low) / (high - low)) * (HEIGHT - PAD.top - PAD.bottom);
  svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  const parts = ticks(low, high, 4).map((value) => [
    s("line", { class: "gridline", x1: PAD.left, x2: width - PAD.right, y1: y(value), y2: y(value) }),
    s("text", { x: PAD.left - 7, y: y(value) + 4, "text-anchor": "end" }, short(value)),
  ]);
  parts.push(axis(first, last, x, width, options));
  for (const line of lines) {
    let path = "";
    let pen = "M";
    line.ys.forEach((value, index) => {
      if (value === null) pen = line.dots ? pen : "M";
      else {
        path += `${pen}${x(line.xs[index]).toFixed(1)} ${y(value).toFixed(1)}`;
        pen = "L";
      }
    });
    parts.push(s("path", { d: path, fill: "none", "stroke-width": line.width || 1.8, "stroke-linejoin": "round", style: { stroke: line.colour, opacity: line.faint ? 0.45 : 1 } }));
    // A point without neighbours would be a line of no length.
    const alone = (index) => (line.ys[index - 1] ?? null) === null && (line.ys[index + 1] ?? null) === null;
    line.ys.forEach((value, index) => value !== null && (line.dots || alone(index)) && parts.push(s("circle", { cx: x(line.xs[index]), cy: y(value), r: line.dots ? 3.2 : 2, style: { fill: line.colour } })));
  }
  const cross = s("line", { class: "cross", y1: PAD.top, y2: HEIGHT - PAD.bottom, visibility: "hidden" });
  replace(svg, parts, cross);
  const self = { at: (value) => (cross.setAttribute("x1", x(value)), cross.setAttribute("x2", x(value)), cross.setAttribute("visibility", "visible")), off: () => cross.setAttribute("visibility", "hidden") };
  if (svg.chart) charts.delete(svg.chart);
  svg.chart = self;
  charts.add(self);
  const place = (event) => first + ((event.clientX - svg.getBoundingClientRect().left - PAD.left) / (width - PAD.left - PAD.right)) * (last - first);
  svg.onpointermove = (event) => {
    const value = place(event);
    const near = lines.map((line) => nearest(line, value)).filter(Boolean);
    if (!near.length) return;
    const at = near[0].x;
    charts.forEach((each) => each.at(at));
    showTip(event, [[options.x === "time" ? "time" : options.xname || "batch", options.x === "time" ? clock(at) : number(at)], ...near.map((each) => [each.name, number(each.y)])]);
  };
  svg.onpointerleave = () => { charts.forEach((each) => each.off()); hideTip(); };
  svg.onclick = (event) => {
    const near = nearest(lines[0], place(event));
    if (near && options.onpick) options.onpick(near.x);
  };
}

function nearest(line, value) {
  let best = null;
  line.xs.forEach((x, index) => {
    if (line.ys[index] !== null && (best === null || Math.abs(x - value) < Math.abs(best.x - value))) best = { x, y: line.ys[index], name: line.name };
  });
  return best;
}

function axis(first, last, x, width, options) {
  if (options.x !== "time") return ticks(first, last, Math.max(2, width / 110)).map((value) => s("text", { x: x(value), y: HEIGHT - 6, "text-anchor": "middle" }, short(value)));
  const hours = last - first > 86400 * 2;
  return [0, 0.5, 1].map((part) => {
    const at = new Date((first + part * (last - first)) * 1000);
    return s("text", { x: x(first + part * (last - first)), y: HEIGHT - 6, "text-anchor": ["start", "middle", "end"][part * 2] }, hours ? at.toLocaleDateString() : at.toLocaleTimeString());
  });
}

// Events in lanes: [{lane, colour, items: [{x, text}]}]
export function lanes(rows, options) {
  const svg = s("svg", { role: "img", "aria-label": "events over time" });
  const card = h("section", { class: "card chart lanes", "data-chart": "Events" }, h("h2", {}, "Events", h("b", {}, number(rows.reduce((sum, row) => sum + row.items.length, 0)))), svg);
  const draw = () => {
    const width = svg.clientWidth;
    if (!width) return;
    const [first, last] = options.range;
    const left = 92;
    const x = (value) => left + Math.min(1, Math.max(0, (value - first) / (last - first || 1))) * (width - left - PAD.right);
    svg.setAttribute("viewBox", `0 0 ${width} ${rows.length * 24 + 8}`);
    replace(svg, rows.map((row, index) => [
      s("text", { x: 0, y: index * 24 + 20 }, row.lane),
      s("line", { class: "gridline", x1: left, x2: width - PAD.right, y1: index * 24 + 16, y2: index * 24 + 16 }),
      row.items.map((item) => s("circle", { cx: x(item.x), cy: index * 24 + 16, r: 4.5, tabindex: -1, style: { fill: row.colour, opacity: 0.8 }, onpointerenter: (event) => showTip(event, item.text), onpointerleave: hideTip, onclick: () => item.href && options.go(item.href) })),
    ]));
  };
  new ResizeObserver(draw).observe(svg);
  return card;
}
