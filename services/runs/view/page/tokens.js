// Tokens in colour: each way of colouring has a value for every token, a scale, and a line for the hover.

import { css, exact, h, hideTip, showTip } from "/static/dom.js";

// Blue to rust through nothing for signed values; nothing to blue for sizes.
const mix = (colour, share) => `color-mix(in srgb, ${colour} ${Math.round(100 * Math.min(1, Math.max(0, share)))}%, transparent)`;
const signed = (limit) => (value) => mix(value > 0 ? "var(--c0)" : "var(--c4)", 0.75 * Math.min(1, Math.abs(value) / limit));
const sized = (limit, colour = "var(--c1)") => (value) => mix(colour, 0.75 * Math.min(1, Math.abs(value) / limit));

// Numbers of each token; those of the learner are laid over the tokens that were trained.
export function numbers(data) {
  const size = data.ids.length;
  const columns = { logprob: data.logprobs.map((each, index) => (data.versions[index] < 0 ? null : each)), version: data.versions.map((each) => (each < 0 ? null : each)) };
  for (const name of ["learner", "start", "ratio", "entropy", "advantage", "clip"]) columns[name] = new Array(size).fill(null);
  const order = [...new Set(data.ids.map((_, index) => index).filter((index) => data.trained[index]).map((index) => (data.sequences ? data.sequences[index] : 0)))].sort((one, other) => one - other);
  (data.learned_tokens || []).forEach((sequence, place) => {
    let at = 0;
    for (let index = 0; index < size; index++) {
      if (!data.trained[index] || (data.sequences ? data.sequences[index] : 0) !== order[place]) continue;
      for (const name of Object.keys(sequence)) columns[name][index] = sequence[name][at];
      at++;
    }
  });
  columns.difference = columns.start.map((each, index) => {
    const learner = each === null ? columns.learner[index] : each;
    return learner === null || columns.logprob[index] === null ? null : learner - columns.logprob[index];
  });
  const member = data.group.members.find((each) => each.id === data.id);
  if (!data.learned && member && member.advantage !== null) columns.advantage = columns.advantage.map((_, index) => (data.trained[index] ? member.advantage : null));
  return columns;
}

export const WAYS = {
  logprob: { text: "log-prob", from: "logprob", scale: () => sized(6, "var(--c1)"), ends: ["certain", "unlikely"] },
  difference: { text: "learner − engine", from: "difference", scale: (values) => signed(limit(values, 1e-6)), ends: ["engine likelier", "learner likelier"], learned: true },
  version: { text: "policy version", from: "version", scale: (values) => { const versions = [...new Set(values.filter((each) => each !== null))].sort((one, other) => one - other); return (value) => mix(`var(--c${versions.indexOf(value) % 6})`, 0.42); }, ends: null },
  ratio: { text: "ratio", from: "ratio", scale: (values) => { const most = limit(values.map((each) => (each === null ? null : Math.log(each))), 1e-4); return (value) => signed(most)(Math.log(value)); }, ends: ["below 1", "above 1"], learned: true },
  clip: { text: "clipped", from: "clip", scale: () => (value) => (value ? mix("var(--bad)", 0.5) : "transparent"), ends: ["trained", "clipped"], learned: true },
  advantage: { text: "advantage", from: "advantage", scale: (values) => signed(limit(values, 1)), ends: ["less of this", "more of this"] },
  entropy: { text: "entropy", from: "entropy", scale: () => sized(3, "var(--c2)"), ends: ["0", "3 nats"], learned: true },
  lease: { text: "lease", from: "epoch", scale: () => (value) => mix(`var(--c${value % 6})`, 0.4), ends: null },
  none: { text: "no colour", from: "none", scale: () => () => "transparent", ends: null },
};

function limit(values, least) {
  let most = least;
  for (const value of values) if (value !== null && Math.abs(value) > most) most = Math.abs(value);
  return most;
}

// The tokens from first to end, as spans that are coloured later.
export function spans(data, columns, first, end) {
  const special = new Set(data.special);
  const starts = new Set(data.chunks.map((chunk) => chunk.start));
  const found = [];
  for (let index = first; index < end; index++) {
    const text = data.text_error ? `${data.ids[index]} ` : data.texts[index] === "" ? "·" : data.texts[index].replaceAll("\n", "⏎\n");
    const classes = ["tk", data.versions[index] < 0 && "off", special.has(index) && "special", columns.clip[index] && "clipped", starts.has(index) && index > 0 && "cut"].filter(Boolean).join(" ");
    found.push(h("span", { class: classes, "data-token": index }, text));
  }
  return found;
}

export function colour(root, way, columns) {
  const { from, scale } = WAYS[way];
  const values = columns[from] || [];
  const paint = scale(values);
  for (const span of root.querySelectorAll(".tk")) {
    const value = values[span.dataset.token];
    span.style.backgroundColor = value === null || value === undefined ? "" : paint(value);
  }
}

export function hover(root, data, columns) {
  root.addEventListener("pointerover", (event) => {
    const span = event.target instanceof Element ? event.target.closest(".tk") : null;
    if (!span) return hideTip();
    showTip(event, told(Number(span.dataset.token), data, columns));
  });
  root.addEventListener("pointerleave", hideTip);
}

export function told(index, data, columns) {
  const rows = [["token", `${index}: ${JSON.stringify(data.texts[index])}`], ["id", String(data.ids[index])]];
  if (columns.version[index] === null) return [...rows, ["", "not the policy's: context"]];
  rows.push(["policy version", String(columns.version[index])], ["engine log-prob", exact(columns.logprob[index])]);
  if (!data.trained[index]) return [...rows, ["", "of a turn that is not trained on"]];
  const add = (name, from) => columns[from][index] !== null && rows.push([name, exact(columns[from][index])]);
  add("learner, batch start", "start");
  add("learner, when trained", "learner");
  add("learner − engine", "difference");
  add("ratio s", "ratio");
  if (columns.clip[index] !== null) rows.push(["clipped", ["no", "at the upper bound", "at the lower bound"][columns.clip[index]]]);
  add("advantage", "advantage");
  add("entropy, nats", "entropy");
  return [...rows, ["lease", String(data.epochs[index])]];
}

// A strip that shows a way's colours from end to end.
export function strip(way) {
  const { ends } = WAYS[way];
  if (!ends) return null;
  const canvas = h("canvas", { width: 120, height: 10 });
  const context = canvas.getContext("2d");
  const signedWay = ["difference", "ratio", "advantage"].includes(way);
  const tone = css(way === "clip" ? "--bad" : way === "entropy" ? "--c2" : "--c1");
  for (let at = 0; at < 120; at++) {
    const share = signedWay ? at / 60 - 1 : at / 119;
    context.globalAlpha = 0.75 * Math.abs(share);
    context.fillStyle = signedWay ? css(share > 0 ? "--c0" : "--c4") : tone;
    context.fillRect(at, 0, 1, 10);
  }
  return h("span", { class: "scale" }, ends[0], canvas, ends[1]);
}
