// What the policy wrote for one task, over the versions: of training groups, or of the evaluations.

import { expect, get, ofRun } from "/static/api.js";
import { go, onKeys, remember } from "/static/app.js";
import { chart, resetCharts } from "/static/chart.js";
import { append, h, number, replace, visible } from "/static/dom.js";

export async function show(place, [run, split, task], query) {
  const base = `/r/${encodeURIComponent(run)}`;
  const data = await get(ofRun(run, `tasks/${split}/${task}`));
  document.title = `${split === "eval" ? "held-out " : ""}task ${task} · ${visible(run)}`;
  const held = split === "eval";
  const state = { order: query.get("order") === "first" ? "first" : "last" };
  const list = h("div", { class: "answers" });
  const versions = [...new Set(data.episodes.map((each) => each.policy_version))].filter((each) => each !== null).sort((one, other) => one - other);
  const means = versions.map((version) => {
    const rewards = data.episodes.filter((each) => each.policy_version === version && each.reward !== null).map((each) => each.reward);
    return rewards.length ? rewards.reduce((sum, each) => sum + each, 0) / rewards.length : null;
  });
  const draw = () => {
    const episodes = state.order === "last" ? [...data.episodes].reverse() : data.episodes;
    replace(list, episodes.map((each) => answer(each, base, query.get("at"))));
  };
  resetCharts();
  const next = (step) => h("button", { disabled: Number(task) + step < 0, onclick: () => go(`${base}/tasks/${split}/${Number(task) + step}`) }, step < 0 ? "← task before" : "task after →");
  append(place, h("h1", {}, `${held ? "Held-out task" : "Task"} ${task}`),
    h("p", { class: "soft" }, `${data.num_episodes > data.episodes.length ? `The newest ${number(data.episodes.length)} of ${number(data.num_episodes)}` : number(data.num_episodes)} episodes, of ${number(versions.length)} policy versions.`),
    data.text_error && h("p", { class: "note" }, data.text_error),
    data.prompt && h("section", { class: "card" }, h("h2", {}, "The prompt"), h("div", { class: "says" }, data.prompt.trim())),
    h("p", { class: "card" }, h("span", { class: "soft" }, "Expected: "), h("span", { class: "says", "data-expected": `${data.source}:${task}` })),
    versions.length > 1 && h("div", { class: "grid" }, chart([{ name: "reward", xs: versions, ys: means, colour: "var(--c1)", dots: true }], { title: "Reward, by policy version", range: [versions[0], versions[versions.length - 1]], x: "batch", xname: "policy version" })),
    h("div", { class: "pills" }, next(-1), next(1), h("button", { onclick: () => { state.order = state.order === "last" ? "first" : "last"; remember({ order: state.order === "last" ? "" : "first" }); draw(); } }, "newest / oldest first"),
      h("label", {}, "task", h("input", { type: "number", min: 0, value: task, onchange: (event) => /^\d+$/.test(event.target.value) && go(`${base}/tasks/${split}/${event.target.value}`) }))),
    list);
  expect(place, run);
  const step = (by) => Number(task) + by >= 0 && go(`${base}/tasks/${split}/${Number(task) + by}`);
  onKeys({ ArrowLeft: () => step(-1), ArrowRight: () => step(1) });
  draw();
}

function answer(each, base, at) {
  return h("section", { class: "card answer", style: String(each.policy_version) === at ? { outline: "2px solid var(--accent)" } : {} },
    h("div", { class: "small" }, h("b", {}, `version ${number(each.policy_version)}`), h("div", { class: "soft" }, each.reward === null ? each.status.replaceAll("_", " ") : `reward ${number(each.reward)}`), h("a", { href: `${base}/t/${each.id}` }, `trajectory ${each.id}`)),
    h("div", { class: "says" }, each.damage ? h("span", { class: "badge bad" }, each.damage) : each.parts.map((part) => h("span", { class: part.kind === "action" ? "" : "soft" }, part.text)), each.parts.length === 0 && !each.damage && h("span", { class: "soft" }, "no token yet")));
}
