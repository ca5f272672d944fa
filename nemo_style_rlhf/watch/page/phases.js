// Reads the phases of a step from its line in metrics.jsonl: laps of the actor in their order, and what the critic does meanwhile.

const WAITS = new Set(["wait_for_scores", "wait_for_critic", "wait_for_rollout", "wait_for_engines"]);
const ROLES = [
  ["wait", /^wait_for/],
  ["sample", /^(generate|validation)/],
  ["score", /logprobs$|^advantages|^metrics|infer$/],
  ["train", /update|^critic_train/],
  ["move", /transfer|publish/],
];
/** Metrics in timers/ that are not laps of the step. */
const NO_LAPS = new Set(["critic_train", "step", "tokens_per_second", "samples_per_second", "save_stall"]);

/** How a phase is drawn: wait, sample, score, train, move or other. */
export function roleOf(phase) {
  return ROLES.find(([, pattern]) => pattern.test(phase))?.[0] ?? "other";
}

/** {step, seconds, lanes: [{name, spans: [{phase, from, seconds}]}], waits}; times in seconds since the step began. */
export function phasesOf(row) {
  const seconds = row["timers/step"];
  const laps = [];
  let at = 0;
  for (const [name, value] of Object.entries(row)) {
    const phase = name.replace(/^timers\//, "");
    if (phase === name || NO_LAPS.has(phase) || phase.startsWith("beside_")) continue;
    laps.push({ phase, from: at, seconds: value });
    at += value;
  }
  const start = (phase) => laps.find((lap) => lap.phase === phase);
  const lanes = [{ name: "actor", spans: laps }];
  const critic = [...inference(row, seconds), ...training(row, start("actor_update"))];
  if (critic.length) lanes.push({ name: "critic", spans: critic });
  const beside = sampling(row, start("wait_for_rollout"));
  if (beside.length) lanes.push({ name: "engines", spans: beside });
  const waits = laps.filter(({ phase }) => WAITS.has(phase)).reduce((sum, lap) => sum + lap.seconds, 0);
  return { step: row.step, seconds, lanes, waits };
}

/** From the first request for values or rewards to the last answer, by the actor's clock. */
function inference(row, seconds) {
  const [from, to] = [row["clock/critic_infer_from"], row["clock/critic_infer_to"]];
  if (from === undefined || row["clock/time"] === undefined) return [];
  const began = row["clock/time"] - seconds;
  const clipped = Math.max(from - began, 0);
  const end = Math.min(to - began, seconds);
  return end > clipped ? [{ phase: "critic_infer", from: clipped, seconds: end - clipped }] : [];
}

/** The critic's update begins with the actor's. */
function training(row, update) {
  const seconds = row["timers/critic_train"];
  return seconds === undefined || !update ? [] : [{ phase: "critic_train", from: update.from, seconds }];
}

/** The batch sampled during earlier training: it was ready at the latest when the wait for it ended. */
function sampling(row, wait) {
  const seconds = row["timers/beside_sampling"];
  if (seconds === undefined || !wait) return [];
  const end = wait.from + wait.seconds;
  const from = Math.max(end - seconds, 0);
  return [{ phase: "beside_sampling", from, seconds: end - from, whole: seconds }];
}

/** [{phase, mean, share}] over several steps, the actor's laps first, then the other lanes' phases. */
export function means(steps) {
  const totals = new Map();
  const whole = steps.reduce((sum, step) => sum + step.seconds, 0);
  for (const { lanes } of steps) {
    for (const { name, spans } of lanes) {
      for (const { phase, seconds, whole: all } of spans) {
        const known = totals.get(phase) ?? { lane: name, phase, seconds: 0 };
        totals.set(phase, { ...known, seconds: known.seconds + (all ?? seconds) });
      }
    }
  }
  return [...totals.values()].map(({ seconds, ...rest }) => ({ ...rest, mean: seconds / steps.length, share: seconds / whole }));
}
