// All runs of this page, to choose one or to compare some.

import { get } from "/static/api.js";
import { go } from "/static/app.js";
import { append, h, number } from "/static/dom.js";

export async function show(place) {
  document.title = "gspo view";
  const runs = await get("/api/runs");
  const chosen = new Set();
  const compare = h("button", { disabled: true, onclick: () => {
    const [first, ...others] = [...chosen];
    go(`/r/${encodeURIComponent(first)}?with=${others.map(encodeURIComponent).join(",")}`);
  } }, "Compare the chosen");
  const row = (run) => h("tr", {},
    h("td", {}, h("input", { type: "checkbox", "aria-label": `choose ${run.name}`, disabled: Boolean(run.error), onchange: (event) => {
      chosen[event.target.checked ? "add" : "delete"](run.name);
      compare.disabled = chosen.size < 2;
    } })),
    h("td", {}, h("a", { href: `/r/${encodeURIComponent(run.name)}` }, run.name), " ", run.is_live && h("span", { class: "badge live" }, "live"),
      h("div", { class: "small soft" }, run.error || run.directory)),
    h("td", { class: "num" }, run.error ? "–" : `${number(run.num_trained)}${run.wanted_batches ? ` of ${number(run.wanted_batches)}` : ""}`),
    h("td", { class: "num" }, number(run.reward)),
    h("td", { class: "num" }, number(run.held_out)),
    h("td", { class: "num" }, number(run.num_trajectories)));
  append(place, h("h1", {}, "Runs"), h("div", { class: "card scroll" }, h("table", {},
    h("thead", {}, h("tr", {}, h("th", {}), h("th", {}, "run"), ...["batches", "reward", "held out", "trajectories"].map((name) => h("th", { class: "num" }, name)))),
    h("tbody", {}, runs.map(row)))), h("div", { class: "pills" }, compare));
}
