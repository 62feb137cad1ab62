// Groups with the rewards and advantages of their members: of one batch, or chosen by what became of them.

import { expect, get, ofRun } from "/static/api.js";
import { go, onKeys, remember } from "/static/app.js";
import { append, h, number, replace, visible } from "/static/dom.js";

const SORTS = {
  order: ["as trained", () => 0],
  reward: ["mean reward", (group) => -mean(group, "reward")],
  spread: ["spread of rewards", (group) => -(most(group, "reward") - least(group, "reward"))],
  lag: ["lag", (group) => -most(group, "lag")],
  length: ["length", (group) => -most(group, "tokens")],
  clipped: ["clipped", (group) => -mean(group, "clipped")],
  advantage: ["largest advantage", (group) => -most(group, "advantage")],
  task: ["task", (group) => group.task_index],
};
const SHOWS = {
  all: ["all", () => true],
  signal: ["with an advantage", (group) => most(group, "reward") > least(group, "reward")],
  silent: ["all rewards equal", (group) => most(group, "reward") === least(group, "reward")],
  clipped: ["clipped", (group) => group.members.some((each) => each.clipped > 0)],
  resumed: ["resumed elsewhere", (group) => group.members.some((each) => each.epoch > 1)],
  cut: ["cut off at a limit", (group) => group.members.some((each) => each.finish === "length")],
  dropped: ["dropped", (group) => group.status === "dropped"],
};
export const STATUSES = ["open", "complete", "batched", "dropped", "evaluated", "filtered", "quarantined", "requeued", "resampled"];
const AT_ONCE = 60;

const known = (group, name) => group.members.map((each) => each[name]).filter((value) => value !== null && value !== undefined);
const mean = (group, name) => (known(group, name).length ? known(group, name).reduce((sum, each) => sum + each, 0) / known(group, name).length : -Infinity);
const most = (group, name) => Math.max(...known(group, name));
const least = (group, name) => Math.min(...known(group, name));

export async function show(place, [run, batch], query) {
  const chosen = new URLSearchParams([...query].filter(([name]) => ["status", "split", "drop_reason", "evaluation", "task_index", "first"].includes(name)));
  if (batch !== undefined) chosen.set("batch", batch);
  const data = await get(ofRun(run, `groups?${chosen}`));
  const base = `/r/${encodeURIComponent(run)}`;
  document.title = `${batch === undefined ? "groups" : `batch ${batch}`} · ${visible(run)}`;
  const state = { sort: SORTS[query.get("sort")] ? query.get("sort") : "order", only: SHOWS[query.get("only")] ? query.get("only") : "all", task: query.get("task") || "", least: query.get("least") || "" };
  const list = h("div", {});
  const count = h("span", { class: "soft small" });
  const draw = () => {
    const kept = data.groups.filter(SHOWS[state.only][1]).filter((group) => state.task === "" || group.task_index === Number(state.task))
      .filter((group) => state.least === "" || most(group, "reward") >= Number(state.least));
    const sorted = kept.map((group, index) => [SORTS[state.sort][1](group), index, group]).sort((one, other) => one[0] - other[0] || one[1] - other[1]).map(([, , group]) => group);
    count.textContent = `${number(kept.length)} of ${number(data.groups.length)} groups`;
    let drawn = 0;
    const more = h("button", { onclick: () => add() }, "Show more");
    const add = () => {
      more.remove();
      const cards = sorted.slice(drawn, drawn + AT_ONCE).map((group) => card(group, base));
      const part = h("div", {}, cards);
      list.append(part);
      tell(part, run);
      drawn += AT_ONCE;
      if (drawn < sorted.length) list.append(more);
    };
    replace(list, kept.length === 0 && h("p", { class: "soft" }, "No group is like that."));
    add();
  };
  const choose = (changes) => { Object.assign(state, changes); remember({ sort: state.sort === "order" ? "" : state.sort, only: state.only === "all" ? "" : state.only, task: state.task, least: state.least }); draw(); };
  const step = (by) => Number(batch) + by >= 0 && go(`${base}/batches/${Number(batch) + by}`);
  if (batch !== undefined) onKeys({ ArrowLeft: () => step(-1), ArrowRight: () => step(1) });
  append(place, batch === undefined ? chooser(run, query, base) : headOfBatch(data, Number(batch), run, base),
    h("div", { class: "pills" },
      h("label", {}, "sort by", h("select", { name: "sort", onchange: (event) => choose({ sort: event.target.value }) }, Object.entries(SORTS).map(([name, [text]]) => h("option", { value: name, selected: state.sort === name }, text)))),
      h("label", {}, "only", h("select", { name: "only", onchange: (event) => choose({ only: event.target.value }) }, Object.entries(SHOWS).map(([name, [text]]) => h("option", { value: name, selected: state.only === name }, text)))),
      h("label", {}, "task", h("input", { name: "task", type: "number", min: 0, value: state.task, oninput: (event) => choose({ task: event.target.value }) })),
      h("label", {}, "reward at least", h("input", { name: "least", type: "number", step: "any", value: state.least, oninput: (event) => choose({ least: event.target.value }) })),
      count), list,
    h("p", {}, data.next !== null && h("a", { href: `${location.pathname}?${new URLSearchParams([...chosen].filter(([name]) => name !== "first").concat([["first", data.next]]))}` }, "The groups after these")));
  draw();
}

