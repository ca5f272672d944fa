// Controls of the table of rollouts: which run, filters, the search box.

import { el } from "../dom.js";

const COMPARISONS = { eq: "=", ne: "≠", lt: "<", le: "≤", gt: ">", ge: "≥" };
const PAUSE_MS = 350;

export function chooser(runs, run, choose) {
  const options = runs.map((each) => el("option", { value: each, selected: each === run }, each));
  return el("label", "Run ", el("select", { onchange: (event) => choose(event.target.value) }, options));
}

/** A filter such as reward:lt:0.5 as people read it. */
export function filterText(filter) {
  const [, column, comparison, value] = filter.match(/^(.*):(\w+):(.*?)$/s) ?? [null, filter, "", ""];
  if (comparison === "is") return value === "null" ? `${column} is missing` : `${column} is there`;
  return `${column} ${COMPARISONS[comparison] ?? comparison} ${value}`;
}

export function filterPanel(columns, add) {
  const column = el("select", { "aria-label": "Column" }, columns.map(({ name }) => el("option", { value: name, selected: name === "reward" }, name)));
  const comparison = el(
    "select",
    { "aria-label": "Comparison" },
    Object.entries(COMPARISONS).map(([name, title]) => el("option", { value: name, selected: name === "ge" }, title)),
    el("option", { value: "is:null" }, "is missing"),
    el("option", { value: "is:given" }, "is there"),
  );
  const value = el("input", { "aria-label": "Value", size: 8, placeholder: "value" });
  comparison.addEventListener("change", () => (value.hidden = comparison.value.startsWith("is:")));
  const submit = (event) => {
    event.preventDefault();
    const is = comparison.value.startsWith("is:");
    if (is || value.value.trim()) add(`${column.value}:${comparison.value}${is ? "" : `:${value.value.trim()}`}`);
  };
  const form = el("form.panel.filter", { onsubmit: submit }, column, comparison, value, el("button", "Add"));
  return el("details.more", { "data-name": "filter" }, el("summary", "+ Filter"), form);
}

/** The box that searches all texts of a run. `show` gets the hits whenever there are more, and null when the search is over. */
export function searchBox(api, run, show) {
  const input = el("input", { type: "search", placeholder: "all prompts and responses", "aria-label": "Search all texts", autocomplete: "off", spellcheck: "false" });
  let abort = null;
  let pause = null;

  async function search(words) {
    const hits = { words, found: [], searched: 0, of: 0, end: null, drawn: 0, list: null };
    abort = new AbortController();
    const { signal } = abort;
    show(hits);
    try {
      await api.stream("/api/search", { run, q: words }, (message) => {
        if (signal.aborted) return;
        if ("row" in message) return void hits.found.push(message);
        Object.assign(hits, { searched: message.searched, of: message.of, end: message.done ? message : null });
        show(hits);
      }, { signal });
    } catch (error) {
      if (error.name !== "AbortError") api.status(error.message);
    }
  }

  function stop() {
    clearTimeout(pause);
    abort?.abort();
    abort = null;
  }

  input.addEventListener("input", () => {
    stop();
    const words = input.value.trim();
    if (words) pause = setTimeout(() => search(words), PAUSE_MS);
    else show(null);
  });
  const clear = () => {
    stop();
    if (input.value) {
      input.value = "";
      show(null);
    }
  };
  input.addEventListener("keydown", (event) => event.key === "Escape" && clear());
  return {
    element: el("label", "Search ", input),
    focus: () => (input.focus(), input.select()),
    busy: () => input.value.trim() !== "",
    clear,
    stop,
  };
}
