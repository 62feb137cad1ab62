// How curves are shown: any metric of metrics.jsonl, smoothed, zoomed, on a log axis; and the settings in which runs differ.

import { get, ofRun } from "/static/api.js";
import { chart } from "/static/chart.js";
import { append, h, number, replace } from "/static/dom.js";

const WINDOWS = [1, 5, 20, 100];
const MOST_PICKED = 12;

// What the address says: x, smooth, log, from, to, m (the picked metrics).
export function readState(query) {
  const real = (name) => (query.get(name) !== null && Number.isFinite(Number(query.get(name))) ? Number(query.get(name)) : null);
  const zoom = real("from") !== null && real("to") !== null && real("from") < real("to") ? [real("from"), real("to")] : null;
  return {
    x: query.get("x") === "time" ? "time" : "batch", smooth: WINDOWS.includes(real("smooth")) ? real("smooth") : 1, log: query.get("log") === "yes", zoom,
    picked: [...new Set((query.get("m") || "").split(",").filter(Boolean).map(decodeURIComponent))].slice(0, MOST_PICKED),
  };
}

export const written = (state) => ({
  x: state.x === "time" ? "time" : "", smooth: state.smooth > 1 ? state.smooth : "", log: state.log ? "yes" : "", from: state.zoom ? state.zoom[0] : "", to: state.zoom ? state.zoom[1] : "",
  m: state.picked.map(encodeURIComponent).join(","),
});

// A colour for each run, however many there are.
export const colourOf = (index) => (index < 6 ? `var(--c${index})` : `hsl(${Math.round(index * 137.5) % 360} 62% 48%)`);

export function curveControls(names, state, change) {
  const choice = (x, text) => h("button", { "aria-pressed": String(state.x === x), onclick: () => change({ x, zoom: null }) }, text);
  const list = h("datalist", { id: "metrics" });
  let isFilled = false;
  const fill = async () => {
    if (isFilled) return;
    isFilled = true;
    const found = await get(ofRun(names[0], "metrics")).catch(() => ({ names: [] }));
    replace(list, found.names.map((name) => h("option", { value: name })));
  };
  const add = (event) => {
    const name = event.target.value.trim();
    if (name && !state.picked.includes(name)) change({ picked: [...state.picked, name].slice(-MOST_PICKED) });
  };
  return [
    choice("batch", "by batch"), choice("time", "by time"),
    h("label", {}, "smooth", h("select", { name: "smooth", onchange: (event) => change({ smooth: Number(event.target.value) }) }, WINDOWS.map((each) => h("option", { value: each, selected: state.smooth === each }, each === 1 ? "no" : `${each} points`)))),
    h("button", { "aria-pressed": String(state.log), onclick: () => change({ log: !state.log }) }, "log axis"),
    state.zoom && h("button", { onclick: () => change({ zoom: null }) }, "the whole run"),
    h("label", {}, "any metric", h("input", { name: "metric", list: "metrics", placeholder: "type a name", onfocus: fill, onchange: add })), list,
    state.picked.map((name) => h("button", { "aria-label": `without ${name}`, onclick: () => change({ picked: state.picked.filter((each) => each !== name) }) }, `${name} ×`)),
  ];
}

// The picked columns of each run.
export async function pickedColumns(names, state) {
  if (!state.picked.length) return [];
  const query = new URLSearchParams(state.picked.map((name) => ["name", name]));
  if (state.zoom && state.x === "batch") [["first", 0], ["last", 1]].forEach(([name, at]) => query.set(name, state.zoom[at]));
  return Promise.all(names.map((name) => get(ofRun(name, `metrics?${query}`)).then((found) => found.columns)));
}

export function pickedCharts(columns, names, state, options, timeOf) {
  return state.picked.map((name, place) => chart(columns.map((of, run) => ({
    name: names[run], ys: of[place].values, colour: colourOf(run), xs: state.x === "time" ? of[place].batch.map((batch) => timeOf(run, batch)) : of[place].batch,
  })), { title: name, ...options, empty: `no line of metrics.jsonl has ${name}${state.zoom ? " here" : ""}` }));
}

// In what the runs were set differently.
export async function settingsDiff(names) {
  const found = await Promise.all(names.map((name) => get(ofRun(name, "settings")).catch((error) => ({ settings: null, error: error.message }))));
  const known = found.filter((each) => each.settings);
  const keys = [...new Set(known.flatMap((each) => Object.keys(each.settings)))].filter((key) => new Set(known.map((each) => each.settings[key])).size > 1);
  const card = h("details", { class: "card", id: "settings", open: true, style: { marginTop: "14px" } }, h("summary", {}, keys.length ? `Settings that differ: ${number(keys.length)}` : "All settings are the same, but for paths and addresses"));
  found.forEach((each, run) => each.error && append(card, h("p", { class: "small soft" }, `${names[run]}: ${each.error}`)));
  if (keys.length) append(card, h("div", { class: "scroll" }, h("table", {},
    h("thead", {}, h("tr", {}, h("th", {}, "setting"), names.map((name, run) => h("th", { class: "swatch", style: { borderBottomColor: colourOf(run) } }, name)))),
    h("tbody", {}, keys.map((key) => h("tr", {}, h("td", { class: "mono" }, key), found.map((each) => h("td", { class: "mono says" }, each.settings ? each.settings[key] ?? "–" : "–"))))))));
  return card;
}
