// Charts of metrics over steps, on uPlot.

import { el, fill, number } from "./dom.js";
import uPlot from "./vendor/uPlot.js";

const HEIGHT = 150;
const COLORS = 7;

/** The look of the run at `place` among the chosen ones: a color, and beyond the last color a dash, too. */
export function look(place) {
  const cycle = Math.floor(place / COLORS);
  return { color: `var(--series-${(place % COLORS) + 1})`, dash: cycle ? [6 - Math.min(cycle, 3), 3 * cycle] : undefined };
}

function resolved(color) {
  const name = /^var\((.+)\)$/.exec(color);
  return name ? getComputedStyle(document.documentElement).getPropertyValue(name[1]).trim() : color;
}

/** Exponential moving average of what is known; the first values weigh as much as they should (as in Adam). */
export function smoothed(values, share) {
  let mean = 0;
  let weight = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    mean = share * mean + (1 - share) * value;
    weight = share * weight + (1 - share);
    return mean / weight;
  });
}

/** One metric of several runs. */
export class Chart {
  /** lines: [{label, place, steps, values}]; marks: [{step, color}] are events; sync: charts with the same key share a cursor. */
  constructor(name, { sync }) {
    this.values = el("span.values");
    this.plotted = el("div.plot");
    this.root = el("figure.chart", el("figcaption", el("span.name", { title: name }, name), this.values), this.plotted);
    this.sync = sync;
    this.width = 0;
    this.shape = "";
  }

  draw(lines, { smoothing, marks, width }) {
    this.lines = lines;
    this.marks = marks;
    const tables = lines.map(({ steps, values }) => [steps, values]);
    const joined = tables.length ? uPlot.join(tables) : [[]];
    const raw = joined.slice(1);
    this.last = raw.map((values) => values.findLast((value) => value !== null && value !== undefined) ?? null);
    this.shown = smoothing > 0 ? raw.map((values) => smoothed(values, smoothing)) : raw;
    const data = [joined[0], ...(smoothing > 0 ? raw : []), ...this.shown];
    const shape = JSON.stringify([lines.map(({ label, place }) => [label, place]), smoothing > 0]);
    if (shape !== this.shape || !this.plot) {
      this.shape = shape;
      this.plot?.destroy();
      this.plot = new uPlot(this.options(lines, smoothing > 0, width), data, this.plotted);
      this.width = width;
    } else {
      if (width !== this.width) this.plot.setSize({ width: (this.width = width), height: HEIGHT });
      this.plot.setData(data);
    }
    this.tell(null);
  }

  options(lines, smooths, width) {
    const quiet = resolved("var(--quiet)");
    const grid = { stroke: resolved("var(--line)"), width: 1 };
    const line = ({ place }, faint) => {
      const { color, dash } = look(place);
      return { stroke: resolved(color), width: faint ? 1 : 1.75, alpha: faint ? 0.28 : 1, dash, spanGaps: true, points: { size: 5, show: faint ? false : few } };
    };
    const few = (plot, index) => plot.data[index].reduce((count, value) => count + (value != null), 0) < 30;
    const axis = { stroke: quiet, grid, ticks: { show: false }, font: "11px system-ui, sans-serif", gap: 5 };
    return {
      width,
      height: HEIGHT,
      legend: { show: false },
      padding: [8, 8, 0, 0],
      cursor: { sync: { key: this.sync }, drag: { x: true, y: false }, points: { size: 6 } },
      scales: { x: { time: false }, y: { range: padded } },
      axes: [
        { ...axis, size: 24, space: 50, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 1e6] },
        { ...axis, size: 46, space: 28, values: (_, ticks) => ticks.map(number) },
      ],
      series: [{}, ...(smooths ? lines.map((each) => line(each, true)) : []), ...lines.map((each) => line(each, false))],
      hooks: {
        setCursor: [(plot) => this.tell(plot.cursor.idx)],
        drawClear: [(plot) => this.drawMarks(plot)],
      },
    };
  }

  /** Shows the values under the cursor, or the last ones. */
  tell(index) {
    const at = index === null || index === undefined ? null : index;
    const step = at === null ? null : this.plot?.data[0][at];
    fill(
      this.values,
      step === null || step === undefined ? null : el("span.step", `step ${step}`),
      this.lines.map(({ label, place }, line) =>
        el(
          "span.value",
          { title: label, style: { "--color": look(place).color } },
          number(at === null ? this.last[line] : nearest(this.shown[line], at)),
        ),
      ),
    );
  }

  drawMarks(plot) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash([3, 3]);
    for (const { step, color } of this.marks) {
      const x = Math.round(plot.valToPos(step, "x", true)) + 0.5;
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.strokeStyle = resolved(color);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  destroy() {
    this.plot?.destroy();
    this.plot = null;
  }
}

/** The value at `index`, or the last one before it: validation does not happen in every step. */
function nearest(values, index) {
  for (let place = index; place >= 0; place--) if (values[place] !== null && values[place] !== undefined) return values[place];
  return null;
}

/** Room above and below; a constant gets a scale around it instead of a line on the edge. */
function padded(plot, low, high) {
  if (low === null || high === null) return [0, 1];
  const room = high === low ? Math.abs(low) * 0.1 || 1 : (high - low) * 0.08;
  return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
}
