// Timeline: the phases of each step in both processes, on one scale: who waits for whom.

import { duration, el, fill, number } from "../dom.js";
import { means, phasesOf, roleOf } from "../phases.js";
import { chosenOf, repeat, stateOf } from "../runs.js";

const POLL_MS = 2000;
const LEGEND = [
  ["sample", "sampling"],
  ["score", "log-probabilities, advantages, values"],
  ["train", "training"],
  ["move", "weights on their way"],
  ["wait", "waiting for another process"],
  ["other", "other"],
];

export async function show(container, query, api) {
  const { runs } = await api.get("/api/runs");
  const phased = runs.filter((run) => run.kind === "PPO");
  const wanted = chosenOf(query, phased)[0];
  const run = phased.find(({ id }) => id === wanted) ?? phased.find(({ id }) => id === chosenOf(new URLSearchParams(), phased)[0]);
  if (!run) return void fill(container, el("p.empty", "A timeline needs a PPO run that has finished a step. There is none here yet."));
  const view = new Timeline(container, query, api, runs, phased, run);
  await view.refresh();
  return api.isReport ? null : repeat(() => view.poll(), POLL_MS);
}

class Timeline {
  constructor(container, query, api, runs, phased, run) {
    Object.assign(this, { query, api, runs, run });
    this.until = query.get("until");
    this.last = Number(query.get("last")) || 12;
    const pick = el(
      "select",
      { "aria-label": "Run", onchange: (event) => api.go("timeline", { run: event.target.value, last: this.last }) },
      phased.map(({ id }) => el("option", { value: id, selected: id === run.id }, id)),
    );
    const count = el(
      "select",
      { "aria-label": "Steps", disabled: api.isReport, onchange: (event) => api.go("timeline", { run: run.id, last: event.target.value }) },
      [6, 12, 30, 100].map((steps) => el("option", { value: String(steps), selected: steps === this.last }, `${steps} steps`)),
    );
    this.page = el("span.pages");
    this.head = el("p.facts");
    this.body = el("div.timeline");
    this.table = el("div.scroll");
    fill(
      container,
      el("div.controls", el("label", "Run", pick), api.isReport ? null : el("label", "Last", count), this.page),
      this.head,
      el("ul.phases-legend", LEGEND.map(([role, meaning]) => el("li", el(`i.phase-${role}`), meaning))),
      this.body,
      this.table,
    );
    api.keys({
      "h ArrowLeft": ["earlier steps", () => this.turn(-1)],
      "l ArrowRight": ["later steps", () => this.turn(1)],
    });
  }

  async poll() {
    if (this.until) return;
    try {
      this.runs = (await this.api.get("/api/runs")).runs;
      await this.refresh();
    } catch (error) {
      this.api.status(error.message);
    }
  }

  async refresh() {
    const path = `/api/run/${this.api.segment(this.run.id)}/steps`;
    const { rows, ends } = await this.api.get(path, this.api.isReport ? {} : { last: this.last, until: this.until });
    const shape = JSON.stringify([rows.at(-1)?.step, rows.length]);
    if (shape === this.shape) return;
    this.shape = shape;
    this.ends = ends;
    this.steps = rows.map(phasesOf);
    this.rows = rows;
    if (!rows.length) return void fill(this.body, el("p.empty", "No step is done yet."));
    this.showPages();
    this.showFacts();
    const longest = Math.max(...this.steps.map(reach));
    fill(this.body, this.steps.toReversed().map((step) => drawn(step, longest)), axis(longest));
    this.showTable();
  }

  turn(by) {
    if (!this.rows?.length || this.api.isReport) return;
    const until = by < 0 ? this.rows[0].step - 1 : this.rows.at(-1).step + this.last;
    if (until < this.ends[0]) return;
    this.api.go("timeline", { run: this.run.id, last: this.last, until: until >= this.ends[1] ? "" : until });
  }

