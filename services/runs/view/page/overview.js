// A run's curves with its evaluations and events; other runs can be drawn over them.

import { get, ofRun } from "/static/api.js";
import { go, remember } from "/static/app.js";
import { chart, lanes, resetCharts } from "/static/chart.js";
import { append, clock, h, number, replace, span, visible } from "/static/dom.js";
import { colourOf, curveControls, pickedCharts, pickedColumns, readState, settingsDiff, written } from "/static/picker.js";

const EVERY_MS = 3000;
const LAGS = [["lag_0", "lag 0"], ["lag_1", "lag 0–1"], ["lag_2", "lag 1–2"], ["lag_3_4", "lag 2–4"], ["lag_5_up", "lag > 4"]];
const KINDS = {
  Kills: ["killed", "stopped_by_error", "cannot_start", "damaged", "learner_ended_silently", "peer_forgotten"],
  Starts: ["started", "restarted", "resumed", "goodbye", "run_stops"],
  "Leases lost": ["leases_lost"],
  Dropped: ["dropped"],
  Quarantined: ["filter_limit", "quarantined", "batch_quarantined", "batch_failed", "batch_skipped", "requeued", "commit_failed"],
};
const COLOURS = { Kills: "var(--bad)", Starts: "var(--good)", "Leases lost": "var(--warm)", Dropped: "var(--violet)", Quarantined: "var(--c5)" };

export async function show(place, [run], query, isShown) {
  document.title = `${visible(run)} · gspo view`;
  const others = (query.get("with") || "").split(",").filter(Boolean).map(decodeURIComponent);
  const names = [run, ...others];
  const state = readState(query);
  const body = h("div", {});
  let [all, ...data] = await Promise.all([get("/api/runs"), ...names.map((name) => get(ofRun(name, "overview")))]);
  const unknown = (error) => (isShown() && append(body, h("p", { class: "note bad" }, error.message)), []);
  let picked = await pickedColumns(names, state).catch(() => []);
  const differences = names.length > 1 ? await settingsDiff(names) : null;
  const draw = () => replace(body, ...page({ data, names, all, state, picked, differences, change }));
  async function change(changes) {
    const focus = document.activeElement && document.activeElement.name;
    Object.assign(state, changes);
    remember(written(state));
    picked = await pickedColumns(names, state).catch(unknown);
    if (!isShown()) return;
    draw();
    const again = focus && body.querySelector(`[name="${focus}"]`);
    if (again) again.focus();
  }
  draw();
  append(place, body);
  const timer = setInterval(async () => {
    if (document.hidden || !isShown() || !data.some((each) => each.facts && each.facts.is_live)) return;
    const fresh = await Promise.all(names.map((name) => get(ofRun(name, "overview")))).catch(() => null);
    // What somebody types is not drawn over.
    if (body.contains(document.activeElement) && document.activeElement.name === "metric") return;
    if (fresh && isShown() && JSON.stringify(fresh) !== JSON.stringify(data)) {
      data = fresh;
      picked = await pickedColumns(names, state).catch(() => picked);
      if (isShown()) draw();
    }
  }, EVERY_MS);
  return () => clearInterval(timer);
}

function page({ data, names, all, state, picked, differences, change }) {
  const [first] = data;
  const base = `/r/${encodeURIComponent(names[0])}`;
  resetCharts();
  const facts = first.facts;
  const head = [
    h("h1", {}, names.join(" and "), " ", facts && facts.is_live && h("span", { class: "badge live" }, "live")),
    facts && h("p", { class: "soft small", title: facts.model }, [facts.environment, facts.model && facts.model.split("/").pop(), `run ${facts.run_id}`].filter(Boolean).join(" · ")),
    ...data.map((each) => each.error && h("p", { class: "note bad" }, `${each.error}\nThe curves below are from metrics.jsonl alone.`)),
    facts && facts.settings_error && h("p", { class: "note" }, facts.settings_error),
    facts && (facts.run_error || facts.stop_reason) && h("p", { class: "note" }, facts.run_error || `The run was asked to stop: ${facts.stop_reason}`),
    first.progress && first.progress.waits_for && h("p", { class: "note", id: "waits" }, first.progress.waits_for),
    learning(first, base),
    facts && figures(first),
    differences,
    controls(names, all, state, change),
  ];
  return [...head, h("div", { class: "grid" }, charts({ data, names, state, base, picked, change })), events(data, names, state, base), evaluations(first, base), sets(first)];
}

function learning({ learning: found }, base) {
  return found.outcome && h("div", { class: "learning" },
    h("p", {}, found.outcome, ". ", h("a", { href: `${base}/completions` }, "The worst completions")),
    found.findings.map((each) => h("p", { class: each.is_wrong ? "note bad" : "note" }, each.text)),
    found.answers.length > 0 && h("ul", { class: "small" }, found.answers.map((each) => h("li", {}, each))),
    found.not_measured.length > 0 && h("p", { class: "soft small" }, `Not measured: ${found.not_measured.join(", ")}`));
}

