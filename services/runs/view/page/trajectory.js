// One trajectory: messages and tokens side by side, what the learner made of it, its leases, its siblings.

import { get, ofRun } from "/static/api.js";
import { go, onKeys, remember } from "/static/app.js";
import { append, h, number, replace, visible } from "/static/dom.js";
import { explained } from "/static/explain.js";
import { card, tell } from "/static/groups.js";
import { colour, hover, numbers, spans, strip, WAYS } from "/static/tokens.js";

const PART = 3000;

export async function show(place, [run, id], query, isShown) {
  const base = `/r/${encodeURIComponent(run)}`;
  const data = await get(ofRun(run, `trajectories/${id}`));
  const member = data.group.members.find((each) => each.id === data.id);
  document.title = `trajectory ${id} · ${visible(run)}`;
  const finish = { done: "finished", length: "cut off at a limit" }[member.finish] || member.status;
  const figures = [
    [number(member.reward), "reward"], [number(member.advantage), "advantage"], [number(member.lag), "lag"],
    [number(member.tokens), "tokens"], [number(member.action_tokens), "the policy's own"], [number(data.leases ? data.leases.length : member.epoch), "leases"],
  ];
  append(place, 
    h("h1", {}, `Trajectory ${id}`),
    h("p", { class: "soft" }, `${finish}${member.attempts ? `, ${member.attempts} failed attempts` : ""}. `, h("a", { href: `${base}/tasks/${data.group.split}/${data.group.task_index}` }, `${data.group.split === "eval" ? "Held-out task" : "Task"} ${data.group.task_index}`),
      data.group.batch !== null && [" in ", h("a", { href: `${base}/batches/${data.group.batch}` }, `batch ${data.group.batch}`)],
      data.group.status === "dropped" && [". ", h("span", { class: "badge bad" }, `its group was dropped: ${data.group.drop_reason}`)],
      data.holder && `. ${data.holder} has it now.`),
    h("div", { class: "figures" }, figures.map(([value, name]) => h("div", { class: "figure" }, h("b", {}, value), h("span", {}, name))),
      Object.entries(member.components).map(([name, value]) => h("div", { class: "figure" }, h("b", {}, number(value)), h("span", {}, name)))),
    h("p", { class: "card" }, h("span", { class: "soft" }, "Expected: "), h("span", { class: "says", "data-expected": `${data.group.source}:${data.group.task_index}` })),
    h("p", { class: "note", hidden: true, "data-expected-error": "" }),
    data.damage && h("p", { class: "note bad" }, data.damage),
    data.learner_error && h("p", { class: "note" }, data.learner_error));
  if (data.ids) {
    const columns = { ...numbers(data), epoch: data.epochs };
    append(place, ...conversation(data, columns, query));
    append(place, h("section", { class: "card", style: { marginTop: "14px" } }, ...explained(run, data, isShown)), leases(data));
  }
  append(place, h("h2", { style: { marginTop: "22px" } }, "Its group"), card(data.group, base, data.id),
    h("p", { class: "small soft" }, "Keys: ← → for the others of its group", data.group.batch !== null && ", ↑ for its batch"));
  tell(place, run);
  const step = (by) => {
    const other = data.group.members[data.group.members.indexOf(member) + by];
    if (other) go(`${base}/t/${other.id}`);
  };
  onKeys({ ArrowLeft: () => step(-1), ArrowRight: () => step(1), ...(data.group.batch === null ? {} : { ArrowUp: () => go(`${base}/batches/${data.group.batch}`) }) });
}

function conversation(data, columns, query) {
  const area = h("div", {});
  const state = { way: WAYS[query.get("colour")] ? query.get("colour") : "logprob" };
  const bar = h("div", { class: "pills", role: "group", "aria-label": "colour of tokens" });
  const draw = () => {
    replace(bar, Object.entries(WAYS).map(([way, { text, learned }]) => h("button", {
      "aria-pressed": String(way === state.way), "data-way": way, title: learned && !data.learned ? "the learner's numbers are not there: see below" : null, style: { opacity: learned && !data.learned ? 0.5 : 1 },
      onclick: () => { state.way = way; remember({ colour: way === "logprob" ? "" : way }); draw(); } }, text)), strip(state.way));
    colour(area, state.way, columns);
  };
  let at = 0;
  let drawn = 0;
  const turns = [];
  for (const [kind, turn, size, sequence] of data.segments) {
    const first = at;
    at = Math.min(at + size, data.ids.length);
    if (at > first) turns.push({ kind, turn, sequence, first, end: at });
  }
  const several = data.sequences !== null;
  const add = () => {
    let room = PART;
    while (drawn < turns.length && room > 0) {
      area.append(message(data, columns, turns[drawn], several));
      room -= turns[drawn].end - turns[drawn].first;
      drawn++;
    }
    if (drawn < turns.length) requestAnimationFrame(() => { add(); colour(area, state.way, columns); });
  };
  add();
  draw();
  hover(area, data, columns);
  return [
    data.text_error && h("p", { class: "note" }, data.text_error),
    data.ids.length < data.num_tokens && h("p", { class: "note" }, `The first ${number(data.ids.length)} of ${number(data.num_tokens)} tokens are shown.`),
    bar, h("section", { class: "card", id: "conversation" }, turns.length ? area : h("p", { class: "soft" }, "No token was acknowledged.")),
  ].filter(Boolean);
}