function headOfBatch(data, batch, run, base) {
  const link = (index, text) => h("a", { href: `${base}/batches/${index}` }, text);
  const versions = data.trained_versions.filter(Boolean);
  const figures = [
    [number(data.stats.mean_reward), "mean reward"], [number(data.stats.mean_lag), "mean lag"], [number(data.stats.num_trajectories), "trajectories"],
    [number(data.stats.num_tokens), "tokens"], [number(data.stats.num_zero_advantage_groups), "zero-advantage groups"],
  ];
  return h("div", {},
    h("h1", {}, `Batch ${batch}`),
    h("p", { class: "soft" }, `Assembled for version ${data.policy_version}`, versions.length ? `, trained into version ${versions.join(" and again into ")}` : data.quarantined ? "" : ", not trained yet", ". ", batch > 0 && link(batch - 1, "← before"), " ", link(batch + 1, "after →"), ". ", h("a", { href: `${base}/completions?batch=${batch}` }, "Its worst completions")),
    data.quarantined && h("p", { class: "note bad" }, `Quarantined: ${data.quarantined}`),
    data.learner_error && h("p", { class: "note" }, data.learner_error),
    h("div", { class: "figures" }, figures.map(([value, name]) => h("div", { class: "figure" }, h("b", {}, value), h("span", {}, name)))));
}

function chooser(run, query, base) {
  const set = (name, value) => {
    const next = new URLSearchParams(query);
    next.delete("first");
    if (value === "") next.delete(name);
    else next.set(name, value);
    go(`${base}/groups?${next}`);
  };
  const pick = (name, text, values) => h("label", {}, text, h("select", { name, onchange: (event) => set(name, event.target.value) }, h("option", { value: "" }, "any"), values.map((value) => h("option", { value, selected: query.get(name) === value }, value.replaceAll("_", " ")))));
  return h("div", {}, h("h1", {}, "Groups"), h("div", { class: "pills" },
    pick("status", "what became of them", STATUSES), pick("drop_reason", "dropped because", ["stale", "failed"]), pick("split", "split", ["train", "eval"]),
    h("label", {}, "from group", h("input", { type: "number", min: 0, value: query.get("first") || "", onchange: (event) => { const next = new URLSearchParams(query); next.set("first", event.target.value || "0"); go(`${base}/groups?${next}`); } }))));
}

export function shade(value, low, high) {
  if (value === null || value === undefined) return "var(--line)";
  const share = high > low ? (value - low) / (high - low) : 0.5;
  return share > 0.5 ? `color-mix(in srgb, var(--good) ${Math.round(200 * (share - 0.5))}%, var(--line))` : `color-mix(in srgb, var(--bad) ${Math.round(200 * (0.5 - share))}%, var(--line))`;
}

// Fills in what groups were asked, and what was expected.
export async function tell(root, run) {
  expect(root, run);
  const places = [...root.querySelectorAll("[data-prompt]")];
  if (!places.length) return;
  const { prompts } = await get(ofRun(run, `prompts?${new URLSearchParams(places.map((each) => ["id", each.dataset.prompt]))}`)).catch(() => ({ prompts: {} }));
  for (const each of places) {
    const text = prompts[each.dataset.prompt] || "";
    each.hidden = !text;
    each.textContent = visible(text);
    // The question is the prompt's end.
    each.scrollTop = each.scrollHeight;
  }
}

export function card(group, base, here = null) {
  const why = group.drop_reason === "stale" ? "dropped: too old for any batch" : group.drop_reason === "failed" ? "dropped: an episode failed too often" : group.status === "filtered" ? "filtered out: all rewards are equal" : group.status.replaceAll("_", " ");
  const size = Math.max(...group.members.map((each) => Math.abs(each.advantage || 0)), 1e-9);
  return h("section", { class: "card group" },
    h("header", {}, h("h2", {}, `Group ${group.group_id}`), h("span", { class: `badge ${group.status === "dropped" ? "bad" : group.status === "quarantined" ? "warm" : ""}` }, why),
      group.batch !== null && h("a", { class: "small", href: `${base}/batches/${group.batch}` }, `batch ${group.batch}`),
      h("a", { class: "small", href: `${base}/tasks/${group.split}/${group.task_index}` }, `${group.split === "eval" ? "held-out " : ""}task ${group.task_index}`)),
    h("p", { class: "small says asks", hidden: true, "data-prompt": group.members.length ? group.members[0].id : null }),
    h("p", { class: "small" }, h("span", { class: "soft" }, "expected "), h("span", { class: "says", "data-expected": `${group.source}:${group.task_index}` })),
    h("div", { class: "members" }, group.members.map((each) => h("a", { class: `member${each.id === here ? " here" : ""}`, href: `${base}/t/${each.id}`, "data-trajectory": each.id, style: { borderLeftColor: shade(each.advantage === null ? each.reward : each.advantage, each.advantage === null ? 0 : -size, each.advantage === null ? 1 : size) } },
      h("b", {}, number(each.reward)), each.advantage !== null && h("span", { title: "advantage" }, `A ${each.advantage > 0 ? "+" : ""}${number(each.advantage, 2)}`),
      group.roles.filter((role) => role in each.components).map((role) => h("div", {}, `${role} ${number(each.components[role])}`)),
      h("div", { class: "soft" }, `${number(each.tokens)} tokens`, each.lag !== null && ` · lag ${number(each.lag, 2)}`),
      h("div", { class: "soft" }, each.status !== "finished" ? each.status : each.finish === "length" ? "cut off" : "", each.epoch > 1 && ` ${each.epoch} leases`, each.clipped > 0 && h("span", { class: "clip" }, ` clipped${each.clipped < 1 ? ` ${Math.round(100 * each.clipped)} %` : ""}`))))));
}