  showPages() {
    if (this.api.isReport) return;
    const [first, last] = [this.rows[0].step, this.rows.at(-1).step];
    fill(
      this.page,
      el("button", { type: "button", disabled: first <= this.ends[0], onclick: () => this.turn(-1), title: "h" }, "← earlier"),
      el("span.quiet", ` steps ${first} to ${last} of ${this.ends[1]} `),
      el("button", { type: "button", disabled: last >= this.ends[1], onclick: () => this.turn(1), title: "l" }, "later →"),
    );
  }

  /** Who waits for whom, in a sentence, and how much memory both need. */
  showFacts() {
    const sum = (values) => values.reduce((total, value) => total + value, 0);
    const whole = sum(this.steps.map(({ seconds }) => seconds));
    const busy = Math.min(whole, sum(this.rows.map((row) => (row["clock/critic_infer_busy"] ?? 0) + (row["timers/critic_train"] ?? 0))));
    const percent = (part) => `${number(Math.round((100 * part) / whole))} %`;
    const critic = this.runs.find(({ id }) => id === this.run.critic);
    const last = this.rows.at(-1);
    const memory = (process) => {
      const [rss, cuda] = [last[`memory/${process}_rss_gib`], last[`memory/${process}_cuda_peak_gib`]];
      return rss === undefined ? "" : ` (${number(rss)} GiB${cuda === undefined ? "" : `, ${number(cuda)} GiB of GPU memory at most`})`;
    };
    fill(
      this.head,
      `In these steps the actor${memory("actor")} waited `,
      el("b", percent(sum(this.steps.map(({ waits }) => waits)))),
      " of the time",
      busy ? [`, and the critic${memory("critic")} was busy for `, el("b", percent(busy))] : null,
      ". ",
      el("span.quiet", "Actor: ", stateOf(this.runs.find(({ id }) => id === this.run.id) ?? this.run), critic ? [". Critic: ", stateOf(critic)] : null, "."),
    );
  }

  showTable() {
    const rows = means(this.steps);
    fill(
      this.table,
      el("h2", `Mean of ${this.steps.length === 1 ? "this step" : `these ${this.steps.length} steps`}`),
      el(
        "table.means",
        el("thead", el("tr", el("th", "Phase"), el("th", "Process"), el("th.number", "Seconds"), el("th.number", "Of the step"), el("th"))),
        el(
          "tbody",
          rows.map(({ lane, phase, mean, share }) =>
            el(
              "tr",
              el("th", { scope: "row" }, el(`i.phase-${roleOf(phase)}`), phase),
              el("td.quiet", lane),
              el("td.number", number(mean)),
              el("td.number", `${number(Math.round(1000 * share) / 10)} %`),
              el("td", el("div.bar", el("div", { style: { width: `${Math.min(100 * share, 100)}%` } }))),
            ),
          ),
        ),
      ),
    );
  }
}

function reach({ seconds, lanes }) {
  return Math.max(seconds, ...lanes.flatMap(({ spans }) => spans.map(({ from, seconds: length }) => from + length)));
}

function drawn({ step, seconds, lanes }, longest) {
  return el(
    "section.step",
    el("h3", `${step}`, el("span.quiet", duration(seconds))),
    el(
      "div.lanes",
      lanes.map(({ name, spans }) =>
        el(
          "div.lane",
          { role: "img", "aria-label": `${name}: ${spans.map(described).join(", ")}` },
          el("span.who", name),
          el(
            "div.track",
            spans.map((span) => {
              const style = { left: `${(100 * span.from) / longest}%`, width: `${(100 * span.seconds) / longest}%` };
              return el(`div.span.phase-${roleOf(span.phase)}`, { style, title: described(span) }, el("span", span.phase));
            }),
          ),
        ),
      ),
    ),
  );
}

function described({ phase, seconds, whole }) {
  return `${phase} ${duration(whole ?? seconds)}`;
}

/** Seconds below the lanes. */
function axis(longest) {
  const rough = longest / 5;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const tick = [1, 2, 5, 10].map((factor) => factor * unit).find((each) => each >= rough);
  const ticks = Array.from({ length: Math.floor(longest / tick) + 1 }, (_, index) => index * tick);
  return el("div.axis", ticks.map((at) => el("span", { style: { left: `${(100 * at) / longest}%` } }, duration(at))));
}
