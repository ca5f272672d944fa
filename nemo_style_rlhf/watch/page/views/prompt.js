// A prompt over all steps: how its answers, and their rewards, changed.

import { decimal } from "../colors.js";
import { el, fill } from "../dom.js";
import { textBlock } from "../text.js";
import { answerCards } from "./answers.js";

const STEPS = 5;
const READING_MS = 700;

export async function show(container, query, api) {
  const run = query.get("run");
  const promptId = query.get("prompt_id");
  const wished = query.get("step");
  const ask = (offset) => api.get("/api/prompt", { run, prompt_id: promptId, offset, limit: STEPS });
  const first = await ask(0);
  if (!first.steps.length) return void fill(container, el("h1", `Prompt ${promptId}`), el("p.empty", "No step that is recorded (any more) has this prompt."));
  api.title(`Prompt ${promptId} of ${run}`);
  const list = el("div");
  const more = el("button", { type: "button" }, "Show earlier steps");
  let shown = 0;
  const add = ({ samples }) => {
    const steps = [...new Set(samples.map((sample) => sample.step))];
    shown += steps.length;
    for (const step of steps) list.append(...section(step, samples.filter((sample) => sample.step === step), first, run, api));
    more.hidden = shown >= first.steps.length;
  };
  more.addEventListener("click", async () => {
    more.disabled = true;
    add(await ask(shown));
    more.disabled = false;
  });
  const steps = first.steps.length;
  fill(
    container,
    el("div.head", el("h1", `Prompt ${promptId}`), el("a", { href: api.hash("rollouts", { run, by: "prompt" }) }, "all prompts"), el("span.quiet", `answered in ${steps} ${steps === 1 ? "step" : "steps"} of ${run}`)),
    el("div.answer", textBlock(first.prompt ?? "")),
    el("h2", "Mean reward by step"),
    course(first.steps),
    list,
    el("p", more),
  );
  add(first);
  let timer = null;
  let again = null;
  if (first.files_read < first.files && !api.isReport) {
    api.status(`reading: ${first.files_read} of ${first.files} files`);
    timer = setTimeout(() => show(container, query, api).then((stop) => (again = stop)), READING_MS);
  } else if (!api.isReport) api.status("");
  while (wished && !document.getElementById(`step-${wished}`) && shown < steps && container.isConnected) {
    const next = await ask(shown);
    if (!next.samples.length) break; // steps have left the disk meanwhile
    add(next);
  }
  if (wished) document.getElementById(`step-${wished}`)?.scrollIntoView();
  api.keys({
    m: ["show earlier steps", () => more.hidden || more.click()],
    Escape: ["back to the prompts", () => api.go("rollouts", { run, by: "prompt" })],
  });
  return () => {
    clearTimeout(timer);
    again?.();
  };
}

function section(step, samples, first, run, api) {
  const numbers = first.steps.find((each) => each.step === step);
  const before = first.steps[first.steps.indexOf(numbers) - 1];
  const change = before && numbers.reward_mean !== null && before.reward_mean !== null ? numbers.reward_mean - before.reward_mean : null;
  const against = change === null ? "" : ` (${change < 0 ? "−" : "+"}${Math.abs(change).toFixed(3)} since step ${before.step})`;
  return [el("h2", { id: `step-${step}` }, `Step ${step}: mean reward ${decimal(numbers.reward_mean)}${against}`), answerCards(samples, run, api)];
}

/** Mean, lowest and highest reward of each step, as an SVG drawing. */
function course(steps) {
  const there = steps.filter((each) => each.reward_mean !== null);
  if (there.length < 2) return el("p.quiet", there.length ? `step ${there[0].step}: ${decimal(there[0].reward_mean)}` : "no rewards");
  const [width, height, edge] = [640, 90, 8];
  const low = Math.min(...there.map((each) => each.reward_min));
  const high = Math.max(...there.map((each) => each.reward_max));
  const x = (step) => edge + ((step - there[0].step) / (there.at(-1).step - there[0].step)) * (width - 2 * edge);
  const y = (value) => height - edge - ((value - low) / (high - low || 1)) * (height - 2 * edge);
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, class: "course-of-prompt", role: "img", "aria-label": "mean reward by step", width, height });
  for (const each of there) svg.append(make("line", { x1: x(each.step), x2: x(each.step), y1: y(each.reward_min), y2: y(each.reward_max), class: "spread" }));
  svg.append(make("polyline", { points: there.map((each) => `${x(each.step)},${y(each.reward_mean)}`).join(" "), class: "mean" }));
  for (const each of there) {
    const dot = make("circle", { cx: x(each.step), cy: y(each.reward_mean), r: 3, class: "dot" });
    const title = make("title", {});
    title.textContent = `step ${each.step}: ${decimal(each.reward_mean)} (${decimal(each.reward_min)} to ${decimal(each.reward_max)})`;
    dot.append(title);
    svg.append(dot);
  }
  return el("div", svg, el("p.note", `steps ${there[0].step}–${there.at(-1).step}; rewards ${decimal(low)} to ${decimal(high)}; lines span a group`));
}

function make(name, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}
