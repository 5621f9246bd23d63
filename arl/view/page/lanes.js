// Lanes of spans over time, and arrows between them, on a canvas.

import { ink, isDark, scale } from "./colour.js";
import { h, visible } from "./dom.js";

const [LANE, EPISODE_LANE, AXIS, GAP] = [22, 18, 24, 14]; // heights; the gap is above another kind of lanes
const MOST_LANES = 40; // of episodes
const DECADES = [-4, -3, -2, -1, 0].flatMap((k) => [1, 2, 5].map((n) => n * 10 ** k));
const ROUND = [...DECADES, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 43200, 86400, 864000];
const [BLUE, ORANGE, GREEN] = [["#0b6e8f", "#56b4d9"], ["#c2410c", "#f0934e"], ["#2f7d32", "#6fc276"]]; // in the light, in the dark
const TONES = {
  training: BLUE, waiting: ["#e3e3dc", "#2c3238"], snapshot: ["#b4881b", "#d9bb4a"], checkpoint: ["#6b4fbb", "#a996f5"],
  publishing: ORANGE, evaluation: GREEN, busy: ["#7fb2c6", "#3d7892"], paused: ["#b9b9b0", "#5b636b"], loading: ORANGE,
  fenced: ["#b3261e", "#ff8b80"], turn: BLUE, tool: ORANGE, reward: GREEN, episode: ["#b9c4cb", "#56616a"],
};
const PALE = new Set(["waiting", "paused", "busy"]);
const tone = (kind) => (TONES[kind] ?? TONES.busy)[Number(isDark())];
const isEpisode = (span) => span.kind === "episode";

export const laneLegend = () => h("div", { class: "legend" },
  Object.keys(TONES).filter((kind) => kind !== "episode").map((kind) => h("span", {}, h("span", { class: "swatch", style: { background: tone(kind) } }, "\u00a0"), ` ${kind}`)),
  h("span", {}, "episodes: by reward, dark low, yellow high"));

export class Lanes {
  constructor(canvas) {
    this.canvas = canvas;
    this.pen = canvas.getContext("2d");
    this.showsAll = false;
    this.hits = [];
  }

  get width() {
    return this.canvas.clientWidth || 600;
  }

  get left() {
    return this.width < 600 ? 84 : 150; // of the names
  }

  xOf(t) {
    return this.left + ((t - this.from) / (this.to - this.from)) * (this.width - this.left);
  }

  tOf(x) {
    return this.from + ((x - this.left) / (this.width - this.left)) * (this.to - this.from);
  }

  // What lies there: {span, lane, inside}, inside: the episode of a turn, tool or reward.
  at(x, y) {
    return this.hits.findLast((hit) => x >= hit.left - 1 && x <= hit.right + 1 && y >= hit.top && y <= hit.bottom);
  }

  // Returns how many lanes of episodes there was no room for.
  draw(data, picked) {
    this.data = data;
    const episodes = data.lanes.filter((lane) => lane.kind === "episodes");
    const hidden = new Set(this.showsAll ? [] : episodes.slice(MOST_LANES));
    const lanes = data.lanes.filter((lane) => !hidden.has(lane));
    this.rewards = scale(episodes.flatMap((lane) => lane.spans.map((span) => span.reward)));
    let height = AXIS;
    const tops = lanes.map((lane, k) => {
      const top = height + (k && lanes[k - 1].kind !== lane.kind ? GAP : 0);
      height = top + (lane.kind === "episodes" ? EPISODE_LANE : LANE);
      return top;
    });
    this.#begin(height + 8);
    this.hits = [];
    lanes.forEach((lane, k) => this.#lane(lane, tops[k], lanes[k - 1], picked));
    this.#arrows(lanes, tops);
    return hidden.size;
  }

  #begin(height) {
    const { canvas, pen, width } = this;
    const density = devicePixelRatio || 1;
    canvas.style.height = `${height}px`;
    [canvas.width, canvas.height] = [width * density, height * density];
    pen.scale(density, density);
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    pen.strokeStyle = ink("grid");
    pen.fillStyle = ink("soft");
    const { began } = this.data;
    const wish = ((this.to - this.from) / (width - this.left)) * 110;
    const step = ROUND.find((one) => one >= wish) ?? ROUND.at(-1);
    for (let t = Math.ceil((this.from - began) / step) * step; t <= this.to - began; t += step) {
      const x = Math.round(this.xOf(t + began)) + 0.5;
      pen.beginPath();
      pen.moveTo(x, AXIS - 4);
      pen.lineTo(x, height);
      pen.stroke();
      pen.fillText(sinceStart(t), x + 4, AXIS / 2);
    }
  }

