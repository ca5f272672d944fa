// The server's answers about a comparison, computed from all its rows: an exported report has no server to search and sort.

import { patternOf } from "../text.js";

/** `whole` with the rows that hold `q`, in this order, from `offset` on. */
export function partOf(whole, { order = "file", q = "", offset = 0, limit }) {
  const [kind, column] = order.split(":");
  const value = (row) => (column ? row.differences[column] : row.means[0]);
  const sign = ["highest", "above"].includes(kind) ? -1 : 1;
  const byValue = (a, b) => {
    const [one, other] = [value(a), value(b)];
    if (one === null || other === null) return (one === null) - (other === null) || a.id - b.id;
    return sign * (one - other) || a.id - b.id;
  };
  const rows = kind === "file" ? whole.rows : [...whole.rows].sort(byValue);
  const pattern = patternOf(q);
  const texts = (row) => [row.prompt, row.label ?? "", ...row.cells.flat().map((cell) => cell.text)];
  const counts = new Map(rows.map((row) => [row, pattern ? texts(row).reduce((sum, text) => sum + [...text.matchAll(pattern)].length, 0) : 0]));
  const found = pattern ? rows.filter((row) => counts.get(row)) : rows;
  const matches = [...counts.values()].reduce((sum, each) => sum + each, 0);
  return { ...whole, found: found.length, matches, rows: found.slice(offset, offset + limit) };
}
