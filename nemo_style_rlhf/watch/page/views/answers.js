// Answers to one prompt as cards.

import { decimal } from "../colors.js";
import { el } from "../dom.js";
import { textBlock } from "../text.js";

export function scoreBadge(score, range) {
  const [low, high] = range ?? [0, 0];
  const share = high > low ? Math.min(1, Math.max(0, (score - low) / (high - low))) : 0.5;
  return el("span.badge.score", { style: { "--share": share.toFixed(3) } }, score.toFixed(3).replace("-", "−"));
}

export function rangeOf(scores) {
  const there = scores.filter((score) => score !== null && score !== undefined);
  return there.length ? [Math.min(...there), Math.max(...there)] : null;
}

/** Cards of samples with their rewards against the group's mean. */
export function answerCards(samples, run, api, current = null) {
  const range = rangeOf(samples.map((sample) => sample.reward));
  const scores = samples.map((sample) => sample.reward).filter((reward) => reward !== null);
  const mean = scores.reduce((sum, each) => sum + each, 0) / scores.length;
  const cards = samples.map((sample) => {
    const href = api.hash("sample", { run, step: sample.step, row: sample.row });
    const against = sample.reward - mean;
    const badges = el(
      "div.badges",
      sample.reward === null ? el("span.badge.cut", sample.failed ? "failed" : "no reward") : scoreBadge(sample.reward, range),
      sample.reward !== null && samples.length > 1 && el("span", `${against < 0 ? "−" : "+"}${Math.abs(against).toFixed(3)} against the mean`),
      el("span", `${sample.response_tokens} ${sample.response_tokens === 1 ? "token" : "tokens"}`),
      sample.finish_reason === "length" && el("span.badge.cut", "truncated"),
      sample.row === current ? el("span", "this sample") : el("a", { href }, `sample ${sample.row}`),
    );
    const leftOut = Math.max(0, (sample.response_length ?? 0) - (sample.response?.length ?? 0));
    return el(sample.row === current ? "div.answer.current" : "div.answer", { "data-row": sample.row }, badges, textBlock(sample.response ?? "", { leftOut, href }));
  });
  return el("div.answers", cards);
}
