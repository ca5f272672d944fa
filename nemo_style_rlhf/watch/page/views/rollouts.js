// Rollouts: samples of all steps as a table to filter and sort, by sample, by group or by prompt; and a search in their texts.

import { decimal } from "../colors.js";
import { el, fill } from "../dom.js";
import { marked, oneLine, patternOf } from "../text.js";
import { chooser, filterPanel, filterText, searchBox } from "./rollout_controls.js";

const PAGE = 50;
const POLL_MS = 5000;
const READING_MS = 600;
const LINES = ["prompt", "response", "label"];
const KINDS = { sample: "Samples", group: "Groups", prompt: "Prompts" };
const DEFAULT_COLUMNS = {
  sample: ["step", "prompt", "response", "reward", "kl_max", "response_tokens", "finish_reason"],
  group: ["step", "prompt", "samples", "reward_mean", "reward_spread", "reward_min", "reward_max", "truncated"],
  prompt: ["prompt", "steps", "last_step", "reward_first", "reward_last", "reward_change", "truncated"],
};
const NEWEST = { sample: "step", group: "step", prompt: "last_step" };
const PRESETS = [
  ["Newest", {}],
  ["Worst KL", { sort: "kl_max" }],
  ["Highest reward", { sort: "reward" }],
  ["Lowest reward", { sort: "reward", desc: "0" }],
  ["Failed", { filter: "failed:eq:true" }],
  ["Truncated", { filter: "finish_reason:eq:length" }],
];

export async function show(container, query, api) {
  const { rollouts: runs } = await api.get("/api/recorded");
  if (!runs.length) {
    return void fill(container, el("h1", "Rollouts"), el("p.empty", "No run here has recorded rollouts yet. They appear with its first recorded step."));
  }
  const run = runs.includes(query.get("run")) ? query.get("run") : runs[0];
  const by = query.get("by") in KINDS ? query.get("by") : "sample";
  const state = { run, by, sort: query.get("sort"), desc: query.get("desc"), filter: query.getAll("filter"), offset: Number(query.get("offset")) || 0, columns: query.get("columns") };
  const change = (changes) => api.go("rollouts", { ...state, offset: 0, ...changes });
  const params = { ...state, columns: null, sort: state.sort ?? NEWEST[by], limit: PAGE };
  const place = { facts: el("p.facts"), controls: el("div.controls"), body: el("div"), current: 0, answer: null };
  api.title(`Rollouts of ${run}`);
  const box = searchBox(api, run, (hits) => showHits(place, hits, api, run, () => draw(place, state, params, api, change)));
  fill(container, place.facts, el("div.controls", chooser(runs, run, (chosen) => api.go("rollouts", { run: chosen })), !api.isReport && box.element), place.controls, place.body);

  let timer = null;
  let ended = false;
  async function load() {
    const answer = await api.get("/api/rollouts", params);
    if (ended) return;
    const same = place.answer && JSON.stringify(place.answer) === JSON.stringify(answer);
    place.answer = answer;
    if (!api.isReport) api.status(readingOf(answer));
    if (!same && !box.busy()) {
      controls(place, state, change, api);
      draw(place, state, params, api, change);
    }
    return answer.files_read < answer.files ? READING_MS : POLL_MS;
  }
  function follow(wait) {
    if (!ended && !api.isReport && (wait === READING_MS || state.offset === 0)) timer = setTimeout(again, wait);
  }
  async function again() {
    let wait = POLL_MS;
    try {
      if (!document.hidden) wait = await load();
    } catch (error) {
      api.status(error.message);
    }
    follow(wait);
  }
  bindKeys(place, state, api, change, box);
  follow(await load());
  return () => {
    ended = true;
    clearTimeout(timer);
    box.stop();
  };
}

function bindKeys(place, state, api, change, box) {
  const move = (by) => {
    const rows = place.body.querySelectorAll("[data-href]");
    if (!rows.length) return;
    place.current = Math.min(rows.length - 1, Math.max(0, place.current + by));
    rows.forEach((row, index) => row.classList.toggle("current", index === place.current));
    rows[place.current].scrollIntoView({ block: "nearest" });
  };
  const turn = (by) => {
    const offset = state.offset + by * PAGE;
    if (offset >= 0 && offset < (place.answer?.total ?? 0)) change({ offset });
  };
  api.keys({
    "j ArrowDown": ["next row", () => move(1)],
    "k ArrowUp": ["row before", () => move(-1)],
    Enter: ["open the row", () => document.activeElement.matches("a, button, summary") ? document.activeElement.click() : openRow(place)],
    n: ["next page", () => turn(1)],
    p: ["page before", () => turn(-1)],
    "/": ["search the texts", () => box.focus()],
    Escape: ["end the search", () => box.clear()],
  });
}

