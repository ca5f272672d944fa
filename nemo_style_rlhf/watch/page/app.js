// The router: an address such as #/runs?run=a&run=b names a view, views/runs.js, and what it shows.

import * as api from "./api.js";
import { el, fill } from "./dom.js";
import * as keys from "./keys.js";

/** Views by name: the title in the navigation, the key that leads there, and the module. A view without a title is reached by links. */
const VIEWS = {
  runs: { title: "Runs", key: "1", load: () => import("./views/runs.js") },
  timeline: { title: "Timeline", key: "2", load: () => import("./views/timeline.js") },
  rollouts: { title: "Rollouts", key: "3", load: () => import("./views/rollouts.js") },
  compare: { title: "Compare", key: "4", load: () => import("./views/compare.js") },
  sample: { parent: "rollouts", load: () => import("./views/sample.js") },
  prompt: { parent: "rollouts", load: () => import("./views/prompt.js") },
};
const HIDDEN = new Set([!api.hasComparisons && "compare", !api.hasRollouts && "rollouts"]);
const view = document.getElementById("view");
const nav = document.getElementById("nav");
const status = document.getElementById("status");
const quiet = api.isReport ? `report of ${api.exported}` : "";
let stop = null;
let shown = 0;

function parse() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?", 2);
  return { name: path in VIEWS ? path : "runs", query: new URLSearchParams(query) };
}

/** The address of a view: hash("runs", {run: ["a", "b"]}). */
export function hash(name, params = {}) {
  const query = new URLSearchParams();
  for (const [key, value] of params instanceof URLSearchParams ? params : Object.entries(params)) {
    for (const each of Array.isArray(value) ? value : [value]) {
      if (each !== null && each !== undefined && each !== "") query.append(key, each);
    }
  }
  return query.size ? `#/${name}?${query}` : `#/${name}`;
}

/** A view's third argument. */
const tools = {
  ...api,
  hash,
  keys: keys.bind,
  go: (name, params) => (location.hash = hash(name, params)),
  /** Changes the address without showing the view anew, for what the reader set in it. */
  replace: (name, params) => {
    history.replaceState(null, "", hash(name, params));
    navigate();
  },
  title: (text) => (document.title = text),
  /** A short text in the bar at the top. A report does not show that it lacks an answer. */
  status: (text) => text !== api.NOT_HERE && (status.textContent = text || quiet),
};

function navigate() {
  const { name, query } = parse();
  const current = VIEWS[name].parent ?? name;
  const runs = { run: query.getAll("run") }; // the chosen runs go along
  const links = Object.entries(VIEWS).filter(([each, { title }]) => title && !HIDDEN.has(each));
  fill(
    nav,
    links.map(([each, { title }]) =>
      el("a", { href: hash(each, runs), "aria-current": each === current ? "page" : null }, title),
    ),
  );
}

async function route() {
  const { name, query } = parse();
  const turn = ++shown;
  navigate();
  keys.bind({});
  status.textContent = quiet;
  stop?.();
  stop = null;
  const container = el("div", { class: `view ${name}` });
  fill(view, container);
  document.title = VIEWS[name].title ?? "Sample";
  try {
    const module = await VIEWS[name].load();
    // A view that still loads when the reader has left it must not take the keys of the next.
    const ours = { ...tools, keys: (bindings) => turn === shown && keys.bind(bindings) };
    const ended = await module.show(container, query, ours);
    if (turn === shown) stop = ended ?? null;
    else ended?.();
  } catch (error) {
    if (turn === shown) fail(container, error);
  }
}

function fail(container, error) {
  if (!(error instanceof api.Refused)) console.error(error);
  const sentence = error instanceof api.Refused ? error.message : `This view failed: ${error.message}`;
  container.prepend(el("p.failure", { role: "alert" }, sentence));
}

for (const [name, { key, title }] of Object.entries(VIEWS)) {
  if (key) keys.bindEverywhere({ [key]: [title, () => tools.go(name, { run: parse().query.getAll("run") })] });
}
keys.bindEverywhere({ "?": ["these keys", keys.showHelp] });
document.getElementById("help").addEventListener("click", keys.showHelp);
window.addEventListener("hashchange", route);
route();