  #lane(lane, top, before, picked) {
    const { pen } = this;
    const isOfEpisodes = lane.kind === "episodes";
    const tall = isOfEpisodes ? EPISODE_LANE : LANE;
    const name = isOfEpisodes ? "episodes" : visible(lane.name.replace(/^server |https?:\/\//g, ""));
    pen.fillStyle = ink("soft");
    if (!isOfEpisodes || before?.kind !== "episodes") pen.fillText(fitted(pen, name, this.left - 16), 8, top + tall / 2);
    pen.save();
    pen.beginPath();
    pen.rect(this.left, top, this.width, tall);
    pen.clip();
    for (const span of lane.spans) this.#span(span, lane, top, tall, picked);
    pen.restore();
  }

  #span(span, lane, top, tall, picked) {
    const { pen } = this;
    const [left, right] = [this.xOf(span.start), this.xOf(span.stop)];
    if (right < this.left || left > this.width) return;
    const wide = Math.max(right - left - 0.5, 1);
    const parts = isEpisode(span) && wide > 30 ? span.children ?? [] : [];
    const body = parts.length ? tall - 8 : tall - 4;
    pen.fillStyle = this.#toneOf(span);
    pen.globalAlpha = isEpisode(span) ? 0.8 : 1;
    pen.fillRect(left, top + 1, wide, body);
    pen.globalAlpha = 1;
    this.hits.push({ left, right: left + Math.max(wide, 3), top, bottom: top + tall, span, lane });
    for (const part of parts) {
      const [begin, end] = [this.xOf(part.start), this.xOf(part.stop)];
      pen.fillStyle = tone(part.failure ? "fenced" : part.kind);
      pen.fillRect(begin, top + body + 2, Math.max(end - begin - 0.5, 1), 4);
      if (end - begin > 3) this.hits.push({ left: begin, right: end, top: top + body + 1, bottom: top + tall, span: part, lane, inside: span });
    }
    if (picked && sameSpan(span, picked)) {
      pen.strokeStyle = ink("focus");
      pen.lineWidth = 2;
      pen.strokeRect(left, top + 1, wide, tall - 3);
      pen.lineWidth = 1;
    }
    if (wide <= 44 || isEpisode(span)) return;
    pen.fillStyle = PALE.has(span.kind) ? ink("ink") : isDark() ? "#111" : "#fff";
    const label = span.label || (span.kind === "busy" ? String(span.n ?? "") : span.kind);
    pen.fillText(fitted(pen, visible(label), wide - 8), Math.max(left, this.left) + 4, top + tall / 2 - 1);
  }

  #toneOf(span) {
    if (!isEpisode(span)) return tone(span.kind);
    if (["failed", "timed_out"].includes(span.how)) return tone("fenced");
    return typeof span.reward === "number" ? this.rewards.colour(span.reward)[0] : tone("episode");
  }

  #arrows(lanes, tops) {
    const { pen } = this;
    const of = (id) => lanes.findIndex((lane) => lane.id === id);
    pen.save();
    pen.beginPath();
    pen.rect(this.left, AXIS, this.width, 1e5);
    pen.clip();
    pen.strokeStyle = ink("soft");
    pen.globalAlpha = 0.55;
    for (const { from, to } of this.data.arrows.slice(0, 400)) {
      const [a, b] = [of(from.lane), of(to.lane)];
      if (a < 0 || b < 0) continue;
      const [x, y, u, v] = [this.xOf(from.t), tops[a] + LANE / 2, this.xOf(to.t), tops[b] + (b > a ? 2 : LANE - 4)];
      const back = v + (b > a ? -4 : 4);
      pen.beginPath();
      pen.moveTo(x, y);
      pen.bezierCurveTo(x, (y + v) / 2, u, (y + v) / 2, u, v);
      pen.moveTo(u - 3, back);
      pen.lineTo(u, v);
      pen.lineTo(u + 3, back);
      pen.stroke();
    }
    pen.restore();
  }
}

export const sameSpan = (a, b) => a.kind === b.kind && a.start === b.start && a.episode === b.episode && a.label === b.label;

// 5.2 s, 1:05, 2:01:05
function sinceStart(t) {
  if (t < 60) return `${Number(t.toFixed(4))} s`;
  const [hours, minutes, rest] = [Math.floor(t / 3600), Math.floor((t % 3600) / 60), Number((t % 60).toFixed(4))];
  const padded = (n) => `${n < 10 ? "0" : ""}${n}`;
  return hours ? `${hours}:${padded(minutes)}:${padded(rest)}` : `${minutes}:${padded(rest)}`;
}

function fitted(pen, text, width) {
  if (pen.measureText(text).width <= width) return text;
  let end = text.length;
  while (end > 1 && pen.measureText(`${text.slice(0, end)}…`).width > width) end--;
  return `${text.slice(0, end)}…`;
}