function openRow(place) {
  const row = place.body.querySelectorAll("[data-href]")[place.current];
  if (row) location.hash = row.dataset.href;
}

/** The server's progress in reading the files, and the files that it cannot read. */
function readingOf({ files_read: read, files, damaged }) {
  const parts = [read < files && `reading: ${read} of ${files} files`, damaged && `damaged files: ${damaged}`];
  return parts.filter(Boolean).join("; ");
}

function controls(place, state, change, api) {
  const { answer } = place;
  const choices = Object.entries(KINDS).map(([name, title]) =>
    el("button", { type: "button", "aria-pressed": String(name === state.by), onclick: () => change({ by: name, sort: null, desc: null, columns: null }) }, title),
  );
  const presets = PRESETS.map(([title, { sort = null, desc = null, filter = [] }]) => {
    const on = state.sort === sort && (state.desc ?? null) === desc && state.filter.join() === [filter].flat().join();
    return el("button", { type: "button", "aria-pressed": String(on), onclick: () => change({ by: "sample", sort, desc, filter, columns: state.by === "sample" ? state.columns : null }) }, title);
  });
  const chips = state.filter.map((filter) =>
    el("button.chip", { type: "button", title: "remove this filter", onclick: () => change({ filter: state.filter.filter((each) => each !== filter) }) }, filterText(filter), " ×"),
  );
  const opened = place.controls.querySelector("details[open]")?.dataset.name;
  const panels = [
    filterPanel(answer.sample_columns, (filter) => change({ filter: [...state.filter, filter] })),
    columnPanel(place, state, change),
  ];
  for (const panel of panels) panel.open = panel.dataset.name === opened;
  fill(
    place.controls,
    !api.isReport && el("div.choices", { role: "group", "aria-label": "Rows" }, choices),
    el("div.choices", { role: "group", "aria-label": "Presets" }, presets),
    chips,
    panels,
  );
}

function columnsOf(answer, state) {
  const there = [...answer.columns.map(({ name }) => name), ...(state.by === "sample" ? LINES : ["prompt"])];
  const chosen = state.columns?.split(",") ?? DEFAULT_COLUMNS[state.by];
  return { there, shown: chosen.filter((name) => there.includes(name)) };
}

function columnPanel(place, state, change) {
  const { there, shown } = columnsOf(place.answer, state);
  const boxes = there.map((name) => {
    const toggle = (event) => change({ columns: (event.target.checked ? [...shown, name] : shown.filter((each) => each !== name)).join(","), offset: state.offset });
    return el("label", el("input", { type: "checkbox", checked: shown.includes(name), onchange: toggle }), name);
  });
  return el("details.more", { "data-name": "columns" }, el("summary", "Columns"), el("div.panel.columns", boxes));
}

function draw(place, state, params, api, change) {
  const { answer } = place;
  place.current = Math.max(0, Math.min(place.current, answer.rows.length - 1));
  fill(place.facts, totals(answer.totals));
  if (!answer.rows.length) {
    const none = state.filter.length ? "No sample passes these filters." : "This run has recorded no samples yet.";
    return void fill(place.body, el("p.empty", none));
  }
  const { shown } = columnsOf(answer, state);
  const numbers = answer.columns.filter(({ kind }) => !["VARCHAR", "BOOLEAN"].includes(kind));
  const numeric = new Map(numbers.map(({ name, kind }) => [name, ["FLOAT", "DOUBLE"].includes(kind)])); // whether it has decimals
  const heads = shown.map((name) => head(name, params, change, numeric.has(name)));
  const rows = answer.rows.map((row, index) => tableRow(row, index, shown, numeric, state, params, api));
  rows[place.current].classList.add("current");
  const table = el("table.samples", el("thead", el("tr", heads)), el("tbody", rows));
  fill(place.body, el("div.scroll", { tabindex: "0", role: "region", "aria-label": KINDS[state.by] }, table), pager(answer, state, change));
}

const TITLES = { response_tokens: "tokens", finish_reason: "ended by", prompt_id: "prompt's id" };
const titleOf = (name) => TITLES[name] ?? name.replaceAll("_", " ");

