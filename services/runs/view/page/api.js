// Asks the server. An answer that is asked for again before it came is not awaited twice.

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
