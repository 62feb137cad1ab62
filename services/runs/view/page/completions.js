// Every completion of the run in one table: sorted, filtered and searched by the server, page by page.

import { expect, get, ofRun } from "/static/api.js";
import { go, onKeys } from "/static/app.js";
import { append, h, number, replace, visible } from "/static/dom.js";
import { shade, STATUSES } from "/static/groups.js";

const COLUMNS = { reward: "reward", length: "length", lag: "lag", clipped: "clipped", version: "version", task: "task", batch: "batch" };
const MORE = { tokens: "all tokens", turns: "turns", trajectory: "trajectory" };
const FILTERS = ["text", "split", "status", "batch", "task", "group", "evaluation", "least", "largest", "cut", "clipped", "which"];
const MOST = 50;

export async function show(place, [run], query, isShown) {
  const base = `/r/${encodeURIComponent(run)}`;
  document.title = `completions · ${visible(run)}`;
  const known = [...FILTERS, "sort", "order", "first", "until"];
  const asked = new URLSearchParams([...query].filter(([name]) => known.includes(name)));
  const to = (changes) => {
    const next = new URLSearchParams(asked);
    if (!("first" in changes)) ["first", "until"].forEach((name) => next.delete(name));
    for (const [name, value] of Object.entries(changes)) {
      if (value === "" || value === null) next.delete(name);
      else next.set(name, value);
    }
    return `${base}/completions${[...next].length ? `?${next}` : ""}`;
  };
  const state = { sort: asked.get("sort") || "reward", down: asked.get("order") === "down", first: Number(asked.get("first")) || 0 };
  const told = h("div", { class: "pills", role: "status" });
  const table = h("div", {});
  append(place, h("h1", {}, "Completions"), controls(asked, state, to, run), told, table);
  const parts = { run, base, asked, state, to, told, table };
  follow(parts, isShown).catch((error) => isShown() && replace(table, h("p", { class: "note bad" }, error.message), h("p", {}, h("a", { href: `${base}/completions` }, "Take all filters away"))));
}

// Asks until the index is whole and, for a search, until a page is full.
async function follow(parts, isShown) {
  const { run, asked, told, table, state } = parts;
  let rows = [];
  let from = state.first;
  for (;;) {
    const query = new URLSearchParams(asked);
    query.set("most", MOST - (asked.has("text") ? rows.length : 0));
    query.set("first", from);
    const data = await get(ofRun(run, `completions?${query}`));
    if (!isShown()) return;
    const isWhole = data.is_whole;
    rows = asked.has("text") && isWhole ? [...rows, ...data.rows] : data.rows;
    const isDone = isWhole && (!asked.has("text") || rows.length >= MOST || data.next === null);
    replace(told, ...status(parts, data, rows, isWhole, isDone));
    if (isWhole) replace(table, ...drawn(parts, data, rows, isDone));
    if (isDone) expect(table, run);
    if (isDone) return;
    from = isWhole ? data.next : state.first;
  }
}

function status({ asked, to, state }, data, rows, isWhole, isDone) {
  if (!isWhole) return [h("progress", { max: data.total, value: data.read, "aria-label": "read" }), h("span", { class: "small soft" }, `${number(data.read)} of ${number(data.total)} trajectories are read`)];
  const searched = asked.has("text") ? (data.next === null ? data.number : data.next) : null;
  return [
    !isDone && h("progress", { max: data.number, value: searched, "aria-label": "searched" }),
    h("span", { class: "small soft" }, asked.has("text") ? `${number(rows.length)} found in ${number(searched - state.first)} of ${number(data.number)} texts` : `${number(data.number)} completions`),
    data.damaged > 0 && h("span", { class: "badge bad" }, `${number(data.damaged)} damaged rows are left out`),
    asked.has("until") && data.newest > Number(asked.get("until")) && h("a", { class: "small", href: to({}) }, `${number(data.newest - Number(asked.get("until")))} newer ones: show them, too`),
    isDone && ["parquet", "jsonl"].map((form) => h("a", { class: "small", href: `/api${location.pathname.replace("/r/", "/runs/")}.${form}?${asked}`, download: "" }, `download as ${form === "parquet" ? "Parquet" : "JSON lines"}`)),
  ];
}

