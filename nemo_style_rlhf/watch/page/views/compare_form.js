// The choice of what to compare: an evaluation, or two runs or steps with rollouts.

import { el } from "../dom.js";

export function comparisonForm({ rollouts, evaluations }, query, api) {
  const given = query.getAll("run");
  const steps = query.getAll("step");
  const parts = [];
  if (evaluations.length) {
    parts.push(
      el("h2", "Evaluations"),
      el("p.note", "Checkpoints on the same prompts, from trainers/evaluate.py."),
      el("ul", evaluations.map((run) => el("li", el("a", { href: api.hash("compare", { run }) }, run)))),
    );
  }
  if (rollouts.length && !api.isReport) parts.push(el("h2", "Rollouts"), el("p.note", "Two runs, or two steps of one, on the prompts that they share. Without a step: the newest that both have."), sides());
  if (!parts.length) parts.push(el("p.empty", "There is nothing to compare yet: no run here has recorded rollouts, and none is an evaluation."));
  return el("div.comparisons", parts);

  function sides() {
    const chosen = [0, 1].map((place) => rollouts.find((run) => run === given[place]) ?? rollouts[Math.min(place, rollouts.length - 1)]);
    const runs = chosen.map((run, place) => el("select", { "aria-label": `Run ${place + 1}` }, rollouts.map((each) => el("option", { value: each, selected: each === run }, each))));
    const inputs = [0, 1].map((place) => el("input", { type: "number", min: "0", placeholder: "newest", value: steps[place] ?? "", "aria-label": `Step ${place + 1}` }));
    const submit = (event) => {
      event.preventDefault();
      const numbers = inputs.map((input) => input.value.trim());
      const step = numbers[0] && numbers[1] ? numbers : [numbers[0] || numbers[1]].flatMap((each) => (each ? [each, each] : []));
      api.go("compare", { run: runs.map((run) => run.value), step });
    };
    const row = (place) => el("div.controls", el("label", ["First", "Second"][place], " ", runs[place]), el("label", "step ", inputs[place]));
    return el("form", { onsubmit: submit }, row(0), row(1), el("button", "Compare"));
  }
}
