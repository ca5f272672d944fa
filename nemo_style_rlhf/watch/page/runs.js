// Parts that several views of runs share.

import { el } from "./dom.js";

const STATES = {
  running: ["●", "running"],
  finished: ["✓", "finished"],
  stopped: ["■", "stopped"],
  died: ["✕", "died"],
  new: ["○", "no step yet"],
  damaged: ["⚠", "damaged"],
};
const WHY = {
  running: "A process owns the folder.",
  finished: "The run has ended and exported its model.",
  stopped: "Its process ended in peace before the last step; the same command goes on.",
  died: "Its process was killed; the same command goes on.",
  new: "Nothing has been logged.",
  damaged: "Its files cannot be shown.",
};

/** A run's state: a sign and a word, since not every reader can tell colors apart. */
export function stateOf(run) {
  const [sign, word] = STATES[run.state];
  const damaged = run.damaged ?? [];
  const title = [WHY[run.state], run.owner && `Owner: ${run.owner}.`, ...damaged].filter(Boolean).join(" ");
  const files = damaged.length && run.state !== "damaged" ? " ⚠ damaged files" : "";
  return el(`span.state.${run.state}`, { title }, el("span", { "aria-hidden": "true" }, sign), " ", word, files);
}

/** The runs of an address; without any, the one that has most to show. */
export function chosenOf(query, runs) {
  const given = query.getAll("run");
  if (given.length) return given;
  const shown = runs.filter((run) => run.step !== null);
  const rank = (run) => [run.state === "running", run.kind === "PPO", run.updated ?? 0];
  const best = shown.sort((a, b) => rank(b).reduce((sign, value, index) => sign || value - rank(a)[index], 0));
  return best.slice(0, 1).map((run) => run.id);
}

/** Calls `work` every `ms` while the page is visible, never twice at a time; returns what ends that. */
export function repeat(work, ms) {
  let timer = null;
  let over = false;
  const turn = async () => {
    try {
      if (!document.hidden) await work();
    } finally {
      if (!over) timer = setTimeout(turn, ms);
    }
  };
  timer = setTimeout(turn, ms);
  return () => {
    over = true;
    clearTimeout(timer);
  };
}
