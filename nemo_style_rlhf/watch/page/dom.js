// Makes elements. Text becomes text nodes, never markup: a policy's answers are shown as they are.

/** el("a.quiet", {href: "#/runs", onclick}, "text", child, [children]): null and false children are left out. */
export function el(name, ...rest) {
  const [tag, ...classes] = name.split(".");
  const element = document.createElement(tag);
  if (classes.length) element.className = classes.join(" ");
  const [first, ...others] = rest;
  const isOptions = first !== null && typeof first === "object" && !(first instanceof Node) && !Array.isArray(first);
  if (isOptions) setAll(element, first);
  element.append(...flat(isOptions ? others : rest));
  return element;
}

function setAll(element, options) {
  for (const [key, value] of Object.entries(options)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "style") for (const [name, each] of Object.entries(value)) element.style.setProperty(name, each);
    else if (key in element && typeof value !== "string") element[key] = value;
    else element.setAttribute(key, value === true ? "" : value);
  }
}

function flat(children) {
  return children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);
}

/** Replaces what an element holds. */
export function fill(element, ...children) {
  element.replaceChildren(...flat(children));
  return element;
}

const digits = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });
const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** A number as people read it: four digits, powers of ten only where nothing else is short. */
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e7)) return value.toExponential(2).replace("e+", "e");
  return size >= 1000 ? grouped.format(value) : digits.format(value);
}

/** Seconds as 4.2 s, 3:07 min, 5:03:00 h or 2 d 4 h. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 60) return `${digits.format(seconds < 10 ? Math.round(seconds * 100) / 100 : Math.round(seconds))} s`;
  const [d, h, m, s] = [seconds / 86400, (seconds / 3600) % 24, (seconds / 60) % 60, seconds % 60].map(Math.floor);
  const two = (value) => String(value).padStart(2, "0");
  if (d) return `${d} d ${h} h`;
  return h ? `${h}:${two(m)}:${two(s)} h` : `${m}:${two(s)} min`;
}
