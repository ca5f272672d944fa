// Runs: their states, and their metrics in common charts.

import { Chart, look } from "../charts.js";
import { duration, el, fill, number } from "../dom.js";
import { grouped, Metrics, OVERVIEW } from "../metrics.js";
import { chosenOf, repeat, stateOf } from "../runs.js";

const POLL_MS = 2000;
const MOST_NOTES = 50;
const LONGEST_NOTE = 400;
const SYNC = "steps";
const HEADS = [
  ["Run", ""], ["", ".wide"], ["State", ""], ["Step", ".number"], ["", ".wide"], ["s/step", ".number.wide"], ["Left", ".number"],
  ["Reward or loss", ".number"], ["KL", ".number"], ["Last row", ".number"],
];
const opened = new Set(); // groups that the reader has opened, from one visit to the next

export async function show(container, query, api) {
  const { runs } = await api.get("/api/runs");
  const view = new RunsView(container, query, api, runs);
  await view.start();
  return () => view.stop();
}

class RunsView {
  constructor(container, query, api, runs) {
    Object.assign(this, { container, query, api, runs });
    this.chosen = chosenOf(query, runs);
    this.smoothing = Math.min(Math.max(Number(query.get("smooth")) || 0, 0), 0.99);
    this.filter = query.get("metric") ?? "";
    this.metrics = new Map();
    this.charts = new Map();
    this.events = [];
    this.leaving = new AbortController();
  }

  async start() {
    this.list = el("div.scroll.list");
    this.notes = el("section.notes", { hidden: true });
    this.config = el("section.config", { hidden: true });
    this.board = el("div.board");
    fill(this.container, this.list, this.notes, this.controls(), this.board, this.config);
    this.bindKeys();
    this.showList();
    await this.refresh();
    await this.showConfig();
    this.resizing = new ResizeObserver(() => this.draw());
    this.resizing.observe(this.board);
    this.scheme = matchMedia("(prefers-color-scheme: dark)");
    this.onScheme = () => this.redraw();
    this.scheme.addEventListener("change", this.onScheme);
    if (!this.api.isReport) this.unpoll = repeat(() => this.poll(), POLL_MS);
  }

  stop() {
    this.leaving.abort();
    this.unpoll?.();
    this.resizing?.disconnect();
    this.scheme?.removeEventListener("change", this.onScheme);
    this.forgetCharts();
  }

  // --- data ---------------------------------------------------------------------------------------------------------

  async poll() {
    try {
      this.runs = (await this.api.get("/api/runs", {}, { signal: this.leaving.signal })).runs;
      if (!this.chosen.length) this.chosen = chosenOf(this.query, this.runs);
      this.showList();
      await this.refresh();
      this.api.status(this.runs.some((run) => run.state === "running") ? "live" : "");
    } catch (error) {
      this.tell(error);
    }
  }

  tell(error) {
    if (error.name !== "AbortError") this.api.status(error.message);
  }

  async refresh() {
    const signal = this.leaving.signal;
    for (const run of this.chosen) if (!this.metrics.has(run)) this.metrics.set(run, new Metrics(run, this.api));
    for (const run of this.metrics.keys()) if (!this.chosen.includes(run)) this.metrics.delete(run);
    const news = await Promise.all([...this.metrics.values()].map((each) => each.update(signal)));
    if (!news.some(Boolean) && this.drawn) return;
    const paths = this.chosen.map((run) => `/api/run/${encodeURIComponent(run)}/events`);
    const answers = await Promise.all(paths.map((path) => this.api.get(path, {}, { signal })));
    this.events = answers.flatMap(({ events }, place) => events.map((event) => ({ ...event, place })));
    this.showNotes();
    this.draw();
    this.drawn = true;
  }

  async choose(run, on) {
    this.chosen = on ? [...this.chosen, run] : this.chosen.filter((each) => each !== run);
    this.remember();
    this.drawn = false;
    this.showList();
    await this.refresh();
    this.draw();
    await this.showConfig();
  }

  remember() {
    const { chosen, smoothing, filter } = this;
    this.api.replace("runs", { run: chosen, smooth: smoothing || "", metric: filter });
  }

  // --- the list of runs ---------------------------------------------------------------------------------------------

  showList() {
    if (!this.runs.length) {
      return void fill(this.list, el("p.empty", "There is no run here yet. It appears as soon as one starts."));
    }
    const focused = document.activeElement?.closest?.(".list input")?.value;
    fill(
      this.list,
      el(
        "table.runs-table",
        el("thead", el("tr", HEADS.map(([head, classes]) => el(`th${classes}`, { scope: "col" }, head)))),
        el("tbody", this.runs.map((run) => this.row(run))),
      ),
    );
    if (focused !== undefined) [...this.list.querySelectorAll("input")].find(({ value }) => value === focused)?.focus();
  }

