// A line chart with what the cursor points at written above it. uPlot draws.

import { ink, scale } from "./colour.js";
import { h, num, number, show } from "./dom.js";

const STYLES = { line: {}, dashed: { dash: [6, 4] }, thin: { dash: [1, 3], width: 1.25 }, points: { paths: () => null, points: { show: true, size: 7, width: 1.5 } } };
const HEIGHT = 190;
const WHOLE = Array.from({ length: 9 }, (_, k) => [1, 2, 5].map((n) => n * 10 ** k)).flat(); // steps, seconds

// series: [{label, line, xs, ys, colour, style, filled}]: of several runs, the series of one line stand together.
//; options: {name, title, what, format, xName, range, heat}
export class Chart {
  constructor(options) {
    this.options = options;
    this.readout = h("div", { class: "readout" });
    this.plot = h("div", { class: "plot", tabindex: "0", role: "img", onkeydown: (event) => this.#key(event), onblur: () => this.#read(null) });
    this.node = h("figure", { class: "chart", style: { margin: 0 }, "data-chart": options.name },
      h("figcaption", {}, h("h3", {}, options.title), options.what && h("span", { class: "what" }, options.what), this.readout), this.plot);
    this.sizes = new ResizeObserver(() => this.uplot?.setSize({ width: this.plot.clientWidth, height: HEIGHT }));
    this.sizes.observe(this.plot);
  }

  set(series) {
    const data = series.length ? uPlot.join(series.map(({ xs, ys }) => [xs, ys])) : [[]];
    const same = this.series?.length === series.length && series.every((s, k) => s.label === this.series[k].label);
    this.series = series;
    if (same && this.uplot) this.#grow(data);
    else this.#draw(data);
    this.#read(null);
    const told = series.map(({ label, ys }) => `${label}: first ${number(ys.find(isNumber))}, last ${number(ys.findLast(isNumber))}`);
    this.plot.setAttribute("aria-label", `${this.options.title}, ${data[0].length} points. ${told.join("; ")}`);
  }

  close() {
    this.sizes.disconnect();
    this.uplot?.destroy();
  }

  // What somebody zoomed into stays in sight.
  #grow(data) {
    const [u, xs] = [this.uplot, this.uplot.data[0]];
    const isZoomed = xs.length > 1 && (u.scales.x.min > xs[0] || u.scales.x.max < xs.at(-1));
    u.setData(data, !isZoomed);
    if (isZoomed) u.redraw();
  }

  #draw(data) {
    this.uplot?.destroy();
    const { range, heat, format = number } = this.options;
    const axis = { stroke: ink("soft"), grid: { stroke: ink("grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const marks = (as) => (_, ticks) => ticks.map((tick) => (as === number ? mark(tick, ticks) : as(tick)));
    this.uplot = new uPlot({
      width: Math.max(this.plot.clientWidth, 120),
      height: HEIGHT,
      legend: { show: false },
      padding: [8, 12, 0, 0],
      scales: { x: { time: false }, y: { range: range ?? roomy } },
      axes: [{ ...axis, size: 26, space: 60, incrs: WHOLE, values: marks(number) }, { ...axis, size: heat ? 34 : 52, space: 32, values: marks(format) }],
      cursor: { y: false, drag: { x: true, y: false }, sync: { key: "arl", scales: ["x", null], setSeries: false }, points: { show: !heat } },
      series: [{}, ...this.series.map(({ colour, style, filled }) => ({
        stroke: colour, width: 1.75, fill: filled ? `${colour}33` : undefined, spanGaps: true, show: !heat,
        ...STYLES[style ?? "line"], points: { show: isAlone, ...STYLES[style ?? "line"].points, stroke: colour, fill: ink("panel") },
      }))],
      hooks: { setCursor: [(u) => this.#read(u.cursor.idx)], ...(heat ? { drawAxes: [heat] } : {}) },
    }, data, this.plot);
    this.plot.uplot = this.uplot;
  }

  #read(k) {
    const data = this.uplot?.data;
    if (!data) return;
    const { xName = "", format = number, tell } = this.options;
    if (tell) return show(this.readout, tell(k));
    const lines = new Map();
    this.series.forEach(({ line, colour, style }, s) => {
      const value = k === null || k === undefined ? data[s + 1].findLast(isNumber) : near(data[s + 1], k);
      const shown = [h("span", { class: `key ${style ?? ""}`, style: { "--tone": colour } }), num(value, format), " "];
      lines.set(line, [...(lines.get(line) ?? []), ...shown]);
    });
    show(this.readout, typeof k === "number" && h("span", {}, `${xName} `, num(data[0][k])),
      [...lines].map(([line, shown]) => h("span", {}, `${line} `, shown)));
  }

  #key(event) {
    const u = this.uplot;
    const last = (u?.data[0].length ?? 0) - 1;
    const now = u?.cursor.idx ?? last;
    const wanted = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: last }[event.key];
    if (wanted === undefined || last < 0) return;
    event.preventDefault();
    this.readout.setAttribute("aria-live", "polite");
    const k = Math.min(Math.max(wanted, 0), last);
    u.setCursor({ left: u.valToPos(u.data[0][k], "x"), top: 20 });
  }
}

// As many digits as tell the ticks apart.
function mark(tick, ticks) {
  const [step, most] = [ticks[1] - ticks[0], Math.max(Math.abs(ticks[0]), Math.abs(ticks.at(-1)))];
  if (!(step > 0) || most >= 1e5 || most < 1e-3) return number(tick, 2);
  let digits = 0;
  while (digits < 8 && Math.abs(step * 10 ** digits - Math.round(step * 10 ** digits)) > 1e-6) digits++;
  return tick.toFixed(digits).replace("-", "−");
}

const isNumber = (value) => typeof value === "number";

const isAlone = (u, s) => u.data[s].filter(isNumber).length === 1; // no line would be seen

// Held-out points are rarer than steps: the newest that is not newer than the cursor.
const near = (values, k) => {
  for (let j = k; j >= 0; j--) if (isNumber(values[j])) return values[j];
  return null;
};

function roomy(_, low, high) {
  if (low === null || high === null) return [0, 1];
  const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 0.1;
  return [low >= 0 && low <= high - low + room ? 0 : low - room, high + room];
}

// A chart whose cells are shares of trained tokens: versions of staleness upwards, steps to the right.
export function heatChart(options) {
  let [steps, staleness, tokens, total, bound] = [[], [], [], [], null];
  const tell = (k) => {
    const at = k ?? steps.length - 1;
    const shareOf = (s) => num((100 * tokens[at][s]) / total[at], (v) => `${v.toFixed(0)} %`);
    return [h("span", {}, `${typeof k === "number" ? "step" : "last step"} `, num(steps[at])),
      staleness.map((old, s) => tokens[at]?.[s] > 0 && h("span", {}, `${old} old `, shareOf(s)))];
  };
  const heat = (u) => {
    const { colour } = scale([], { low: 0, high: 1 });
    const { ctx, bbox } = u;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    steps.forEach((step, k) => staleness.forEach((old, s) => {
      if (!tokens[k][s]) return;
      const [left, right] = [u.valToPos(step - 0.5, "x", true), u.valToPos(step + 0.5, "x", true)];
      const [top, bottom] = [u.valToPos(old + 0.5, "y", true), u.valToPos(old - 0.5, "y", true)];
      ctx.fillStyle = colour(tokens[k][s] / total[k])[0];
      ctx.fillRect(left, top, Math.max(right - left, 1), bottom - top - 1);
    }));
    if (bound !== null && bound !== undefined) {
      const y = u.valToPos(bound + 0.5, "y", true);
      ctx.strokeStyle = ink("bad");
      ctx.setLineDash([4, 4]);
      ctx.beginPath();
      ctx.moveTo(bbox.left, y);
      ctx.lineTo(bbox.left + bbox.width, y);
      ctx.stroke();
    }
    ctx.restore();
  };
  const range = () => [-0.5, Math.max(staleness.length, (bound ?? 0) + 1) - 0.3];
  const chart = new Chart({ ...options, heat, tell, range, format: (v) => (Number.isInteger(v) ? number(v) : "") });
  chart.update = (table) => {
    ({ steps, staleness, tokens, bound } = table);
    total = tokens.map((row) => row.reduce((a, b) => a + b, 0));
    chart.set([{ label: "largest staleness", xs: steps, ys: tokens.map((row) => row.findLastIndex((n) => n > 0)), colour: ink("soft") }]);
  };
  return chart;
}
