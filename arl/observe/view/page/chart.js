// A line chart with what the cursor points at written above it. uPlot draws.

import { ink } from "./colour.js";
import { h, num, number, show } from "./dom.js";

const STYLES = { line: {}, dashed: { dash: [6, 4] }, thin: { dash: [1, 3], width: 1.25 }, points: { paths: () => null, points: { show: true, size: 7, width: 1.5 } } };
const HEIGHT = 190;
const WHOLE = Array.from({ length: 9 }, (_, k) => [1, 2, 5].map((n) => n * 10 ** k)).flat(); // steps, seconds

// options: {name, title, what, format, range}
export class Chart {
  constructor(options) {
    this.options = options;
    this.readout = h("div", { class: "readout" });
    this.tools = h("span", { class: "push" });
    this.plot = h("div", { class: "plot", tabindex: "0", role: "img", onkeydown: (event) => this.#key(event), onblur: () => this.#read(null) });
    this.node = h("figure", { class: "chart", "data-chart": options.name },
      h("figcaption", {}, h("h3", {}, options.title), h("span", { class: "what" }, options.what ?? ""), this.tools, this.readout), this.plot);
    this.sizes = new ResizeObserver(() => this.uplot?.setSize({ width: this.plot.clientWidth, height: HEIGHT }));
    this.sizes.observe(this.plot);
  }

  // series: [{label, line, xs, ys, colour, style, filled}]: of several runs, the series of one line stand together.
  set(series, xName) {
    const data = uPlot.join(series.map(({ xs, ys }) => [xs, ys]));
    const same = this.series?.length === series.length && series.every((s, k) => s.label === this.series[k].label);
    [this.series, this.xName] = [series, xName];
    if (same) this.#grow(data);
    else this.#draw(data);
    this.#read(null);
    const told = series.map(({ label, ys }) => `${label}: first ${number(ys.find(isNumber))}, last ${number(ys.findLast(isNumber))}`);
    this.plot.setAttribute("aria-label", `${this.options.title}, ${data[0].length} points. ${told.join("; ")}`);
  }

  close() {
    this.sizes.disconnect();
    this.uplot?.destroy();
    this.node.remove();
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
    const { range, format = mark } = this.options;
    const axis = { stroke: ink("soft"), grid: { stroke: ink("grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const series = ({ colour, style, filled }) => ({
      stroke: colour, width: 1.75, fill: filled ? `${colour}33` : undefined, spanGaps: true,
      ...STYLES[style ?? "line"], points: { show: isAlone, ...STYLES[style ?? "line"].points, stroke: colour, fill: ink("panel") },
    });
    this.uplot = new uPlot({
      width: Math.max(this.plot.clientWidth, 120),
      height: HEIGHT,
      legend: { show: false },
      padding: [8, 12, 0, 0],
      scales: { x: { time: false }, y: { range: range ?? roomy } },
      axes: [{ ...axis, size: 26, space: 60, incrs: WHOLE, values: (_, ticks) => ticks.map(number) },
        { ...axis, size: 52, space: 32, values: (_, ticks) => ticks.map(format) }],
      cursor: { y: false, drag: { x: true, y: false }, sync: { key: "arl", scales: ["x", null], setSeries: false } },
      series: [{}, ...this.series.map(series)],
      hooks: { setCursor: [(u) => this.#read(u.cursor.idx)] },
    }, data, this.plot);
    this.plot.uplot = this.uplot;
  }

  // Say the values at point k; without one, the last. Held-out points are rarer than steps: the newest at k or before.
  #read(k) {
    const { format = number } = this.options;
    const { data } = this.uplot;
    const lines = Map.groupBy(this.series.keys(), (s) => this.series[s].line);
    const valueOf = (s) => data[s + 1].slice(0, (k ?? Infinity) + 1).findLast(isNumber);
    const value = (s) => [h("span", { class: `key ${this.series[s].style ?? ""}`, style: { "--tone": this.series[s].colour } }), num(valueOf(s), format), " "];
    show(this.readout, typeof k === "number" && h("span", {}, `${this.xName} `, num(data[0][k])),
      [...lines].map(([line, own]) => h("span", {}, `${line} `, own.map(value))));
  }

  #key(event) {
    const u = this.uplot;
    const last = u.data[0].length - 1;
    const now = u.cursor.idx ?? last;
    const wanted = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: last }[event.key];
    if (wanted === undefined) return;
    event.preventDefault();
    this.readout.setAttribute("aria-live", "polite");
    u.setCursor({ left: u.valToPos(u.data[0][Math.min(Math.max(wanted, 0), last)], "x"), top: 20 });
  }
}

const TICK = new Intl.NumberFormat("en", { maximumSignificantDigits: 6 });
const mark = (tick) => (Math.abs(tick) < 1e-3 || Math.abs(tick) >= 1e6 ? number(tick) : TICK.format(tick).replace("-", "−"));

const isNumber = (value) => typeof value === "number";

const isAlone = (u, s) => u.data[s].filter(isNumber).length === 1; // no line would be seen

function roomy(_, low, high) {
  if (low === null || high === null) return [0, 1];
  const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 0.1;
  return [low >= 0 && low <= high - low + room ? 0 : low - room, high + room];
}