  row(run) {
    const place = this.chosen.indexOf(run.id);
    const color = place < 0 ? "transparent" : look(place).color;
    const box = el("input", {
      type: "checkbox",
      value: run.id,
      checked: place >= 0,
      onchange: (event) => this.choose(run.id, event.target.checked).catch((error) => this.tell(error)),
    });
    const [first, second] = Object.values(run.headline);
    const done = run.total_steps && run.step !== null ? Math.min(run.step / run.total_steps, 1) : null;
    return el(
      "tr",
      { class: place >= 0 ? "chosen" : null },
      el("th", { scope: "row", style: { "--color": color } }, el("label", { title: run.folder }, box, el("bdi", run.id), el("span.quiet.narrow", run.kind))),
      el("td.quiet.wide", run.kind),
      el("td", stateOf(run), run.warnings ? el("span.warned", { title: `${run.warnings} failed health checks` }, ` ▲ ${run.warnings}`) : null),
      el("td.number", run.step === null ? "–" : run.total_steps ? `${run.step} / ${run.total_steps}` : String(run.step)),
      el("td.wide", done === null ? null : el("div.bar", el("div", { style: { width: `${100 * done}%` } }))),
      el("td.number.wide", run.seconds_per_step === null ? "–" : number(run.seconds_per_step)),
      el("td.number", run.eta_s === null ? "–" : duration(run.eta_s)),
      el("td.number", { title: Object.keys(run.headline)[0] ?? "" }, number(first)),
      el("td.number", { title: Object.keys(run.headline)[1] ?? "" }, run.kind === "PPO" ? number(second) : "–"),
      el("td.number.quiet", ago(run.updated)),
    );
  }

  // --- what happened ------------------------------------------------------------------------------------------------

  showNotes() {
    const failed = this.events.filter(({ kind }) => kind === "health");
    const many = this.chosen.length > 1;
    this.notes.hidden = !failed.length;
    fill(
      this.notes,
      el("h2", "Health checks that failed"),
      el(
        "ul",
        failed.slice(-MOST_NOTES).toReversed().map(({ step, sentence, place }) =>
          el("li", { style: { "--color": look(place).color } }, el("b", `▲ step ${step}`), many ? el("bdi.quiet", ` ${this.chosen[place]}`) : null, ` ${cut(sentence)}`),
        ),
      ),
    );
  }

  async showConfig() {
    const chosen = [...this.chosen];
    if (!chosen.length) return void (this.config.hidden = true);
    let answer;
    try {
      answer = await this.api.get("/api/config", { run: chosen }, { signal: this.leaving.signal });
    } catch (error) {
      this.config.hidden = true;
      return void this.tell(error);
    }
    const { differing, starts } = answer;
    if (chosen.join("\n") !== this.chosen.join("\n")) return;
    const changed = starts.flatMap((own, place) => own.filter(({ changes }) => changes.length).map((start) => ({ ...start, place })));
    this.config.hidden = chosen.length < 2 && !changed.length;
    const heads = chosen.map((run, place) => el("th", { style: { "--color": look(place).color } }, el("bdi.run", run)));
    fill(
      this.config,
      chosen.length > 1 && [
        el("h2", `Configuration: ${differing.length === 1 ? "1 key differs" : `${differing.length} keys differ`}`),
        differing.length ? table(heads, differing) : null,
      ],
      changed.map(({ after, changes, place }) => [
        el("h2", el("bdi", chosen[place]), `: changed by the start after ${after.replaceAll("_0", " 0").replace(/\b0+(?=\d)/, "").replace("_", " ")}`),
        table([el("th", "before"), el("th", "after")], changes),
      ]),
    );
  }

  // --- charts -------------------------------------------------------------------------------------------------------

  controls() {
    const share = el("output", number(this.smoothing));
    this.slider = el("input", {
      type: "range", min: "0", max: "0.99", step: "0.01", value: String(this.smoothing), "aria-label": "Smoothing",
      oninput: () => {
        this.smoothing = Number(this.slider.value);
        share.textContent = number(this.smoothing);
        this.remember();
        this.draw();
      },
    });
    this.search = el("input", {
      type: "search", placeholder: "any metric", value: this.filter, "aria-label": "Metrics whose name contains",
      oninput: () => {
        this.filter = this.search.value;
        this.remember();
        this.draw();
      },
    });
    return el("div.controls", el("label", "Metric", this.search), el("label", "Smoothing", this.slider, share));
  }