// Since when it runs, and how long it will: the clock goes on between the lines of metrics.jsonl.
function times({ facts, progress }) {
  if (!progress || progress.took_s === null) return [];
  const silent = facts.is_live ? Math.max(0, Date.now() / 1000 - progress.last_time) : 0;
  const left = facts.is_live && progress.left_s !== null ? Math.max(0, progress.left_s - silent) : null;
  return [[span(progress.took_s + silent), facts.is_live ? "so far" : "took"], left !== null && [span(left), `left, until ${clock(Date.now() / 1000 + left)}`]].filter(Boolean);
}

function figures(first) {
  const { facts, columns, evaluations: held, dropped } = first;
  const last = (name) => [...columns[name]].reverse().find((value) => value !== null);
  const best = held.filter((each) => each.reward !== null).sort((one, other) => other.reward - one.reward)[0];
  const lost = Object.values(dropped).reduce((sum, each) => sum + each, 0);
  const items = [
    [facts.wanted_batches ? `${number(facts.num_trained)} / ${number(facts.wanted_batches)}` : number(facts.num_trained), "batches trained"],
    ...times(first),
    [number(last("reward")), "reward, last batch"],
    [best ? number(best.reward) : "–", best ? `best held out, batch ${best.batch}` : "held out"],
    [number(last("lag_mean")), `mean lag${facts.max_lag === null ? "" : `, ${facts.max_lag} allowed`}`],
    [last("clip") === undefined ? "–" : `${(100 * last("clip")).toFixed(1)} %`, "of tokens clipped"],
    [number(last("tokens_per_s")), "tokens/s trained on"],
    [number(facts.num_trajectories), "trajectories"],
    [number(lost), "groups dropped"],
  ];
  return h("div", { class: "figures" }, items.map(([value, name]) => h("div", { class: "figure" }, h("b", {}, value), h("span", {}, name))));
}

function controls(names, all, state, change) {
  const others = all.filter((run) => !names.includes(run.name));
  const address = (chosen) => `/r/${encodeURIComponent(chosen[0])}${chosen.length > 1 ? `?with=${chosen.slice(1).map(encodeURIComponent).join(",")}` : ""}`;
  return h("div", { class: "pills" }, curveControls(names, state, change),
    others.length > 0 && h("select", { "aria-label": "compare with", onchange: (event) => go(address([...names, event.target.value])) },
      h("option", { value: "" }, "compare with …"), others.map((run) => h("option", { value: run.name }, run.name))),
    names.slice(1).map((name, at) => h("button", { class: "swatch", style: { borderBottomColor: colourOf(at + 1) }, onclick: () => go(address(names.filter((each) => each !== name))) }, `${name} ×`)));
}

function xsOf(each, state) {
  return state.x === "time" ? each.columns.time : each.columns.batch;
}

function charts({ data, names, state, base, picked, change }) {
  const many = data.length > 1;
  const options = { x: state.x, range: state.zoom || rangeOf(data, state), log: state.log, smooth: state.smooth, onzoom: (zoom) => change({ zoom }), onpick: (x) => {
    const [{ columns }] = data;
    const index = state.x === "time" ? columns.time.reduce((best, time, at) => (Math.abs(time - x) < Math.abs(columns.time[best] - x) ? at : best), 0) : columns.batch.indexOf(x);
    if (index >= 0) go(`${base}/batches/${columns.batch[index]}`);
  } };
  const plain = (title, entries, extra = {}) => chart(
    data.flatMap((each, run) => entries.map(([column, name, more], index) => ({
      name: many ? (entries.length > 1 ? `${names[run]}: ${name}` : names[run]) : name, xs: xsOf(each, state), ys: each.columns[column], colour: colourOf(many ? run : index), ...more, dashed: many && index > 0, faint: !many && more && more.faint,
    }))), { title, ...options, ...extra });
  const reward = data.flatMap((each, run) => [
    { name: many ? `${names[run]}: training` : "training", xs: xsOf(each, state), ys: each.columns.reward, colour: colourOf(many ? run : 0), faint: true },
    { name: many ? `${names[run]}: held out` : "held out", xs: each.evaluations.map((one) => (state.x === "time" ? one.time : one.batch)), ys: each.evaluations.map((one) => one.reward), colour: colourOf(many ? run : 1), dots: true, width: 2.2 },
  ]);
  const lengths = data.flatMap((each, run) => [["num_tokens", "all tokens"], ["num_action_tokens", "the policy's own"]].map(([column, name], index) => ({
    name: many ? `${names[run]}: ${name}` : name, xs: xsOf(each, state), colour: colourOf(many ? run : index), dashed: many && index > 0,
    ys: each.columns[column].map((value, at) => (value === null || !each.columns.num_trajectories[at] ? null : value / each.columns.num_trajectories[at])),
  })));
  const [{ columns }] = data;
  const clips = LAGS.filter(([lag]) => columns[`clip_${lag}`].some((value) => value !== null)).map(([lag, name]) => [`clip_${lag}`, name]);
  return [
    ...pickedCharts(picked, names, state, options, (run, batch) => timeAt(batch, data[run].columns)),
    chart(reward, { title: "Reward", ...options }),
    plain("Clipped share, by lag", many ? [["clip", "all"]] : clips, { zero: true }),
    plain("Lag, versions", [["lag_mean", "mean"], ["lag_max", "largest", { faint: true }]], { zero: true }),
    chart(lengths, { title: "Length, tokens a trajectory", zero: true, ...options }),
    plain("Throughput, tokens/s", [["tokens_per_s", "trained on"]], { zero: true }),
    plain("Entropy, nats a token", [["entropy", "entropy"]], { zero: true }),
    plain("Learner against engine, KL", [["mismatch", "nats a token"]], {}),
    plain("Gradient norm", [["grad_norm", "mean of the batch's steps"]], { zero: true }),
    plain("Zero-advantage groups", [["zero_advantage_groups", "trained"], ["filtered", "filtered out"]], { zero: true }),
  ];
}

