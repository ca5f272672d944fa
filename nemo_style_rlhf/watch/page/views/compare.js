// The same prompts answered by several sources: the checkpoints of an evaluation, or two runs or steps of recorded rollouts.

import { el, fill, number } from "../dom.js";
import { marked, patternOf, textBlock } from "../text.js";
import { scoreBadge } from "./answers.js";
import { comparisonForm } from "./compare_form.js";
import { partOf } from "./compare_report.js";

const ROWS = 20;
const PAUSE_MS = 120;

export async function show(container, query, api) {
  const recorded = await api.get("/api/recorded");
  const runs = query.getAll("run").filter((run) => recorded.rollouts.includes(run) || recorded.evaluations.includes(run));
  const form = comparisonForm(recorded, query, api);
  const enough = runs.some((run) => recorded.evaluations.includes(run)) || runs.length > 1;
  if (!enough) return void fill(container, el("h1", "Compare"), form);
  const view = { api, params: { run: runs, step: query.getAll("step"), order: query.get("order") ?? "file", q: query.get("q") ?? "" }, turn: 0, rows: [] };
  const whole = api.isReport ? await api.get("/api/compare", { run: runs }) : null;
  view.ask = async (offset) => (whole ? partOf(whole, { ...view.params, offset, limit: ROWS }) : api.get("/api/compare", { ...view.params, offset, limit: ROWS }));
  view.answer = await view.ask(0);
  api.title(view.answer.sides.map((side) => side.name).join(", ") || "Compare");
  view.search = el("input", { type: "search", id: "search", value: view.params.q, placeholder: "prompts and responses", autocomplete: "off", spellcheck: "false" });
  view.order = el("select", { id: "order" }, orders(view.answer).map(([title, name]) => el("option", { value: name, selected: name === view.params.order }, title)));
  view.count = el("output", { id: "count", "aria-live": "polite" });
  view.list = el("div", { id: "rows" });
  view.more = el("button", { type: "button", id: "more" }, "Show more");
  const names = view.answer.sides.map((side) => side.name);
  const choosing = el("label", "Order ", view.order);
  choosing.hidden = view.order.options.length === 1;
  const table = el("div", { style: { "--columns": String(names.length) } }, el("div.grid.heads", { "aria-hidden": "true" }, el("div", "Prompt"), names.map((name) => el("div", name))), view.list);
  fill(
    container,
    el("div.head", el("h1", "Responses side by side"), el("details.more.again", el("summary", "Compare others"), el("div.panel", form))),
    el("p.facts", facts(view.answer, runs)),
    names.length ? summary(view.answer) : null,
    el("form.controls", { role: "search", onsubmit: (event) => event.preventDefault() }, el("label", "Search ", view.search), choosing, view.count),
    el("div.pan", table),
    el("p", view.more),
  );
  draw(view);
  const stop = listen(view);
  return stop;
}

function listen(view) {
  let pause = null;
  const change = () => {
    clearTimeout(pause);
    pause = setTimeout(() => update(view).catch((error) => view.api.status(error.message)), PAUSE_MS);
  };
  view.search.addEventListener("input", change);
  view.order.addEventListener("change", change);
  view.search.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !view.search.value) return;
    event.stopPropagation();
    view.search.value = "";
    change();
  });
  view.more.addEventListener("click", () => showMore(view));
  const nearEnd = new IntersectionObserver((entries) => entries.some((entry) => entry.isIntersecting) && showMore(view), { rootMargin: "1200px" });
  nearEnd.observe(view.more);
  view.observe = () => {
    nearEnd.unobserve(view.more); // so that it looks again where the new rows were short
    nearEnd.observe(view.more);
  };
  const step = (by) => {
    const rows = [...view.list.querySelectorAll(".row")];
    const top = document.querySelector("header.top").offsetHeight + 4;
    const next = by > 0 ? rows.find((row) => row.getBoundingClientRect().top > top + 4) : rows.findLast((row) => row.getBoundingClientRect().top < top - 4);
    if (next) window.scrollBy({ top: next.getBoundingClientRect().top - top });
  };
  view.api.keys({
    "/": ["search", () => (view.search.focus(), view.search.select())],
    "j ArrowDown": ["next prompt", () => step(1)],
    "k ArrowUp": ["prompt before", () => step(-1)],
  });
  return () => {
    clearTimeout(pause);
    nearEnd.disconnect();
  };
}

async function update(view) {
  const turn = ++view.turn;
  Object.assign(view.params, { order: view.order.value, q: view.search.value.trim() });
  const answer = await view.ask(0);
  if (turn !== view.turn) return;
  view.answer = answer;
  view.api.replace("compare", { ...view.params, order: view.params.order === "file" ? null : view.params.order });
  draw(view);
}

function draw(view) {
  const { answer, params } = view;
  const prompts = (count) => `${count.toLocaleString("en")} ${count === 1 ? "prompt" : "prompts"}`;
  view.count.textContent = params.q
    ? `${answer.found.toLocaleString("en")} of ${prompts(answer.total)}, ${answer.matches.toLocaleString("en")} ${answer.matches === 1 ? "match" : "matches"}`
    : prompts(answer.total);
  view.shown = 0;
  fill(view.list);
  append(view, answer.rows);
}

function append(view, rows) {
  const pattern = patternOf(view.params.q);
  view.list.append(...rows.map((row) => rowBlock(view, row, pattern)));
  view.shown += rows.length;
  view.more.hidden = view.shown >= view.answer.found;
  view.observe?.();
}

