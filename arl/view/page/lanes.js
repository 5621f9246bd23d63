// Lanes of spans over time, and arrows between them, on a canvas.

import { BLUE, GREEN, OCHRE, ORANGE, PURPLE, ink, isDark, rewardScale, tone } from "./colour.js";
import { h, seconds, visible } from "./dom.js";

const [LANE, AXIS, GAP] = [22, 24, 14]; // heights; the gap is above another kind of lanes
const ROOM = 4000; // for the lanes of one kind: very many are thin, since a canvas has a largest height
const LEGIBLE = 12; // from this height on, text fits
const DECADES = [-4, -3, -2, -1, 0].flatMap((k) => [1, 2, 5].map((n) => n * 10 ** k));
const ROUND = [...DECADES, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 43200, 86400, 864000];
const RED = ["#b3261e", "#ff8b80"];
const TONES = {
  training: BLUE, waiting: ["#e3e3dc", "#2c3238"], snapshot: OCHRE, checkpoint: PURPLE, publishing: ORANGE, evaluation: GREEN,
  busy: ["#7fb2c6", "#3d7892"], paused: ["#b9b9b0", "#5b636b"], asleep: ["#d9d5cc", "#454b52"], moving: ["#c9b6d9", "#6b5680"],
  loading: ORANGE, fenced: RED, recovering: RED, turn: BLUE, tool: ORANGE, reward: GREEN,
};
const UNKNOWN = ["#b9c4cb", "#56616a"]; // an episode without a reward, a kind that is new
const PALE = new Set(["waiting", "paused", "asleep", "busy"]);

export const laneLegend = () => h("div", { class: "legend" },
  Object.entries(TONES).map(([kind, pair]) => h("span", {}, h("span", { class: "swatch", style: { background: tone(pair) } }, "\u00a0"), ` ${kind}`)),
  h("span", {}, "episodes: by reward, dark low, yellow high"));

export class Lanes {
  hits = [];

  constructor(canvas) {
    this.canvas = canvas;
    this.pen = canvas.getContext("2d");
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

  draw(data, picked) {
    [this.data, this.picked, this.hits] = [data, picked, []];
    const episodes = data.lanes.filter((lane) => lane.kind === "episodes");
    const kinds = Map.groupBy(data.lanes, (lane) => lane.kind);
    const tallOf = ({ kind }) => Math.min(Math.max(Math.floor(ROOM / kinds.get(kind).length), 3), kind === "episodes" ? 18 : LANE);
    this.rewards = rewardScale(episodes.flatMap((lane) => lane.spans.map((span) => span.reward)));
    let height = AXIS;
    const lanes = new Map(data.lanes.map((lane, k) => {
      const top = height + (k && data.lanes[k - 1].kind !== lane.kind ? GAP : 0);
      height = top + tallOf(lane);
      return [lane.id, { lane, top, tall: height - top }];
    }));
    this.#begin(height + 8);
    for (const place of lanes.values()) this.#lane(place, place.lane === kinds.get(place.lane.kind)[0]);
    this.#arrows(lanes);
  }

  #begin(height) {
    const { canvas, pen, width } = this;
    canvas.style.height = `${height}px`;
    [canvas.width, canvas.height] = [width * devicePixelRatio, height * devicePixelRatio];
    pen.scale(devicePixelRatio, devicePixelRatio);
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
      pen.fillText(seconds(t, 4), x + 4, AXIS / 2);
    }
  }

  #lane({ lane, top, tall }, isFirst) {
    const isNameless = lane.kind === "episodes" || tall < LEGIBLE; // the first says what they all are
    const name = lane.kind === "episodes" ? "episodes" : isNameless ? `${lane.kind}s` : visible(lane.name.replace(/^server |https?:\/\//g, ""));
    this.pen.fillStyle = ink("soft");
    if (isFirst || !isNameless) this.pen.fillText(fitted(this.pen, name, this.left - 16), 8, top + tall / 2);
    for (const span of lane.spans) this.#span(span, lane, top, tall);
  }

  #span(span, lane, top, tall) {
    const { pen } = this;
    const isEpisode = lane.kind === "episodes";
    const [left, wide] = this.#bar(span, top + 1, tall - (tall < 8 ? 1 : 4), this.#toneOf(span), { top, bottom: top + tall, span, lane });
    const parts = isEpisode && wide > 30 && tall >= 10 ? span.children : [];
    if (parts.length) pen.clearRect(left, top + tall - 7, wide, 7);
    for (const part of parts) {
      const hit = { top: top + tall - 7, bottom: top + tall, span: part, lane, inside: span };
      this.#bar(part, top + tall - 6, 4, tone(part.failure ? RED : TONES[part.kind]), hit);
    }
    if (wide && this.picked && sameSpan(span, this.picked)) {
      [pen.strokeStyle, pen.lineWidth] = [ink("focus"), 2];
      pen.strokeRect(left, top + 1, wide, tall - 3);
      pen.lineWidth = 1;
    }
    if (wide <= 44 || isEpisode || tall < LEGIBLE) return;
    pen.fillStyle = PALE.has(span.kind) ? ink("ink") : isDark() ? "#111" : "#fff";
    pen.fillText(fitted(pen, visible(span.label || span.kind), wide - 8), left + 4, top + tall / 2 - 1);
  }

  // Draw what is in sight of a bar, and note where it is; returns its left end and its width.
  #bar(span, top, height, colour, hit) {
    const [left, right] = [Math.max(this.xOf(span.start), this.left), Math.min(this.xOf(span.stop), this.width)];
    if (right < left) return [left, 0];
    const wide = Math.max(right - left - 0.5, 1);
    this.pen.fillStyle = colour;
    this.pen.fillRect(left, top, wide, height);
    this.hits.push({ left, right: left + Math.max(wide, 3), ...hit });
    return [left, wide];
  }

  #toneOf(span) {
    if (["failed", "timed_out"].includes(span.how)) return tone(RED);
    return typeof span.reward === "number" ? this.rewards(span.reward)[0] : tone(TONES[span.kind] ?? UNKNOWN);
  }

  #arrows(lanes) {
    const { pen } = this;
    pen.strokeStyle = ink("soft");
    pen.globalAlpha = 0.55;
    pen.beginPath();
    pen.rect(this.left, AXIS, this.width, 1e5);
    pen.clip();
    for (const { from, to } of this.data.arrows.slice(0, 400)) {
      const [a, b] = [lanes.get(from.lane), lanes.get(to.lane)];
      const isDown = b.top > a.top;
      const [x, y, u, v] = [this.xOf(from.t), a.top + a.tall / 2, this.xOf(to.t), b.top + (isDown ? 2 : b.tall - 4)];
      const back = v + (isDown ? -4 : 4);
      pen.beginPath();
      pen.moveTo(x, y);
      pen.bezierCurveTo(x, (y + v) / 2, u, (y + v) / 2, u, v);
      pen.moveTo(u - 3, back);
      pen.lineTo(u, v);
      pen.lineTo(u + 3, back);
      pen.stroke();
    }
  }
}

export const sameSpan = (a, b) => a.kind === b.kind && a.start === b.start && a.episode === b.episode && a.label === b.label;

function fitted(pen, text, width) {
  let end = text.length;
  while (end > 1 && pen.measureText(text.slice(0, end)).width > width) end--;
  return end < text.length ? `${text.slice(0, end - 1)}…` : text;
}
