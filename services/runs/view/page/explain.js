// What the learner made of a trajectory, in words and numbers: log s, lag, n, clip range, and what followed.

import { get, ofRun, post } from "/static/api.js";
import { exact, h, number, replace, s } from "/static/dom.js";

const EVERY_MS = 1000;

export function explained(run, data, isShown) {
  const heading = h("h2", {}, "What the learner made of it");
  if (data.learned) return [heading, ...data.learned.sequences.map((sequence, index) => sentence(sequence, data, index)), source(data.learned.source)];
  if (data.group.batch === null) return [heading, h("p", { class: "soft" }, data.group.status === "dropped" ? "It was dropped, and the learner never saw it." : data.group.status === "filtered" ? "Its group was filtered out, because all its rewards are equal: it has no gradient, and another prompt took its place." : data.group.split === "eval" ? "It belongs to an evaluation: nothing is trained on it." : "It is in no batch yet.")];
  return [heading, asked(run, data, isShown)];
}

const source = (name) => h("p", { class: "small soft" }, name === "recorded" ? "Recorded by the learner while it trained (learner.dump_tokens)." : name === "replayed" ? "From a replay of the batch beside the run, which came to the run's own weights, bit for bit." : "From a replay that came to other weights than the run, as on another machine or number of ranks: the numbers are close to the run's, not equal.");

function sentence(sequence, data, index) {
  const { n, log_s: logS, lag, low, high, advantage, weight } = sequence;
  const code = (text) => h("code", {}, text);
  const clipped = sequence.clipped_high + sequence.clipped_low;
  const outside = logS > high ? "above" : logS < low ? "below" : "inside";
  const why = weight === 0 ? "Its mismatch with the engine was too large, so it was rejected: it changes nothing."
    : advantage === 0 ? "Its advantage is 0: it changes nothing, whatever its ratio."
    : clipped > 0 ? `It lies ${outside} the range, and its advantage is ${advantage > 0 ? "positive: the policy already does more of this than one batch may add" : "negative: the policy already does less of this than one batch may take"}. So ${clipped < 1 ? `${Math.round(100 * clipped)} % of its tokens are` : "it is"} clipped: no gradient.`
    : outside === "inside" ? "It lies inside the range: its gradient counts."
    : `It lies ${outside} the range, but on the side to which its advantage pulls it back: its gradient counts.`;
  const titles = ["n", "log s", "lag", "clip range", "advantage", "weight", "entropy", "learner − engine", "step of the batch"];
  const values = [n, exact(logS), exact(lag), `${exact(low)} to ${exact(high)}`, exact(advantage), exact(weight), exact(sequence.entropy), exact(sequence.mismatch), sequence.step + 1];
  return h("div", { class: "explain", "data-clipped": clipped > 0 ? "yes" : "no" },
    data.learned.sequences.length > 1 && h("p", { class: "soft small" }, `Sequence ${index + 1} of ${data.learned.sequences.length}`),
    h("p", {}, "Over its ", code(`n = ${n}`), " tokens the mean log-ratio is ", code(`log s = ${exact(logS)}`), ", so ", code(`s = ${exact(Math.exp(logS))}`), ". With lag ", code(exact(lag)), " it may lie between ", code(exact(low)), " and ", code(exact(high)), ". ", why),
    picture(logS, low, high),
    h("details", {}, h("summary", { class: "small soft" }, "All numbers"), h("table", {}, h("tbody", {}, titles.map((title, at) => h("tr", {}, h("td", { class: "soft" }, title), h("td", { class: "num", "data-number": title }, values[at])))))));
}

// log s on a line, with the clip range as a band.
function picture(value, low, high) {
  const reach = 1.25 * Math.max(Math.abs(value), Math.abs(low), Math.abs(high), 1e-9);
  const x = (at) => 300 + (at / reach) * 280;
  const outside = value > high || value < low;
  return s("svg", { class: "bounds", viewBox: "0 0 600 64", role: "img", "aria-label": `log s ${exact(value)} in a clip range from ${exact(low)} to ${exact(high)}` },
    s("line", { x1: 10, x2: 590, y1: 32, y2: 32, class: "gridline" }),
    s("rect", { x: x(low), width: Math.max(2, x(high) - x(low)), y: 20, height: 24, rx: 5, style: { fill: "var(--accent)", opacity: 0.22 } }),
    s("line", { x1: 300, x2: 300, y1: 16, y2: 48, class: "cross" }),
    s("circle", { cx: x(value), cy: 32, r: 6, style: { fill: outside ? "var(--bad)" : "var(--good)" } }),
    s("text", { x: x(value), y: 12, "text-anchor": "middle" }, "log s"), s("text", { x: 300, y: 60, "text-anchor": "middle" }, "0"));
}

function asked(run, data, isShown) {
  const { batch } = data.group;
  const place = h("div", {});
  const path = ofRun(run, `learner/${batch}`);
  const draw = (state) => {
    if (state.state === "replaying") {
      replace(place, h("p", {}, `Replaying batch ${state.replaying}: ${state.done} of ${state.wanted} batches are trained. `, h("progress", { max: state.wanted, value: state.done || null })));
      return;
    }
    replace(place, h("p", {}, "The run did not record what the learner computes for each token. Replaying its batches up to this one gives the same numbers, bit for bit; it takes about as long as training them did, in another process, and writes nothing into the run."),
      state.error && h("p", { class: "note bad" }, state.error),
      h("button", { onclick: start }, `Replay up to batch ${batch}`));
  };
  const failed = (error) => replace(place, h("p", { class: "note bad" }, error.message));
  const follow = async () => {
    const state = await get(path);
    if (!isShown()) return;
    if (["recorded", "replayed", "differs"].includes(state.state)) {
      dispatchEvent(new PopStateEvent("popstate"));
      return;
    }
    draw(state);
    if (state.state === "replaying") setTimeout(() => follow().catch(failed), EVERY_MS);
  };
  const start = () => post(path).then(follow).catch(failed);
  follow().catch(failed);
  return place;
}