function message(data, columns, { kind, turn, sequence, first, end }, several) {
  const special = new Set(data.special);
  const text = data.text_error ? "" : data.texts.slice(first, end).filter((_, index) => !special.has(first + index)).join("");
  const discarded = kind === "action" && data.discarded_turns.includes(turn);
  const role = kind === "action" && data.turn_roles[turn] ? ` as ${data.turn_roles[turn]}` : "";
  const who = kind === "action" ? `Policy${role}${discarded ? ", not trained on" : ""}` : first === 0 ? "Prompt" : "Environment";
  const reward = kind === "action" && data.turn_rewards.length > 1 && data.turn_rewards[turn] !== undefined ? `reward ${number(data.turn_rewards[turn])}` : "";
  // A message of a great many tokens is drawn in parts, so that the first ones are there at once.
  const held = h("div", { class: "tokens" }, spans(data, columns, first, Math.min(end, first + PART)));
  for (let from = first + PART; from < end; from += PART) setTimeout(() => held.append(...spans(data, columns, from, Math.min(end, from + PART))), 0);
  return h("div", { class: `turn ${kind === "action" ? "model" : ""}` },
    h("div", { class: "who" }, h("b", {}, who), [kind === "action" && `turn ${turn + 1}`, several && `sequence ${sequence}`, `${number(end - first)} tokens`, reward].filter(Boolean).map((each) => h("span", {}, each))),
    h("div", { class: "said" }, text.trim() || (data.text_error ? "" : "(no text)")), held);
}

function leases(data) {
  const total = data.num_tokens || 1;
  const rows = data.leases.map((lease, index) => {
    const before = data.leases[index - 1];
    const cost = !before && !lease.skipped_epochs ? "began it" : before
      ? `continued at token ${lease.start}: nothing acknowledged was lost; tokens that were sampled and not yet streamed were sampled again, and ${number(lease.start)} tokens were read into a cache again`
      : "began it";
    return h("tr", {}, h("td", { class: "num" }, lease.epoch), h("td", { style: { whiteSpace: "nowrap" } }, server(data, lease, index)), h("td", { class: "num" }, `${lease.start}–${lease.start + lease.num_tokens - 1}`), h("td", { class: "num" }, lease.num_chunks),
      h("td", {}, cost, lease.skipped_epochs > 0 && `; ${lease.skipped_epochs} leases before it brought no token`));
  });
  return h("section", { class: "card", style: { marginTop: "14px" }, id: "leases" }, h("h2", {}, "How it was made"),
    h("div", { class: "lease" }, data.chunks.map((chunk) => h("span", { title: `tokens ${chunk.start} to ${chunk.start + chunk.tokens - 1}, lease ${chunk.epoch}`, style: { width: `${(100 * chunk.tokens) / total}%`, background: `var(--c${chunk.epoch % 6})`, opacity: 0.7 } }))),
    h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", { class: "num" }, "lease"), h("th", {}, "server"), h("th", { class: "num" }, "tokens"), h("th", { class: "num" }, "chunks"), h("th", {}, ""))), h("tbody", {}, rows))),
    data.log_events.length > 0 && h("p", { class: "small soft" }, "From the logs: ", data.log_events.map((event) => `${event.event.replaceAll("_", " ")} at ${event.peer || event.process}${event.num_tokens === undefined ? "" : `, ${event.num_tokens} tokens acknowledged`}${event.reason ? ` (${event.reason})` : ""}`).join("; ")));
}

// The ledger names the holder of a lease only while it lasts; the log names one that was lost.
function server(data, lease, index) {
  if (lease.peer) return lease.peer;
  const last = index === data.leases.length - 1;
  if (last && data.holder) return data.holder;
  const lost = data.log_events.filter((event) => event.peer)[index];
  return !last && lost ? lost.peer : h("span", { class: "soft" }, "not recorded");
}
