// Color scales for numbers of tokens: blue and orange on either side of a middle, or one hue that deepens. Both survive color
// blindness and gray print, and leave the text on them readable.

import { el, number } from "./dom.js";

/** Quantities that can color tokens. `middle`: where blue turns to orange. */
export const QUANTITIES = {
  advantages: { title: "Advantage", middle: 0 },
  kl: { title: "KL", middle: 0 },
  values: { title: "Value", middle: 0 },
  rewards: { title: "Reward", middle: 0 },
  returns: { title: "Return", middle: 0 },
  ratios: { title: "Ratio", middle: 1 },
  sampler_gap: { title: "Sampler gap", middle: 0 },
  logprobs: { title: "Log-prob", middle: null },
  ref_logprobs: { title: "Reference log-prob", middle: null },
  sampler_logprobs: { title: "Sampler log-prob", middle: null },
};

/** A scale over [low, high]: from a number to {side, share}. Log-probabilities deepen toward the unlikely. */
export function scaleOf(name, range) {
  const { middle } = QUANTITIES[name];
  const [low, high] = range ?? [0, 0];
  if (middle === null) {
    const width = high - low || 1;
    return { low, high, middle, at: (value) => ({ side: "one", share: clamp((high - value) / width) }) };
  }
  const width = Math.max(Math.abs(low - middle), Math.abs(high - middle)) || 1;
  return {
    low: middle - width, high: middle + width, middle,
    at: (value) => ({ side: value < middle ? "below" : "above", share: clamp(Math.abs(value - middle) / width) }),
  };
}

/** A number with three decimals if they matter, so that a column of them lines up. */
export function decimal(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (Number.isInteger(value) || (size !== 0 && size < 0.001) || size >= 1000) return number(value).replace("-", "−");
  return value.toFixed(3).replace("-", "−");
}

const clamp = (share) => Math.min(1, Math.max(0, share));

/** Colors an element by its number. */
export function paint(element, scale, value) {
  element.classList.remove("below", "above", "one");
  if (value === null || value === undefined) return void element.style.removeProperty("--share");
  const { side, share } = scale.at(value);
  element.classList.add(side);
  element.style.setProperty("--share", share.toFixed(3));
}

/** The scale as a bar with its numbers. */
export function legend(scale) {
  const kind = scale.middle === null ? "one" : "two";
  const marks = scale.middle === null ? [scale.low, scale.high] : [scale.low, scale.middle, scale.high];
  return el(
    "div.scale",
    { role: "img", "aria-label": `colors from ${marks.map(number).join(" to ")}` },
    el(`div.ramp.${kind}`),
    el("div.marks", marks.map((value, place) => el("span", (place === 0 && kind === "two" ? "≤ " : place && place === marks.length - 1 && kind === "two" ? "≥ " : "") + decimal(value)))),
  );
}