function head(name, params, change, isNumber) {
  const title = titleOf(name);
  if (LINES.includes(name)) return el("th", { scope: "col" }, title);
  const sorted = params.sort === name;
  const descending = params.desc !== "0";
  const sort = () => change({ sort: name, desc: sorted && descending ? "0" : null });
  const arrow = sorted ? (descending ? " ↓" : " ↑") : "";
  return el(isNumber ? "th.number" : "th", { scope: "col", "aria-sort": sorted ? (descending ? "descending" : "ascending") : null }, el("button", { type: "button", onclick: sort }, title, arrow));
}

function tableRow(row, index, shown, numeric, state, params, api) {
  const href = hrefOf(row, index, state, params, api);
  const cells = shown.map((name) => {
    if (LINES.includes(name)) return el("td.line", { "data-name": name, dir: "auto" }, el("a", { href, tabindex: "-1" }, oneLine(row[name])));
    const value = row[name];
    return el(numeric.has(name) ? "td.number" : "td", { "data-name": titleOf(name) }, numeric.get(name) && Number.isInteger(value) ? value.toFixed(3).replace("-", "−") : decimal(value));
  });
  const open = (event) => event.target.closest("a") ?? (location.hash = href);
  return el("tr", { "data-href": href, onclick: open }, cells);
}

function hrefOf(row, index, state, params, api) {
  if (state.by === "prompt") return api.hash("prompt", { run: state.run, prompt_id: row.prompt_id });
  if (state.by === "group") return api.hash("prompt", { run: state.run, prompt_id: row.prompt_id, step: row.step });
  return api.hash("sample", { run: state.run, step: row.step, row: row.row, at: state.offset + index, sort: params.sort, desc: state.desc, filter: state.filter });
}

function totals(totals) {
  if (!totals.samples) return "no samples";
  const part = (count) => `${((100 * count) / totals.samples).toFixed(1)} %`;
  const steps = totals.steps === 1 ? `step ${totals.first_step}` : `${totals.steps.toLocaleString("en")} steps (${totals.first_step}–${totals.last_step})`;
  return [
    el("b", totals.samples.toLocaleString("en")), totals.samples === 1 ? " sample of " : " samples of ", steps, " · mean reward ", el("b", decimal(totals.reward_mean)),
    ` · ${Math.round(totals.response_tokens).toLocaleString("en")} tokens each · ${part(totals.truncated)} truncated`,
    totals.failed ? ` · ${totals.failed.toLocaleString("en")} failed` : "",
  ];
}

function pager(answer, state, change) {
  const last = Math.min(state.offset + PAGE, answer.total);
  if (!state.offset && last === answer.total) return null;
  const button = (title, offset, on) => el("button", { type: "button", disabled: !on, onclick: () => change({ offset }) }, title);
  return el(
    "div.pager",
    button("← Before", Math.max(0, state.offset - PAGE), state.offset > 0),
    el("span", `${(state.offset + 1).toLocaleString("en")}–${last.toLocaleString("en")} of ${answer.total.toLocaleString("en")}`),
    button("Next →", state.offset + PAGE, last < answer.total),
  );
}

function showHits(place, hits, api, run, back) {
  if (hits === null) return void (place.answer && back());
  const { words, found, end, searched, of } = hits;
  const where = of ? `${searched.toLocaleString("en")} of ${of.toLocaleString("en")} steps searched` : "searching";
  const state = end ? (end.cut ? "the first " : "") : "";
  fill(place.facts, state, el("b", found.length.toLocaleString("en")), ` ${found.length === 1 ? "sample has" : "samples have"} “`, marked(words, null), `” · ${where}`);
  if (hits.drawn === 0) {
    place.current = 0;
    hits.list = el("ol.hits");
    fill(place.body, hits.list);
  }
  const pattern = patternOf(words);
  for (const hit of found.slice(hits.drawn)) {
    const href = api.hash("sample", { run, step: hit.step, row: hit.row, q: words });
    const text = [hit.cut_before ? "…" : "", marked(hit.before, null), marked(hit.match, pattern), marked(hit.after, null), hit.cut_after ? "…" : ""];
    const about = `step ${hit.step} · sample ${hit.row} · ${hit.where} · reward ${decimal(hit.reward)}`;
    hits.list.append(el(hits.drawn++ ? "li" : "li.current", { "data-href": href }, el("div.where", about), el("a.text", { href, dir: "auto" }, text)));
  }
  if (end && !found.length) fill(place.body, el("p.empty", "No prompt and no response has this text."));
}
