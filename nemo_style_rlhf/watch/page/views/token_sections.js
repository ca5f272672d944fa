// The tokens of a sample, in sections: the prompt, the turns of an episode, the environment's messages between them.

import { el } from "../dom.js";
import { tokenText } from "../text.js";

const CHUNK = 500;
const LONG_PROMPT = 300;

/** {element, spans, firstLearned}; element is null if the run has no texts of tokens. */
export function tokenSections(data, select) {
  const spans = data.texts?.map((text, place) => token(data, text, place)) ?? [];
  const firstLearned = Math.max(0, data.mask.indexOf(true));
  if (!data.texts) return { element: null, spans, firstLearned };
  const element = el("div", sectionsOf(data).map((section) => sectionElement(section, spans)));
  const choose = (event) => {
    const span = event.target.closest?.(".token");
    if (span) select(Number(span.dataset.place));
  };
  element.addEventListener("pointerover", choose);
  element.addEventListener("click", choose);
  return { element, spans, firstLearned };
}

function token(data, text, place) {
  const classes = ["token"];
  if (!data.mask[place]) classes.push("unlearned");
  if (data.special[place]) classes.push("special");
  if (text === null) classes.push("part");
  return el("span", { class: classes.join(" "), "data-place": place }, text === null ? null : tokenText(text));
}

/** Sections that the shown tokens touch, as places in them. */
function sectionsOf(data) {
  const { sample, first, ids } = data;
  const all = [{ title: "Prompt", start: 0, end: sample.prompt_tokens, fixed: true }];
  const turns = sample.turns?.length ? sample.turns : [{ start: sample.prompt_tokens, end: data.total, finish_reason: sample.finish_reason }];
  let end = sample.prompt_tokens;
  for (const [number, turn] of turns.entries()) {
    if (turn.start > end) all.push({ title: "Environment", start: end, end: turn.start, fixed: true });
    const name = turns.length > 1 ? `Turn ${number + 1}` : "Response";
    all.push({ title: name, start: turn.start, end: turn.end, reason: turn.finish_reason });
    end = turn.end;
  }
  if (end < data.total) all.push({ title: "After the last turn", start: end, end: data.total, fixed: true });
  return all
    .map((section) => ({ ...section, from: Math.max(0, section.start - first), to: Math.min(ids.length, section.end - first) }))
    .filter((section) => section.to > section.from || (section.start === section.end && section.reason));
}

function sectionElement(section, spans) {
  const count = section.end - section.start;
  const words = `${section.title} · ${count.toLocaleString("en")} ${count === 1 ? "token" : "tokens"}${section.reason ? ` · ended by ${section.reason}` : ""}`;
  const chunks = [];
  for (let from = section.from; from < section.to; from += CHUNK) {
    const part = spans.slice(from, Math.min(section.to, from + CHUNK));
    chunks.push(section.to - section.from > CHUNK ? el("div.chunk", part) : part);
  }
  const box = el(section.fixed ? "div.tokens.fixed" : "div.tokens", chunks.length ? chunks : el("span.empty", "empty"));
  if (!section.fixed) return el("section.segment", el("h3", words), box);
  return el("details.segment", { open: section.to - section.from <= LONG_PROMPT }, el("summary", words), box);
}

/** Draws the numbers of all tokens as bars from the middle of the scale, and a line at the current one. */
export function drawCourse(canvas, values, scale, current) {
  const ratio = window.devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  if (!width || !values) return;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  const style = getComputedStyle(document.documentElement);
  const step = width / values.length;
  const oneSided = scale.middle === null || values.every((value) => value === null || value >= scale.middle);
  const zero = oneSided ? height : height / 2;
  pen.fillStyle = style.getPropertyValue("--line");
  pen.fillRect(0, Math.min(zero, height - 1), width, 1);
  for (const [place, value] of values.entries()) {
    if (value === null) continue;
    const { side, share } = scale.at(value);
    const size = Math.max(1, share * (oneSided ? height : height / 2));
    pen.fillStyle = style.getPropertyValue(`--${side}`);
    pen.fillRect(place * step, side === "below" ? zero : zero - size, Math.max(1, step - (step > 3 ? 1 : 0)), size);
  }
  if (current !== null) {
    pen.fillStyle = style.getPropertyValue("--accent");
    pen.fillRect((current + 0.5) * step - 1, 0, 2, height);
  }
}
