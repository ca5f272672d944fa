"use strict";
(() => {
  const ROWS_AT_A_TIME = 20;
  const LONG_TEXT = 1500;
  const { checkpoints, rows } = JSON.parse(document.getElementById("data").textContent);
  const element = (id) => document.getElementById(id);
  const [search, order, count, list, more] = ["search", "order", "count", "rows", "more"].map(element);

  const mean = (numbers) => (numbers.length ? numbers.reduce((a, b) => a + b, 0) / numbers.length : null);
  for (const row of rows) {
    row.means = row.cells.map((cell) => mean(cell.map(([, score]) => score).filter((score) => score !== null)));
    const scores = row.cells.flat().map(([, score]) => score).filter((score) => score !== null);
    row.best = scores.length && Math.max(...scores) > Math.min(...scores) ? Math.max(...scores) : null;
    row.texts = [row.prompt, row.label ?? "", ...row.cells.flat().map(([response]) => response)];
  }
  const sorted = rows.flatMap((row) => row.cells.flat().map(([, score]) => score)).filter((score) => score !== null);
  sorted.sort((a, b) => a - b);
  const low = sorted[Math.floor(sorted.length * 0.05)];
  const high = sorted[Math.ceil(sorted.length * 0.95) - 1];
  const share = (score) => (high > low ? Math.min(1, Math.max(0, (score - low) / (high - low))) : 0.5);

  // Elements are made with textContent only, so that no text becomes markup.
  function make(tag, className, ...children) {
    const made = document.createElement(tag);
    if (className) made.className = className;
    made.append(...children);
    return made;
  }

  function marked(text, pattern) {
    const parts = [];
    let end = 0;
    for (const match of pattern ? text.matchAll(pattern) : []) {
      parts.push(text.slice(end, match.index), make("mark", "", match[0]));
      end = match.index + match[0].length;
    }
    return [...parts, text.slice(end)];
  }

  function textBlock(text, pattern) {
    if (!text.trim()) return [make("p", "empty", text ? "only white space" : "empty")];
    const block = make("p", "text", ...marked(text.trim(), pattern));
    block.dir = "auto";
    if (text.length <= LONG_TEXT) return [block];
    const fold = make("button", "fold");
    fold.type = "button";
    const show = (folded) => {
      block.classList.toggle("folded", folded);
      fold.textContent = folded ? "Show all of it" : "Show less";
      fold.setAttribute("aria-expanded", String(!folded));
    };
    fold.addEventListener("click", () => show(!block.classList.contains("folded")));
    show(!block.querySelector("mark"));
    return [block, fold];
  }

  function responseBlock(row, [text, score, length, truncated], pattern) {
    const badges = make("div", "badges");
    if (score !== null) {
      const badge = make("span", "badge score", score.toFixed(3));
      badge.style.setProperty("--share", share(score));
      badges.append(badge);
    } else if (sorted.length) {
      badges.append(make("span", "badge cut", "no score"));
    }
    const best = score !== null && score === row.best;
    if (best) badges.append(make("span", "badge crown", "best"));
    badges.append(`${length} ${length === 1 ? "token" : "tokens"}`);
    if (truncated) badges.append(make("span", "badge cut", "truncated"));
    return make("div", best ? "response best" : "response", badges, ...textBlock(text, pattern));
  }

  function difference(row, column) {
    return row.means[column] === null || row.means[0] === null ? null : row.means[column] - row.means[0];
  }

  function signed(number) {
    return (number < 0 ? "−" : "+") + Math.abs(number).toFixed(3);
  }

  function rowBlock(row, pattern) {
    const prompt = make("section", "prompt", make("div", "number", `Prompt ${row.id}`), ...textBlock(row.prompt, pattern));
    prompt.setAttribute("aria-label", `Prompt ${row.id}`);
    if (row.label !== null) prompt.append(make("p", "note", "Label: ", ...marked(row.label, pattern)));
    const cells = row.cells.map((cell, column) => {
      const section = make("section", "cell", make("div", "name", checkpoints[column]));
      section.setAttribute("aria-label", checkpoints[column]);
      section.append(...cell.map((response) => responseBlock(row, response, pattern)));
      const against = column ? difference(row, column) : null;
      if (against !== null) section.append(make("div", "note", `${signed(against)} against ${checkpoints[0]}`));
      return section;
    });
    const block = make("article", "grid row", prompt, ...cells);
    block.dataset.prompt = row.id;
    return block;
  }

  const ORDERS = [["As in the file", null]];
  const by = (value, sign) => (a, b) => {
    const [left, right] = [value(a), value(b)];
    if (left === null || right === null) return (left === null) - (right === null) || a.id - b.id;
    return sign * (left - right) || a.id - b.id;
  };
  if (sorted.length && checkpoints.length === 1) {
    ORDERS.push(["Highest score first", by((row) => row.means[0], -1)], ["Lowest score first", by((row) => row.means[0], 1)]);
  } else if (sorted.length) {
    for (const column of checkpoints.keys()) {
      if (!column) continue;
      const value = (row) => difference(row, column);
      ORDERS.push([`${checkpoints[column]} above ${checkpoints[0]} most`, by(value, -1)]);
      ORDERS.push([`${checkpoints[column]} below ${checkpoints[0]} most`, by(value, 1)]);
    }
  }
  order.append(...ORDERS.map(([name], index) => new Option(name, index)));
  order.parentElement.hidden = ORDERS.length === 1;

  let pattern = null;
  let shown = [];
  let next = 0;

  function showMore() {
    const following = shown.slice(next, next + ROWS_AT_A_TIME);
    next += following.length;
    list.append(...following.map((row) => rowBlock(row, pattern)));
    more.hidden = next >= shown.length;
  }

  function matches(text) {
    let found = 0;
    pattern.lastIndex = 0;
    while (pattern.exec(text)) found += 1;
    return found;
  }

  function update() {
    const query = search.value.trim();
    pattern = query ? new RegExp(query.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"), "giu") : null;
    let hits = 0;
    shown = rows.filter((row) => {
      if (!pattern) return true;
      const found = row.texts.reduce((sum, text) => sum + matches(text), 0);
      hits += found;
      return found > 0;
    });
    const compare = ORDERS[order.value][1];
    if (compare) shown.sort(compare);
    next = 0;
    list.replaceChildren();
    showMore();
    const number = (value, noun) => `${value.toLocaleString("en")} ${noun}${value === 1 ? "" : noun === "match" ? "es" : "s"}`;
    const total = number(rows.length, "prompt");
    count.textContent = pattern ? `${shown.length.toLocaleString("en")} of ${total}, ${number(hits, "match")}` : total;
  }

  // A new list begins at its top, below the bar, unless the reader has not scrolled that far.
  function updateAndReturn() {
    const bar = document.querySelector(".bar");
    const reached = bar.getBoundingClientRect().top <= 0;
    update();
    if (reached) window.scrollTo({ top: window.scrollY + list.getBoundingClientRect().top - bar.offsetHeight });
  }

  search.addEventListener("input", updateAndReturn);
  order.addEventListener("change", updateAndReturn);
  search.form.addEventListener("submit", (event) => event.preventDefault());
  more.addEventListener("click", showMore);
  const nearEnd = new IntersectionObserver(
    (entries) => {
      if (!entries.some((entry) => entry.isIntersecting)) return;
      showMore();
      nearEnd.unobserve(more); // so that it looks again where the new rows were short
      nearEnd.observe(more);
    },
    { rootMargin: "1500px" },
  );
  nearEnd.observe(more);
  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest("input, select, textarea");
    if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) {
      event.preventDefault();
      search.focus();
      search.select();
    } else if (event.key === "Escape" && event.target === search && search.value) {
      search.value = "";
      updateAndReturn();
    }
  });
  update();
})();