function drawn({ base, to, state, asked }, data, rows, isDone) {
  if (!rows.length && data.number > 0 && state.first >= data.number) return [h("p", { class: "note" }, `There are only ${number(data.number)}. `, h("a", { href: to({ first: Math.floor((data.number - 1) / MOST) * MOST }) }, "The last page"))];
  if (!rows.length) return [h("p", { class: "soft" }, isDone ? (data.total ? "No completion is like that." : "Nothing was generated yet.") : "…")];
  const has = { ...COLUMNS, ...Object.fromEntries(data.components.map((name) => [`component/${name}`, name])) };
  if (!data.has_clipped) delete has.clipped;
  const sorted = (name) => (state.sort === name ? (state.down ? "descending" : "ascending") : "none");
  const head = (name) => h("th", { class: "num", "aria-sort": sorted(name) }, h("button", { class: "plain", "data-sort": name, onclick: () => go(to({ sort: name, order: state.sort === name && !state.down ? "down" : "" })) }, has[name], state.sort === name ? (state.down ? " ▼" : " ▲") : ""));
  const cells = Object.keys(has);
  const until = asked.get("until") || data.newest;
  const page = (first, text) => h("a", { href: to({ first, until }), rel: text.startsWith("←") ? "prev" : "next" }, text);
  onKeys({
    ArrowDown: () => step(1), ArrowUp: () => step(-1),
    ArrowRight: () => data.next !== null && go(to({ first: data.next, until })), ArrowLeft: () => state.first > 0 && history.back(),
  });
  return [
    data.text_error && h("p", { class: "note" }, data.text_error),
    h("p", { class: "note", hidden: true, "data-expected-error": "" }),
    h("div", { class: "card scroll" }, h("table", { class: "completions" },
      h("thead", {}, h("tr", {}, h("th", {}, "completion"), h("th", {}, "expected"), cells.map(head))),
      h("tbody", {}, rows.map((row) => line(row, base, cells, has))))),
    h("div", { class: "pills" }, state.first > 0 && page(Math.max(0, state.first - MOST), "← before"), isDone && data.next !== null && page(data.next, "after →"),
      h("span", { class: "small soft" }, "Keys: ↑ ↓ and Enter for a completion, ← → for pages")),
  ];
}

function line(row, base, cells, has) {
  const value = (name) => {
    if (name.startsWith("component/")) return number((row.components || {})[name.slice(10)]);
    if (name === "batch") return row.batch === null ? (row.source === "train" ? "–" : "held out") : h("a", { href: `${base}/batches/${row.batch}` }, row.batch);
    if (name === "task") return h("a", { href: `${base}/tasks/${row.source === "train" ? "train" : "eval"}/${row.task_index}` }, row.task_index);
    if (name === "clipped") return row.clipped === null ? "–" : `${Math.round(100 * row.clipped)} %`;
    return number(row[name], name === "reward" ? 3 : 2);
  };
  const unusual = [row.finish === "length" && "cut off", row.status !== "finished" && row.status, ["dropped", "quarantined", "filtered", "requeued"].includes(row.group_status) && row.group_status].filter(Boolean);
  return h("tr", { "data-id": row.id, style: { boxShadow: `inset 4px 0 ${shade(row.reward === undefined ? null : row.reward, 0, 1)}` } },
    h("td", { class: "texts" }, h("a", { class: "pick", href: `${base}/t/${row.id}`, "aria-label": `trajectory ${row.id}` },
      h("span", { class: "soft says" }, row.prompt), h("span", { class: "says" }, row.answer || h("span", { class: "soft" }, "no text"))),
    unusual.map((text) => [h("span", { class: "badge warm" }, text), " "]), row.damage && h("span", { class: "badge bad" }, row.damage)),
    h("td", { class: "says", "data-label": "expected", "data-expected": `${row.source}:${row.task_index}` }),
    cells.map((name) => h("td", { class: "num", "data-label": has[name] }, value(name))));
}

function step(by) {
  const all = [...document.querySelectorAll(".pick")];
  const at = all.indexOf(document.activeElement);
  const next = all[at < 0 ? (by > 0 ? 0 : all.length - 1) : at + by];
  if (next) next.focus();
}

function controls(asked, state, to) {
  const pick = (name, text, values) => h("label", {}, text, h("select", { name, onchange: (event) => go(to({ [name]: event.target.value })) }, h("option", { value: "" }, "any"),
    values.map(([value, said]) => h("option", { value, selected: asked.get(name) === value }, said))));
  const field = (name, text, type = "number") => h("label", {}, text, h("input", { name, type, step: "any", value: asked.get(name) || "", onchange: (event) => go(to({ [name]: event.target.value.trim() })) }));
  const sorts = { ...COLUMNS, ...MORE };
  if (!(state.sort in sorts)) sorts[state.sort] = state.sort.replace("component/", "");
  const same = (values) => values.map((each) => [each, each.replaceAll("_", " ")]);
  return h("div", {},
    h("div", { class: "pills" },
      h("button", { "aria-pressed": String(state.sort === "reward" && !state.down), onclick: () => go(to({ sort: "", order: "" })) }, "worst first"),
      h("button", { "aria-pressed": String(state.sort === "reward" && state.down), onclick: () => go(to({ sort: "", order: "down" })) }, "best first"),
      h("label", {}, "sort by", h("select", { name: "sort", onchange: (event) => go(to({ sort: event.target.value })) }, Object.entries(sorts).map(([value, text]) => h("option", { value, selected: state.sort === value }, text)))),
      h("button", { "aria-label": "turn the order round", onclick: () => go(to({ order: state.down ? "" : "down" })) }, state.down ? "▼" : "▲"),
      field("text", "search", "search")),
    h("details", { open: FILTERS.slice(1).some((name) => asked.has(name)) }, h("summary", { class: "small" }, "Filters"), h("div", { class: "pills" },
      field("least", "reward from"), field("largest", "to"), field("batch", "batch"), field("task", "task"),
      pick("split", "split", [["train", "training"], ["eval", "held out"]]), pick("cut", "cut off", same(["yes", "no"])), pick("clipped", "clipped", same(["yes", "no"])),
      pick("status", "group", same(STATUSES)), pick("which", "episodes", [["finished", "finished"], ["all", "also unfinished"]]))));
}