  /** [[title, names]] as the reader wants them. */
  sections() {
    const names = [...new Set([...this.metrics.values()].flatMap(({ points }) => [...points.keys()]))];
    const wanted = this.filter.trim().toLowerCase();
    if (wanted) return [["", names.filter((name) => name.toLowerCase().includes(wanted) && !name.startsWith("clock/"))]];
    return [["Overview", OVERVIEW.filter((name) => names.includes(name))], ...grouped(names)];
  }

  draw() {
    const sections = this.sections();
    const shape = JSON.stringify([sections, this.chosen]);
    if (shape !== this.shape) this.lay(sections, shape);
    const marks = this.events.filter(({ kind, step }) => kind === "health" || step > 0);
    const options = { smoothing: this.smoothing, marks: marks.map(({ kind, step }) => ({ step, color: kind === "health" ? "var(--bad)" : "var(--quiet)" })) };
    for (const [key, chart] of this.charts) {
      const width = Math.floor(chart.plotted.clientWidth);
      if (width > 0) chart.draw(this.lines(key.split("\n")[1]), { ...options, width });
    }
  }

  lay(sections, shape) {
    this.shape = shape;
    this.forgetCharts();
    const empty = this.chosen.length ? "Nothing has been logged yet." : "Choose a run above.";
    fill(
      this.board,
      sections.every(([, names]) => !names.length) ? el("p.empty", this.filter ? "No metric has this in its name." : empty) : null,
      sections.filter(([, names]) => names.length).map(([title, names]) => this.group(title, names)),
    );
  }

  group(title, names) {
    const charts = names.map((name) => {
      const chart = new Chart(name, { sync: SYNC });
      this.charts.set(`${title}\n${name}`, chart);
      return chart.root;
    });
    const grid = el("div.charts", charts);
    if (!title) return grid;
    const open = title === "Overview" || opened.has(title);
    return el(
      "details",
      {
        open,
        ontoggle: (event) => {
          event.target.open ? opened.add(title) : opened.delete(title);
          this.draw();
        },
      },
      el("summary", title, el("span.quiet", ` ${names.length}`)),
      grid,
    );
  }

  lines(name) {
    return this.chosen.flatMap((run, place) => {
      const points = this.metrics.get(run)?.points.get(name);
      return points ? [{ label: run, place, ...points }] : [];
    });
  }

  redraw() {
    for (const chart of this.charts.values()) chart.destroy();
    this.draw();
  }

  forgetCharts() {
    for (const chart of this.charts.values()) chart.destroy();
    this.charts.clear();
  }

  // --- keys ---------------------------------------------------------------------------------------------------------

  bindKeys() {
    const move = (by) => {
      const boxes = [...this.list.querySelectorAll("input")];
      const at = boxes.indexOf(document.activeElement);
      boxes[Math.min(Math.max(at + by, 0), boxes.length - 1)]?.focus();
    };
    const smooth = (by) => {
      this.slider.value = String(Number(this.slider.value) + by);
      this.slider.dispatchEvent(new Event("input"));
    };
    const openAll = () => {
      const groups = [...this.board.querySelectorAll("details")];
      const open = groups.some((group) => !group.open);
      for (const group of groups) group.open = open;
    };
    this.api.keys({
      "j ArrowDown": ["next run", () => move(1)],
      "k ArrowUp": ["previous run", () => move(-1)],
      "/": ["find a metric", () => this.search.focus()],
      "]": ["smoother", () => smooth(0.1)],
      "[": ["less smooth", () => smooth(-0.1)],
      "o": ["open or close all groups", openAll],
    });
  }
}

function cut(sentence) {
  return sentence.length > LONGEST_NOTE ? `${sentence.slice(0, LONGEST_NOTE)}…` : sentence;
}

function table(heads, rows) {
  return el(
    "div.scroll",
    el(
      "table",
      el("thead", el("tr", el("th", "Key"), heads)),
      el("tbody", rows.map(({ key, values }) => el("tr", el("th", { scope: "row" }, el("code", key)), values.map((value) => el("td", value === null ? el("span.quiet", "not there") : el("code", value)))))),
    ),
  );
}

function ago(seconds) {
  if (seconds === null) return "–";
  const past = Date.now() / 1000 - seconds;
  return past < 2 ? "now" : past < 172800 ? `${duration(past).replace(" min", "")} ago` : new Date(seconds * 1000).toISOString().slice(0, 10);
}
