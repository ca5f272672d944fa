// A sample: its tokens colored by a number of theirs, all numbers of the token under the pointer, and its whole group.

import { QUANTITIES, decimal, legend, paint, scaleOf } from "../colors.js";
import { el, fill } from "../dom.js";
import { answerCards } from "./answers.js";
import { inspector } from "./inspector.js";
import { drawCourse, tokenSections } from "./token_sections.js";
import { textBlock } from "../text.js";

const WINDOW = 4000;
const CHOICE = "color";

export async function show(container, query, api) {
  const given = { run: query.get("run"), step: query.get("step"), row: query.get("row") };
  const first = Number(query.get("first")) || 0;
  const view = { api, query, given, data: await api.get("/api/sample", { ...given, first, count: WINDOW }), current: null };
  const { sample } = view.data;
  api.title(`Sample ${sample.row} of step ${sample.step}, ${given.run}`);
  view.tokens = tokenSections(view.data, (place) => select(view, place));
  view.inspector = inspector(view.data);
  view.course = el("canvas.course", { title: "the chosen number along the response", onclick: (event) => jump(view, event) });
  view.legend = el("div");
  view.group = el("section");
  const main = el("div", view.tokens.element ?? plain(view.data.sample), windowLinks(view, first), view.group);
  fill(
    container,
    header(view),
    facts(sample),
    view.tokens.element && el("div.controls", colorChoices(view), view.legend),
    view.tokens.element && view.course,
    el("div.sides", main, el("div.beside", view.tokens.element && view.inspector.element, rewards(sample))),
  );
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  const again = () => color(view);
  scheme.addEventListener("change", again);
  window.addEventListener("resize", again);
  color(view);
  bindKeys(view);
  view.inspector.show(null, view.quantity);
  showGroup(view).catch((error) => api.status(error.message));
  if (!api.isReport) neighbors(view).catch((error) => api.status(error.message));
  return () => {
    scheme.removeEventListener("change", again);
    window.removeEventListener("resize", again);
  };
}

function header(view) {
  const { sample } = view.data;
  view.before = el("a", { hidden: true }, "← before");
  view.after = el("a", { hidden: true }, "next →");
  const filters = { run: view.given.run, sort: view.query.get("sort"), desc: view.query.get("desc"), filter: view.query.getAll("filter") };
  view.up = view.api.hash("rollouts", filters);
  return el("div.head", el("h1", `Step ${sample.step}, sample ${sample.row}`), el("a", { href: view.up }, "all samples"), view.before, view.after);
}

function facts(sample) {
  const words = [
    ["reward", sample.failed ? "failed" : decimal(sample.reward)],
    ["tokens", decimal(sample.response_tokens)],
    ["ended by", sample.finish_reason],
    ["KL", decimal(sample.kl_sum)],
    ["largest KL", decimal(sample.kl_max)],
    ["mean advantage", decimal(sample.advantage_mean)],
    ["weights version", sample.weights_version],
  ].filter(([, value]) => value !== "–" && value !== null && value !== undefined);
  const label = sample.label ? el("p.note", "Label: ", sample.label.slice(0, 2000)) : null;
  return el("div.facts", words.flatMap(([name, value], place) => [place ? " · " : "", `${name} `, el("b", String(value))]), label);
}

function rewards(sample) {
  const sources = Object.entries(sample).filter(([name, value]) => name.startsWith("score/") && value !== null);
  if (!sources.length && sample.reward === null) return null;
  const rows = [["reward", sample.reward], ...sources.map(([name, value]) => [name.slice("score/".length), value])];
  return el("aside.sources", el("h3", "Rewards by source"), el("dl.pairs", rows.map(([name, value]) => [el("dt", name), el("dd", decimal(value))])));
}

function plain(sample) {
  return el(
    "div",
    el("p.note", "This run has recorded no tokenizer, so its tokens have no texts of their own."),
    el("h2", "Prompt"), textBlock(sample.prompt), el("h2", "Response"), textBlock(sample.response),
  );
}

function windowLinks(view, first) {
  const { data, query } = view;
  if (data.total <= data.ids.length) return null;
  const link = (title, start) => {
    const params = new URLSearchParams(query);
    params.set("first", start);
    return el("a", { href: view.api.hash("sample", params) }, title);
  };
  const end = first + data.ids.length;
  return el(
    "p.pager", `tokens ${(data.first + 1).toLocaleString("en")}–${end.toLocaleString("en")} of ${data.total.toLocaleString("en")}`,
    first > 0 && link("← tokens before", Math.max(0, first - WINDOW)), end < data.total && link("tokens after →", end),
  );
}

