// The router: an address is a view, so every view can be shared as a link.

import { get } from "/static/api.js";
import { h, hideTip, replace } from "/static/dom.js";

const VIEWS = [
  [/^\/$/, () => import("/static/runs.js")],
  [/^\/r\/([^/]+)\/?$/, () => import("/static/overview.js")],
  [/^\/r\/([^/]+)\/batches\/(\d+)$/, () => import("/static/groups.js")],
  [/^\/r\/([^/]+)\/completions$/, () => import("/static/completions.js")],
  [/^\/r\/([^/]+)\/groups$/, () => import("/static/groups.js")],
  [/^\/r\/([^/]+)\/t\/(\d+)$/, () => import("/static/trajectory.js")],
  [/^\/r\/([^/]+)\/tasks\/(train|eval)\/(\d+)$/, () => import("/static/tasks.js")],
];

const main = document.getElementById("main");
let shown = 0;
let stop = () => {};
let keys = {};

// What keys do in the view that is shown, by their names. Fields keep their own.
export function onKeys(handlers) {
  keys = handlers;
}

export function go(address, { replaces = false } = {}) {
  history[replaces ? "replaceState" : "pushState"]({}, "", address);
  show();
}

// Changes the query of the address without drawing the view again.
export function remember(changes) {
  const query = new URLSearchParams(location.search);
  for (const [name, value] of Object.entries(changes)) {
    if (value === "" || value === null || value === undefined) query.delete(name);
    else query.set(name, value);
  }
  const text = query.toString();
  history.replaceState({}, "", location.pathname + (text ? `?${text}` : ""));
}

async function show() {
  const number = ++shown;
  stop();
  stop = () => {};
  keys = {};
  hideTip();
  const [, load] = VIEWS.find(([pattern]) => pattern.test(location.pathname)) || [];
  const words = (VIEWS.find(([pattern]) => pattern.test(location.pathname)) || [/$^/])[0].exec(location.pathname) || [];
  const parameters = words.slice(1).map(decodeURIComponent);
  head(parameters[0]);
  delete main.dataset.ready;
  if (!main.firstChild) replace(main, h("h1", { class: "soft" }, parameters[0] || "Runs"));
  if (!load) {
    replace(main, h("h1", {}, "There is nothing here"), h("p", {}, h("a", { href: "/" }, "All runs")));
    return;
  }
  try {
    const view = await load();
    const place = h("div", {});
    const ended = await view.show(place, parameters, new URLSearchParams(location.search), () => number === shown);
    if (number !== shown) {
      if (ended) ended();
      return;
    }
    stop = ended || (() => {});
    replace(main, place);
    main.dataset.ready = location.pathname;
  } catch (error) {
    if (number === shown) replace(main, h("h1", {}, "This cannot be shown"), h("p", { class: "note bad" }, error.message));
  }
}

function head(run) {
  const base = run === undefined ? null : `/r/${encodeURIComponent(run)}`;
  const at = location.pathname;
  const link = (href, text, here) => h("a", { href, "aria-current": here ? "page" : null }, text);
  const theme = h("button", { class: "plain", title: "Light or dark", "aria-label": "Light or dark", onclick: turn }, "◐");
  replace(
    document.getElementById("head"),
    h("div", { class: "bar" },
      h("a", { class: "brand", href: "/" }, h("img", { src: "/static/icon.svg", alt: "" }), "gspo view"),
      base && h("nav", { "aria-label": run },
        link(base, run, at === base),
        link(`${base}/completions`, "Completions", at.endsWith("/completions")),
        link(`${base}/groups`, "Groups", at.endsWith("/groups") && !location.search.includes("dropped")),
        link(`${base}/groups?status=dropped`, "Dropped", location.search.includes("dropped")),
        link(`${base}/tasks/eval/0`, "Held-out texts", at.includes("/tasks/eval/"))),
      h("span", { class: "grow" }),
      base && h("form", { onsubmit: (event) => { event.preventDefault(); const id = event.target.elements.id.value; if (/^\d+$/.test(id)) go(`${base}/t/${id}`); } },
        h("label", {}, "trajectory", h("input", { name: "id", type: "number", min: 0, "aria-label": "trajectory number" }))),
      theme));
}

function turn() {
  const dark = document.documentElement.dataset.theme !== "dark";
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  localStorage.setItem("theme", dark ? "dark" : "light");
  show();
}

document.documentElement.dataset.theme = localStorage.getItem("theme") || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
addEventListener("popstate", show);
document.addEventListener("click", (event) => {
  const link = event.target instanceof Element ? event.target.closest("a[href]") : null;
  if (!link || link.origin !== location.origin || event.ctrlKey || event.metaKey || event.shiftKey || event.button || link.hasAttribute("download")) return;
  if (link.hash && link.getAttribute("href").startsWith("#")) return;
  event.preventDefault();
  go(link.getAttribute("href"));
  scrollTo(0, 0);
});
addEventListener("keydown", (event) => {
  const isField = event.target instanceof Element && event.target.closest("input, select, textarea");
  if (isField || event.defaultPrevented || event.altKey || event.ctrlKey || event.metaKey || event.shiftKey || !keys[event.key]) return;
  event.preventDefault();
  keys[event.key]();
});
if (location.pathname === "/") {
  get("/api/runs").then((runs) => (runs.length === 1 ? go(`/r/${encodeURIComponent(runs[0].name)}`, { replaces: true }) : show()), show);
} else {
  show();
}
