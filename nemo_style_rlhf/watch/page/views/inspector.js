// All numbers of one token, next to the text.

import { QUANTITIES, decimal } from "../colors.js";
import { el, fill } from "../dom.js";
import { tokenText } from "../text.js";

/** {element, show(place or null, chosen quantity)}. */
export function inspector(data) {
  const element = el("aside.inspector", { "aria-label": "The token's numbers" });
  return { element, show: (place, chosen) => fill(element, place === null ? hint() : token(data, place, chosen)) };
}

function hint() {
  return el("p.empty", "Point at a token, or press → and ←, to see all its numbers.");
}

function token(data, place, chosen) {
  const text = data.texts[place];
  const at = data.first + place;
  const inResponse = at - data.sample.prompt_tokens;
  const rows = [
    ["place", inResponse < 0 ? `prompt ${at + 1}` : `response ${inResponse + 1}`],
    ["id", data.ids[place]],
    data.weights_versions[place] !== null && ["weights", data.weights_versions[place]],
    !data.mask[place] && ["learned", "no"],
    ...Object.keys(QUANTITIES)
      .filter((name) => data.ranges[name] && data.numbers[name][place] !== null)
      .map((name) => [QUANTITIES[name].title, exact(data.numbers[name][place]), name]),
  ].filter(Boolean);
  return [
    el("h2", text === null ? el("span.quiet", "part of the next character") : text === "" ? el("span.quiet", "no text") : tokenText(text)),
    el("dl.pairs.numbers", rows.map(([title, value, name]) => [el(name === chosen ? "dt.chosen" : "dt", title), el(name === chosen ? "dd.chosen" : "dd", String(value))])),
  ];
}

const exact = (value) => (Math.abs(value) >= 1e-4 && Math.abs(value) < 1e5 ? value.toFixed(4).replace("-", "−") : decimal(value));