function colorChoices(view) {
  const there = Object.keys(QUANTITIES).filter((name) => view.data.ranges[name]);
  const wished = view.query.get(CHOICE) ?? sessionStorage.getItem(CHOICE);
  view.quantities = there;
  view.quantity = there.includes(wished) ? wished : (there[0] ?? null);
  view.choices = there.map((name) => el("button", { type: "button", "data-name": name, onclick: () => choose(view, name) }, QUANTITIES[name].title));
  return el("div.choices.colors", { role: "group", "aria-label": "Color tokens by" }, view.choices);
}

function choose(view, name) {
  view.quantity = name;
  sessionStorage.setItem(CHOICE, name);
  color(view);
  select(view, view.current);
}

function color(view) {
  if (!view.quantity) return;
  for (const button of view.choices) button.setAttribute("aria-pressed", String(button.dataset.name === view.quantity));
  const scale = scaleOf(view.quantity, view.data.ranges[view.quantity]);
  const values = view.data.numbers[view.quantity];
  for (const span of view.tokens.spans) paint(span, scale, values[Number(span.dataset.place)]);
  fill(view.legend, legend(scale));
  drawCourse(view.course, values, scale, view.current);
}

function select(view, place) {
  view.tokens.spans[view.current]?.classList.remove("current");
  view.current = place;
  const span = place === null ? null : view.tokens.spans[place];
  span?.classList.add("current");
  view.inspector.show(place, view.quantity);
}

function move(view, by) {
  const count = view.tokens.spans.length;
  if (!count) return;
  const start = view.tokens.firstLearned;
  select(view, view.current === null ? start : Math.min(count - 1, Math.max(0, view.current + by)));
  view.tokens.spans[view.current].scrollIntoView({ block: "nearest" });
  const scale = scaleOf(view.quantity ?? "kl", view.data.ranges[view.quantity]);
  if (view.quantity) drawCourse(view.course, view.data.numbers[view.quantity], scale, view.current);
}

function jump(view, event) {
  const share = event.offsetX / view.course.clientWidth;
  select(view, Math.min(view.tokens.spans.length - 1, Math.floor(share * view.tokens.spans.length)));
  view.tokens.spans[view.current].scrollIntoView({ block: "center" });
  color(view);
}

function bindKeys(view) {
  const follow = (link) => !link.hidden && (location.hash = link.getAttribute("href"));
  const cycle = () => view.quantities?.length && choose(view, view.quantities[(view.quantities.indexOf(view.quantity) + 1) % view.quantities.length]);
  view.api.keys({
    j: ["next sample", () => follow(view.after)],
    k: ["sample before", () => follow(view.before)],
    ArrowRight: ["next token", () => move(view, 1)],
    ArrowLeft: ["token before", () => move(view, -1)],
    c: ["color by the next number", cycle],
    g: ["to its group", () => view.group.scrollIntoView()],
    Escape: ["back to the table", () => (location.hash = view.up)],
  });
}

async function showGroup(view) {
  const { step, prompt_id: promptId } = view.data.sample;
  const { samples } = await view.api.get("/api/group", { run: view.given.run, step, prompt_id: promptId });
  const over = view.api.hash("prompt", { run: view.given.run, prompt_id: promptId });
  const title = samples.length === 1 ? "The only sample of its group" : `Its group: ${samples.length} answers to the same prompt`;
  fill(view.group, el("div.head", el("h2", title), el("a", { href: over }, "this prompt in every step")), answerCards(samples, view.given.run, view.api, view.data.sample.row));
}

/** Samples before and after in the table from which the reader came, or else in the step. */
async function neighbors(view) {
  const { sample } = view.data;
  const at = view.query.get("at");
  const listed = at !== null;
  const place = Number(at);
  const params = listed
    ? { run: view.given.run, sort: view.query.get("sort"), desc: view.query.get("desc"), filter: view.query.getAll("filter"), offset: Math.max(0, place - 1), limit: 3, texts: 0 }
    : { run: view.given.run, sort: "row", desc: "0", filter: [`step:eq:${sample.step}`, `row:ge:${sample.row - 1}`], limit: 3, texts: 0 };
  const { rows } = await view.api.get("/api/rollouts", params);
  const here = rows.findIndex((row) => row.step === sample.step && row.row === sample.row);
  const link = (element, row, by) => {
    if (!row) return;
    const next = new URLSearchParams(view.query);
    for (const name of ["first", "q"]) next.delete(name);
    next.set("step", row.step);
    next.set("row", row.row);
    if (listed) next.set("at", place + by);
    element.setAttribute("href", view.api.hash("sample", next));
    element.hidden = false;
  };
  if (here < 0) return;
  link(view.before, rows[here - 1], -1);
  link(view.after, rows[here + 1], 1);
}
