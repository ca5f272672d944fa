// Keys: of every page, and of the view that is shown.

import { el, fill } from "./dom.js";

const everywhere = new Map();
let own = new Map();
const dialog = document.getElementById("keys");

/** Keys of every page: {key: ["what it does", action]}. */
export function bindEverywhere(bindings) {
  for (const [key, binding] of Object.entries(bindings)) everywhere.set(key, binding);
}

/** Keys of the view that is shown; the last view's keys are forgotten. Names as in KeyboardEvent.key; "j ArrowDown" is two. */
export function bind(bindings) {
  own = new Map();
  for (const [names, binding] of Object.entries(bindings)) for (const name of names.split(" ")) own.set(name, binding);
}

export function showHelp() {
  const rows = (bindings) => {
    const byMeaning = new Map();
    for (const [key, [meaning]] of bindings) byMeaning.set(meaning, [...(byMeaning.get(meaning) ?? []), key]);
    return [...byMeaning].map(([meaning, keys]) => [
      el("dt", keys.map((key) => el("kbd", SHOWN[key] ?? key))),
      el("dd", meaning),
    ]);
  };
  fill(
    dialog,
    el("h2", { id: "keys-title" }, "Keys"),
    el("dl", rows(own), rows(everywhere)),
    el("form", { method: "dialog" }, el("button", { autofocus: true }, "Close")),
  );
  dialog.showModal();
}

const SHOWN = { ArrowDown: "↓", ArrowUp: "↑", ArrowLeft: "←", ArrowRight: "→", Escape: "Esc", " ": "Space" };

function isTyping(target) {
  return target.matches?.("textarea, select, input:not([type=checkbox], [type=range], [type=radio])");
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || dialog.open) return;
  if (isTyping(event.target)) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  if (event.target.matches?.("input[type=range]") && event.key.startsWith("Arrow")) return;
  const binding = own.get(event.key) ?? everywhere.get(event.key);
  if (!binding) return;
  event.preventDefault();
  binding[1](event);
});
