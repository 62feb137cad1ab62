// Asks the server. An answer that is asked for again before it came is not awaited twice.

import { visible } from "/static/dom.js";

const pending = new Map();

export class Refused extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

async function answer(path, options) {
  let response;
  try {
    response = await fetch(path, { credentials: "same-origin", ...options });
  } catch {
    throw new Refused(0, "gspo view does not answer any more: was it ended? Start it again, and this page goes on.");
  }
  const plain = await response.json();
  if (!response.ok) throw new Refused(response.status, plain.error || response.statusText);
  return plain;
}

export function get(path) {
  if (!pending.has(path)) pending.set(path, answer(path).finally(() => pending.delete(path)));
  return pending.get(path);
}

export const post = (path) => answer(path, { method: "POST", headers: { "X-Gspo-View": "1" } });

export const ofRun = (run, rest) => `/api/runs/${encodeURIComponent(run)}/${rest}`;

// Fills in what is expected, which may take as long as the run's tasks take to be read. Elements name their task in data-expected.
export async function expect(root, run) {
  const places = [...root.querySelectorAll("[data-expected]")];
  const wanted = [...new Set(places.map((place) => place.dataset.expected))];
  if (!wanted.length) return;
  const query = new URLSearchParams(wanted.map((task) => ["task", task]));
  const found = await get(ofRun(run, `expected?${query}`)).catch((error) => ({ expected: {}, error: error.message }));
  for (const place of places) {
    const text = found.expected[place.dataset.expected];
    place.textContent = text === undefined ? "–" : visible(text);
    place.classList.toggle("soft", text === undefined);
  }
  for (const note of root.querySelectorAll("[data-expected-error]")) {
    note.hidden = !found.error;
    note.textContent = visible(found.error);
  }
}