async function showMore(view) {
  if (view.more.hidden || view.loading === view.turn) return;
  const turn = (view.loading = view.turn);
  try {
    const answer = await view.ask(view.shown);
    if (turn === view.turn) append(view, answer.rows);
  } catch (error) {
    view.api.status(error.message);
  } finally {
    view.loading = null;
  }
}

function facts({ facts: told, total, elsewhere, sides }, runs) {
  const scores = sides.some((side) => side.mean_score !== null);
  const words = [`${total.toLocaleString("en")} ${total === 1 ? "prompt" : "prompts"}`];
  if (told.prompts) words.push(" of ", el("code", told.prompts));
  if (told.samples_per_prompt) words.push(`, ${told.samples_per_prompt} ${told.samples_per_prompt === 1 ? "response" : "responses"} each`);
  for (const name of ["seed", "temperature"]) if (told[name] !== undefined) words.push(`, ${name} ${told[name]}`);
  if (told.max_length) words.push(`, at most ${told.max_length} tokens`);
  words.push(". ");
  if (told.rewards?.length) words.push("Scores: ", told.rewards.flatMap((source, place) => [place ? ", " : "", el("code", source)]), ".");
  else if (!scores) words.push("No reward source was given, so there are no scores.");
  if (elsewhere) words.push(` ${elsewhere.toLocaleString("en")} more prompts have no answer on some side.`);
  if (!total) return ["These have no prompt in common: ", runs.join(" and "), ". Choose other steps."];
  return words;
}

function summary({ sides, facts: told }) {
  const best = Math.max(...sides.map((side) => side.mean_score ?? -Infinity));
  const share = (value) => (value === null ? "–" : `${(100 * value).toFixed(1)}%`);
  const rows = sides.map((side) =>
    el(
      "tr",
      el("th", { scope: "row" }, side.name, " ", el("span.quiet", side.path)),
      el(side.mean_score !== null && side.mean_score === best ? "td.number.top" : "td.number",
        side.mean_score === null ? "–" : side.mean_score.toFixed(3), side.standard_error === null ? "" : ` ± ${side.standard_error.toFixed(3)}`,
        side.unscored ? el("span.quiet", ` ${side.unscored} without`) : null),
      el("td.number", share(side.win_rate)),
      el("td.number", side.mean_length.toFixed(1)),
      el("td.number", share(side.truncated_fraction)),
      el("td.number", side.distinct_responses.toLocaleString("en")),
      el("td.number", side.samples.toLocaleString("en")),
    ),
  );
  const heads = ["Checkpoint", "Mean score", "Win rate", "Mean length", "Truncated", "Distinct", "Samples"];
  const note = sides.length > 1 ? `Win rate: responses that score higher than those of ${sides[0].name} to the same prompt ${told.seed === undefined ? "in the same place" : "with the same seed"}; a tie counts half. ` : "";
  return [
    el("div.scroll", { tabindex: "0", role: "region", "aria-label": "Summary" }, el("table.summary", el("thead", el("tr", heads.map((head, place) => el(place ? "th.number" : "th", { scope: "col" }, head)))), el("tbody", rows))),
    el("p.note.below", `Mean score ± standard error over prompts. ${note}Lengths are in tokens.`),
  ];
}

function orders({ sides, range }) {
  const found = [["As in the file", "file"]];
  if (!range) return found;
  if (sides.length === 1) return [...found, ["Highest score first", "highest"], ["Lowest score first", "lowest"]];
  for (const [column, { name }] of sides.entries()) {
    if (column) found.push([`${name} above ${sides[0].name} most`, `above:${column}`], [`${name} below ${sides[0].name} most`, `below:${column}`]);
  }
  return found;
}

function rowBlock(view, row, pattern) {
  const names = view.answer.sides.map((side) => side.name);
  const prompt = el("section.prompt", { "aria-label": `Prompt ${row.id}` }, el("div.badges", `Prompt ${row.id}`), textBlock(row.prompt, { pattern }));
  if (row.label !== null) prompt.append(el("p.note", "Label: ", marked(row.label.slice(0, 2000), pattern)));
  const cells = row.cells.map((cell, column) => {
    const against = column ? row.differences[column] : null;
    return el(
      "section.cell",
      { "aria-label": names[column] },
      el("div.column-name", names[column]),
      cell.map((response) => responseBlock(view, response, pattern)),
      against !== null && el("div.note", `${against < 0 ? "−" : "+"}${Math.abs(against).toFixed(3)} against ${names[0]}`),
    );
  });
  return el("article.grid.row", { "data-prompt": String(row.id) }, prompt, cells);
}

function responseBlock(view, response, pattern) {
  const href = response.sample ? view.api.hash("sample", response.sample) : null;
  const badges = el(
    "div.badges",
    response.score !== null ? scoreBadge(response.score, view.answer.range) : view.answer.range && el("span.badge.cut", "no score"),
    response.best && el("span.badge.crown", "best"),
    el("span", `${number(response.tokens)} ${response.tokens === 1 ? "token" : "tokens"}`),
    response.truncated && el("span.badge.cut", "truncated"),
    href && el("a", { href }, "its tokens"),
  );
  return el(response.best ? "div.answer.best" : "div.answer", badges, textBlock(response.text, { pattern, leftOut: response.left_out, href }));
}
