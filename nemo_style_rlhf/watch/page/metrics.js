// The metrics of the chosen runs, kept up to date, and how they are grouped.

import { segment } from "./api.js";

/** Metrics that say most about a run, where it has them. */
export const OVERVIEW = [
  "train_rollouts/rewards",
  "val_rollouts/rewards",
  "train_rollouts/init_policy_kl",
  "train_rollouts/response_lengths",
  "train_optim/clip_fraction",
  "critic/explained_variance",
  "train_rollouts/entropy",
  "timers/step",
  "train/loss",
  "val/loss",
];

const GROUPS = [
  ["Critic", /^critic\//],
  ["Validation", /^val/],
  ["Timers", /^timers\//],
  ["Memory", /^memory\//],
  ["Engines", /^engines\//],
  ["Asynchrony", /^async\//],
  ["Policy update", /^train_optim\//],
  ["KL", /kl/],
  ["Lengths and repetition", /length|truncat|distinct|repetition|tokens/],
  ["Sampler", /gap|correction/],
  ["Reward", /reward|score|margin|accuracy/],
];
const ORDER = ["Reward", "KL", "Lengths and repetition", "Policy update", "Critic", "Training", "Validation", "Sampler", "Asynchrony", "Timers", "Engines", "Memory"];

/** [[title, [names]]], in the order of reading, without times of the clock. */
export function grouped(names) {
  const groups = new Map(ORDER.map((title) => [title, []]));
  for (const name of names) {
    if (name.startsWith("clock/")) continue;
    const title = GROUPS.find(([, pattern]) => pattern.test(name))?.[0] ?? "Training";
    groups.get(title).push(name);
  }
  return [...groups].filter(([, found]) => found.length);
}

/** A page's copy of one run's metrics. */
export class Metrics {
  constructor(run, api) {
    this.run = run;
    this.api = api;
    this.cursor = "";
    this.points = new Map();
  }

  /** Fetches what is new. Returns whether there was something. */
  async update(signal) {
    const path = `/api/run/${segment(this.run)}/metrics`;
    const { cursor, reset, metrics } = await this.api.get(path, { after: this.cursor }, { signal });
    if (cursor === this.cursor) return false;
    if (reset) this.points.clear();
    this.cursor = cursor;
    for (const [name, [steps, values]] of Object.entries(metrics)) this.add(name, steps, values);
    return true;
  }

  add(name, steps, values) {
    const known = this.points.get(name);
    if (!known) return void this.points.set(name, { steps, values });
    if (steps.length && steps[0] <= known.steps.at(-1)) {
      const all = new Map(known.steps.map((step, index) => [step, known.values[index]]));
      steps.forEach((step, index) => all.set(step, values[index]));
      const sorted = [...all].sort(([a], [b]) => a - b);
      this.points.set(name, { steps: sorted.map(([step]) => step), values: sorted.map(([, value]) => value) });
    } else {
      known.steps.push(...steps);
      known.values.push(...values);
    }
  }
}
