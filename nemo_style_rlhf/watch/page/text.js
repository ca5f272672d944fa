// Shows a policy's text as it is: what would move the cursor, hide, or turn the reading direction becomes a visible sign.

import { el } from "./dom.js";

const HIDDEN =
  /[\u0000-\u0009\u000b-\u001f\u007f-\u009f\u00ad\u061c\u115f\u1160\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff\ufff9-\ufffb]|[\u{e0000}-\u{e007f}]/gu;
const JOINED = /[\p{L}\p{M}\p{Extended_Pictographic}\u{1f3fb}-\u{1f3ff}\ufe0f]$/u;
const JOINS = /^[\p{L}\p{M}\p{Extended_Pictographic}]/u;
const NAMES = {
  0x09: "tab", 0x0d: "carriage return", 0x1b: "escape", 0xad: "soft hyphen", 0x200b: "zero width space", 0x200c: "zero width non-joiner",
  0x200d: "zero width joiner", 0x200e: "left-to-right mark", 0x200f: "right-to-left mark", 0x2028: "line separator",
  0x2029: "paragraph separator", 0x202a: "left-to-right embedding", 0x202b: "right-to-left embedding",
  0x202c: "pop directional formatting", 0x202d: "left-to-right override", 0x202e: "right-to-left override",
  0x2066: "left-to-right isolate", 0x2067: "right-to-left isolate", 0x2068: "first strong isolate",
  0x2069: "pop directional isolate", 0xfeff: "byte order mark",
};
const CONTROLS = "NUL SOH STX ETX EOT ENQ ACK BEL BS TAB LF VT FF CR SO SI DLE DC1 DC2 DC3 DC4 NAK SYN ETB CAN EM SUB ESC FS GS RS US".split(" ");
const MOST_SIGNS = 500;
const LONG = 1200;

const code = (character) => character.codePointAt(0);
const hex = (value) => `U+${value.toString(16).toUpperCase().padStart(4, "0")}`;

function sign(character) {
  const value = code(character);
  const short = value === 9 ? "→" : (CONTROLS[value] ?? (value === 0x7f ? "DEL" : hex(value)));
  return el("span.sign", { title: `${hex(value)} ${NAMES[value] ?? "control character"}` }, short);
}

/** Joiners between letters or emoji shape what one sees, and stay. */
function belongs(text, match) {
  const value = code(match[0]);
  if (value !== 0x200c && value !== 0x200d) return false;
  return JOINED.test(text.slice(Math.max(0, match.index - 2), match.index)) && JOINS.test(text.slice(match.index + 1, match.index + 3));
}

/** Nodes and strings for `text`. Where a text consists of signs, only the first are elements. */
export function visible(text) {
  const parts = [];
  let end = 0;
  let signs = 0;
  for (const match of text.matchAll(HIDDEN)) {
    if (belongs(text, match)) continue;
    parts.push(text.slice(end, match.index), signs++ < MOST_SIGNS ? sign(match[0]) : hex(code(match[0])));
    if (match[0] === "\t") parts.push("\t");
    end = match.index + match[0].length;
  }
  parts.push(text.slice(end));
  return parts.filter((part) => part !== "");
}

/** The text of one token: line breaks are seen, and break the line. */
export function tokenText(text) {
  return text.split("\n").flatMap((line, place) => (place ? [el("span.sign", { title: "line break" }, "↵"), "\n", ...visible(line)] : visible(line)));
}

/** A pattern that finds `words` as they are, upper and lower case alike; null for none. */
export function patternOf(words) {
  return words ? new RegExp(words.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"), "giu") : null;
}

/** `text` with the pattern's matches marked. */
export function marked(text, pattern) {
  const parts = [];
  let end = 0;
  for (const match of pattern ? text.matchAll(pattern) : []) {
    if (match[0] === "") continue;
    parts.push(...visible(text.slice(end, match.index)), el("mark", visible(match[0])));
    end = match.index + match[0].length;
  }
  return [...parts, ...visible(text.slice(end))];
}

/** A whole text, folded where it is long. `more`: characters that were not sent, and a link to them. */
export function textBlock(text, { pattern = null, leftOut = 0, href = null } = {}) {
  if (!text?.trim()) return [el("p.empty", text ? "only white space" : "empty")];
  const block = el("p.text", { dir: "auto" }, marked(text.trim(), pattern));
  const rest = leftOut
    ? el("p.note", `${leftOut.toLocaleString("en")} more characters`, href && [": ", el("a", { href }, "see them all")])
    : null;
  if (text.length <= LONG && (text.match(/\n/g)?.length ?? 0) < 20) return [block, rest];
  const fold = el("button.fold", { type: "button" });
  const show = (folded) => {
    block.classList.toggle("folded", folded);
    fold.textContent = folded ? "Show all of it" : "Show less";
    fold.setAttribute("aria-expanded", String(!folded));
  };
  fold.addEventListener("click", () => show(!block.classList.contains("folded")));
  show(!block.querySelector("mark"));
  return [block, fold, rest];
}

/** A text on one line, for a table. */
export function oneLine(text, pattern = null) {
  if (text === null || text === undefined) return "–";
  if (!text.trim()) return el("span.empty", text ? "only white space" : "empty");
  return marked(text.slice(0, 300).replace(/\s*\n\s*/g, " ↵ "), pattern);
}