function rangeOf(data, state) {
  const xs = data.flatMap((each) => [...xsOf(each, state), ...each.evaluations.map((one) => (state.x === "time" ? one.time : one.batch))]).filter((x) => x !== null);
  return xs.length ? [Math.min(...xs), Math.max(...xs)] : [0, 1];
}

function timeAt(batch, { batch: batches, time }) {
  const after = batches.findIndex((each) => each >= batch);
  return after < 0 ? time[time.length - 1] : time[after];
}

function placeOf(time, columns, state) {
  if (state.x === "time") return time;
  const { time: times, batch } = columns;
  if (!times.length) return 0;
  const after = times.findIndex((each) => each !== null && each >= time);
  if (after === 0) return batch[0];
  if (after < 0) return batch[batch.length - 1];
  const share = (time - times[after - 1]) / (times[after] - times[after - 1] || 1);
  return batch[after - 1] + share * (batch[after] - batch[after - 1]);
}

function told(event) {
  const who = [event.peer || (event.process !== "broker" ? event.process : ""), event.group_id === null || event.group_id === undefined ? "" : `group ${event.group_id}`, event.number ? `${event.number} leases` : "", event.batch === null || event.batch === undefined ? "" : `batch ${event.batch}`].filter(Boolean).join(", ");
  return `${event.event.replaceAll("_", " ")}${who ? `: ${who}` : ""}${event.reason ? ` (${event.reason})` : ""}${event.error ? `: ${event.error}` : ""}`;
}

function events(data, names, state, base) {
  const [{ events: found, columns }] = data;
  const range = state.zoom || rangeOf(data, state);
  const rows = Object.entries(KINDS).map(([lane, kinds]) => ({
    lane, colour: COLOURS[lane],
    items: found.filter((event) => kinds.includes(event.event)).map((event) => ({
      x: placeOf(event.time, columns, state), text: `${told(event)} · ${clock(event.time)}`,
      href: event.event === "dropped" ? `${base}/groups?status=dropped&first=${event.group_id}` : null,
    })),
  })).filter((row) => row.items.length);
  if (!rows.length) return null;
  const last = found.filter((event) => !["goodbye", "started", "learner_resumed"].includes(event.event)).sort((one, other) => other.time - one.time).slice(0, 12);
  return h("div", { style: { marginTop: "14px" } }, lanes(rows, { range, go }),
    last.length > 0 && h("details", { class: "card", style: { marginTop: "14px" } }, h("summary", {}, "The last events"),
      h("table", {}, h("tbody", {}, last.map((event) => h("tr", {}, h("td", { class: "soft" }, clock(event.time)), h("td", {}, told(event))))))));
}

function sets({ sets: found }) {
  if (!found || !found.length) return null;
  const rows = found.flatMap((each) => Object.entries(each.metrics).map(([metric, [value, low, high]]) => [each.set, metric, each.batch, each.policy_version, value, low, high, each.num_action_tokens]));
  return h("section", { class: "card scroll", style: { marginTop: "14px" } }, h("h2", {}, "Evaluation sets"), h("table", {},
    h("thead", {}, h("tr", {}, ["set", "metric", "after batch", "version", "value", "from", "to (95 %)", "sampled tokens"].map((name, place) => h("th", { class: place < 2 ? "" : "num" }, name)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map((value, place) => h("td", { class: place < 2 ? "" : "num" }, place < 2 ? value : number(value))))))));
}

function evaluations(first, base) {
  if (!first.evaluations.length) return null;
  const held = [...first.evaluations].sort((one, other) => other.batch - one.batch).slice(0, 10);
  return h("section", { class: "card scroll", style: { marginTop: "14px" } }, h("h2", {}, "Evaluations"), h("table", {},
    h("thead", {}, h("tr", {}, ["after batch", "version", "held-out reward", "finished", "failed"].map((name) => h("th", { class: "num" }, name)), h("th", {}))),
    h("tbody", {}, held.map((each) => h("tr", {}, [each.batch, each.policy_version, each.reward, each.num_finished, each.num_failed].map((value) => h("td", { class: "num" }, number(value))), h("td", {}, h("a", { href: `${base}/tasks/eval/0?at=${each.policy_version}` }, "texts")))))));
}
