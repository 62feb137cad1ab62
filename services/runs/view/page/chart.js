// A line chart of columns over batches or time, and a strip of events; hovering one chart shows the place in all.

import { clock, h, hideTip, number, replace, s, showTip } from "/static/dom.js";

const HEIGHT = 190;
const DRAG = 8;
const PAD = { left: 44, right: 10, top: 10, bottom: 22 };
const charts = new Set();

export function resetCharts() {
  charts.clear();
}

// Powers of ten, and what is between them where there are few.
function logTicks(low, high) {
  const found = [];
  const steps = Math.log10(high / low) > 3 ? [1] : [1, 2, 5];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) for (const step of steps) if (step * 10 ** power >= low && step * 10 ** power <= high) found.push(step * 10 ** power);
  const every = Math.ceil(found.length / 6);
  return found.length > 1 ? found.filter((_, at) => at % every === 0) : [low, high];
}

// Means of so many neighbours; a gap stays one.
function rolling(ys, size) {
  const reach = Math.floor(size / 2);
  return ys.map((y, at) => {
    if (y === null) return null;
    const near = ys.slice(Math.max(0, at - reach), at + reach + 1).filter((each) => each !== null);
    return near.reduce((sum, each) => sum + each, 0) / near.length;
  });
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

// lines: [{name, xs, ys, colour, dots, faint, dashed, width}]
// options: {title, zero, x: "batch" | "time", range, log, smooth (points), onpick(x), onzoom([first, last]), empty}
export function chart(lines, options) {
  const known = lines.filter((line) => line.ys.some((y) => y !== null));
  const latest = known.length && [...known[0].ys].reverse().find((y) => y !== null);
  const legend = h("div", { class: "legend" }, known.length > 1 && known.map((line) => h("span", {}, h("i", { style: { borderTop: `3px ${line.dashed ? "dashed" : "solid"} ${line.colour}` } }), line.name)));
  const svg = s("svg", { role: "img", tabindex: known.length ? 0 : -1, "aria-label": `${options.title} over ${options.x === "time" ? "time" : "batches"}: arrow keys read it${options.onpick ? ", Enter opens a batch" : ""}` });
  const card = h("section", { class: "card chart", "data-chart": options.title }, h("h2", {}, options.title, h("b", {}, known.length ? number(latest) : "")), legend, svg);
  if (!known.length) {
    replace(svg, s("text", { x: 10, y: 30 }, options.empty || "nothing recorded yet"));
    return card;
  }
  const draw = () => drawn(svg, shownLines(known, options), options);
  new ResizeObserver(draw).observe(svg);
  return card;
}

// What is drawn of them: between the ends of the range, above zero on a log axis, with their trend.
function shownLines(lines, { range, log, smooth }) {
  return lines.map((line) => {
    const ys = line.ys.map((y, at) => (y === null || line.xs[at] === null || (log && y <= 0) || line.xs[at] < range[0] || line.xs[at] > range[1] ? null : y));
    return { ...line, ys, trend: smooth > 1 && !line.dots ? rolling(ys, smooth) : null };
  });
}

function drawn(svg, lines, options) {
  const width = svg.clientWidth;
  if (!width) return;
  const all = lines.flatMap((line) => line.ys.filter((y) => y !== null));
  if (!all.length) return replace(svg, s("text", { x: 10, y: 30 }, options.log ? "nothing above 0 here" : "nothing here"));
  let [low, high] = all.reduce(([least, most], y) => [Math.min(least, y), Math.max(most, y)], [Infinity, -Infinity]);
  if (options.zero && !options.log) low = Math.min(0, low);
  if (low === high) [low, high] = options.log ? [low / 1.5, high * 1.5] : [low - (Math.abs(low) || 1) * 0.05, high + (Math.abs(high) || 1) * 0.05];
  const scale = options.log ? Math.log10 : (value) => value;
  const [first, last] = options.range;
  const x = (value) => PAD.left + ((value - first) / (last - first || 1)) * (width - PAD.left - PAD.right);
  const y = (value) => PAD.top + (1 - (scale(value) - scale(low)) / (scale(high) - scale(low))) * (HEIGHT - PAD.top - PAD.bottom);
  svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  const parts = (options.log ? logTicks(low, high) : ticks(low, high, 4)).map((value) => [
    s("line", { class: "gridline", x1: PAD.left, x2: width - PAD.right, y1: y(value), y2: y(value) }),
    s("text", { x: PAD.left - 7, y: y(value) + 4, "text-anchor": "end" }, short(value)),
  ]);
  parts.push(axis(first, last, x, width, options));
  for (const line of lines) {
    const stroke = (ys, opacity) => {
      let path = "";
      let pen = "M";
      ys.forEach((value, index) => {
        if (value === null) pen = line.dots ? pen : "M";
        else {
          path += `${pen}${x(line.xs[index]).toFixed(1)} ${y(value).toFixed(1)}`;
          pen = "L";
        }
      });
      parts.push(s("path", { d: path, fill: "none", "stroke-width": line.width || 1.8, "stroke-linejoin": "round", "stroke-dasharray": line.dashed ? "5 4" : null, style: { stroke: line.colour, opacity } }));
    };
    stroke(line.ys, line.trend ? 0.25 : line.faint ? 0.45 : 1);
    if (line.trend) stroke(line.trend, 1);
    // A point without neighbours would be a line of no length.
    const alone = (index) => (line.ys[index - 1] ?? null) === null && (line.ys[index + 1] ?? null) === null;
    line.ys.forEach((value, index) => value !== null && (line.dots || alone(index)) && parts.push(s("circle", { cx: x(line.xs[index]), cy: y(value), r: line.dots ? 3.2 : 2, style: { fill: line.colour } })));
  }
  const cross = s("line", { class: "cross", y1: PAD.top, y2: HEIGHT - PAD.bottom, visibility: "hidden" });
  const chosen = s("rect", { y: PAD.top, height: HEIGHT - PAD.top - PAD.bottom, visibility: "hidden", style: { fill: "var(--accent)", opacity: 0.15 } });
  replace(svg, parts, cross, chosen);
  const self = { at: (value) => (cross.setAttribute("x1", x(value)), cross.setAttribute("x2", x(value)), cross.setAttribute("visibility", "visible")), off: () => cross.setAttribute("visibility", "hidden") };
  if (svg.chart) charts.delete(svg.chart);
  svg.chart = self;
  charts.add(self);
  const place = (event) => first + ((event.clientX - svg.getBoundingClientRect().left - PAD.left) / (width - PAD.left - PAD.right)) * (last - first);
  const tell = (event, value) => {
    const near = lines.map((line) => nearest(line, value)).filter(Boolean);
    if (!near.length) return;
    const at = near[0].x;
    charts.forEach((each) => each.at(at));
    showTip(event, [[options.x === "time" ? "time" : options.xname || "batch", options.x === "time" ? clock(at) : number(at)], ...near.map((each) => [each.name, number(each.y)])]);
  };
  const silence = () => { charts.forEach((each) => each.off()); hideTip(); };
  let from = null;
  let wasDragged = false;
  svg.onpointerdown = (event) => { from = event.button ? null : event.clientX; wasDragged = false; };
  svg.onpointermove = (event) => {
    tell(event, place(event));
    if (from === null || !event.buttons || Math.abs(event.clientX - from) < DRAG || !options.onzoom) return;
    wasDragged = true;
    svg.setPointerCapture(event.pointerId);
    const [left, right] = [from, event.clientX].sort((one, other) => one - other).map((each) => each - svg.getBoundingClientRect().left);
    [["x", Math.max(PAD.left, left)], ["width", Math.max(0, Math.min(width - PAD.right, right) - Math.max(PAD.left, left))], ["visibility", "visible"]].forEach(([name, value]) => chosen.setAttribute(name, value));
  };
  svg.onpointerup = (event) => {
    const ends = from === null ? [] : [from, event.clientX].sort((one, other) => one - other).map((clientX) => Math.min(last, Math.max(first, place({ clientX }))));
    from = null;
    chosen.setAttribute("visibility", "hidden");
    if (wasDragged && ends[0] < ends[1]) options.onzoom(ends);
  };
  svg.onpointerleave = silence;
  keyboard(svg, lines, { options, x, tell, silence });
  svg.onclick = (event) => {
    if (wasDragged) return;
    const near = nearest(lines[0], place(event));
    if (near && options.onpick) options.onpick(near.x);
  };
}

// Left and right go from point to point, Enter opens the batch.
function keyboard(svg, lines, { options, x, tell, silence }) {
  const points = lines[0].xs.filter((_, at) => lines[0].ys[at] !== null);
  let at = -1;
  svg.onkeydown = (event) => {
    const to = { ArrowLeft: at < 0 ? points.length - 1 : at - 1, ArrowRight: at + 1, Home: 0, End: points.length - 1 }[event.key];
    if (event.key === "Enter" && at >= 0 && options.onpick) options.onpick(points[at]);
    else if (event.key === "Escape") silence();
    else if (to === undefined || !points.length) return;
    else {
      at = Math.min(points.length - 1, Math.max(0, to));
      const box = svg.getBoundingClientRect();
      tell({ clientX: box.left + x(points[at]), clientY: box.top + 40 }, points[at]);
    }
    event.preventDefault();
  };
  svg.onblur = silence;
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
