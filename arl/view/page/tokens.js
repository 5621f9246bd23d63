// Tokens in text, coloured by one of their numbers, and the numbers of the one that is looked at.

import { ink, scale } from "./colour.js";
import { h, marked, num, pairs, piece, show, visible } from "./dom.js";

const NAMES = {
  behavior_logprobs: "behavior logprob", proximal_logprobs: "proximal logprob", current_logprobs: "current logprob",
  advantages: "advantage", weights: "behavior weight", token_rewards: "token reward", values: "value", returns: "return",
};
const SIGNED = new Set(["advantages", "token_rewards", "values", "returns"]);
const FLAGS = { clipped: ["within", "clipped"] };
const DIFFERENCES = [["proximal", "behavior"], ["current", "proximal"], ["current", "behavior"]];

export const nameOf = (column) => NAMES[column] ?? column.replaceAll("_", " ");

// {key: {label, of(k) -> number|null, signed, integer, flag}} for what this trajectory has.
export function measures(trajectory, step) {
  const sampled = (values) => (k) => (trajectory.loss_mask[k] ? (values[k] ?? null) : null);
  const versionOf = sampled(trajectory.versions);
  const found = {
    sampled: { label: "sampled or given", flag: ["given", "sampled"], of: (k) => trajectory.loss_mask[k] },
    version: { label: "version", integer: true, of: versionOf },
  };
  const staleness = (k) => (versionOf(k) === null ? null : step - 1 - versionOf(k));
  if (step !== null && step !== undefined) found.staleness = { label: "staleness", integer: true, of: staleness };
  const columns = { ...trajectory.columns, behavior_logprobs: trajectory.behavior_logprobs };
  const names = new Set([...Object.keys(NAMES), ...Object.keys(columns)].filter((name) => name in columns));
  for (const name of names) {
    const values = columns[name];
    found[name] = { label: nameOf(name), signed: SIGNED.has(name), flag: FLAGS[name], of: sampled(values) };
  }
  for (const [later, earlier] of DIFFERENCES) {
    const [a, b] = [later, earlier].map((name) => found[`${name}_logprobs`]?.of);
    if (!a || !b) continue;
    const of = (k) => (a(k) === null || b(k) === null ? null : a(k) - b(k));
    found[`${later}-${earlier}`] = { label: `${later} − ${earlier} logprob`, signed: true, of };
  }
  for (const key of Object.keys(found)) if (!trajectory.loss_mask.some((_, k) => found[key].of(k) !== null)) delete found[key];
  return found;
}

const swatch = ([background, color], text) => h("span", { class: "swatch", style: { background, color } }, text);

// What a measure's values look like: [background, text] for each, and a legend of it.
export function colouring(measure, count) {
  const values = Array.from({ length: count }, (_, k) => measure.of(k));
  if (measure.flag) {
    const [low, high] = [[ink("sunk"), ink("ink")], scale([], { low: 0, high: 1 }).colour(0.4)];
    const legend = [swatch(low, measure.flag[0]), swatch(high, measure.flag[1])];
    return { of: (k) => (values[k] === null ? null : values[k] ? high : low), legend };
  }
  const known = [...new Set(values.filter((v) => v !== null))].sort((a, b) => a - b);
  const range = measure.integer ? { low: known[0], high: Math.max(known.at(-1), known[0] + 1) } : {};
  const { low, high, colour } = scale(values, { signed: measure.signed, ...range });
  if (measure.integer && known.length <= 12) {
    const legend = known.map((v) => swatch(colour(v), String(v)));
    return { of: (k) => (values[k] === null ? null : colour(values[k])), legend };
  }
  const canvas = h("canvas", { width: "160", height: "1", "aria-hidden": "true" });
  const context = canvas.getContext("2d");
  for (let x = 0; x < 160; x++) {
    context.fillStyle = colour(low + ((high - low) * x) / 159)[0];
    context.fillRect(x, 0, 1, 1);
  }
  return { of: (k) => (values[k] === null ? null : colour(values[k])), legend: [num(low), canvas, num(high)] };
}

// Everything known of token k.
export function numbersOf(trajectory, found, k) {
  const of = (key) => found[key]?.of(k) ?? null;
  const { sampled: _, version: __, staleness: ___, ...others } = found;
  return h("div", {},
    h("p", {}, swatch(["var(--sunk)", "inherit"], piece(trajectory.pieces[k]) || "⋯"), trajectory.loss_mask[k] ? " sampled" : " given"),
    pairs([["index", trajectory.start + k], ["id", trajectory.token_ids[k]]], String),
    pairs([["version", of("version")], ["staleness", of("staleness")], ...Object.entries(others).map(([key, measure]) => [measure.label, of(key)])]));
}

// A box of tokens that one walks through by arrows; `look(k)` hears which one is looked at.
export class TokenText {
  constructor(name, look) {
    this.look = look;
    this.node = h("div", {
      class: "tokens", role: "listbox", tabindex: "0", "aria-label": name, onkeydown: (event) => this.#key(event),
      onclick: (event) => this.#point(event), onmouseover: (event) => this.#point(event), onfocus: () => this.#go(this.at ?? 0),
    });
  }

  // tokens: indices in the window; colour: null, or k -> [background, text] or null.
  set(trajectory, tokens, colour) {
    this.tokens = tokens;
    const isColoured = colour !== null;
    show(this.node, tokens.map((k, place) => {
      const text = trajectory.pieces[k];
      const tones = isColoured ? colour(k) : null;
      const said = tones ? ((text.trim() ? marked(text) : piece(text)) || "⋯") + "\n".repeat(text.split("\n").length - 1) : visible(text);
      const kinds = ["t", tones ? "toned" : isColoured && "given", isColoured && trajectory.columns.clipped?.[k] && "clipped"];
      return h("span", {
        class: kinds.filter(Boolean).join(" "), role: "option", id: `t${trajectory.number}-${trajectory.start + k}`,
        "data-place": place, "aria-selected": "false", style: tones ? { background: tones[0], color: tones[1] } : null,
      }, said);
    }));
  }

  #point(event) {
    const place = event.target.dataset?.place;
    if (place !== undefined) this.#go(Number(place), false);
  }

  #key(event) {
    const by = { ArrowRight: 1, ArrowDown: 10, ArrowLeft: -1, ArrowUp: -10, Home: -Infinity, End: Infinity }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    this.#go(Math.min(Math.max((this.at ?? 0) + by, 0), this.tokens.length - 1), true);
  }

  #go(place, follow = false) {
    document.querySelectorAll('.t[aria-selected="true"]').forEach((node) => node.setAttribute("aria-selected", "false"));
    const node = this.node.children[place];
    if (!node) return;
    this.at = place;
    node.setAttribute("aria-selected", "true");
    this.node.setAttribute("aria-activedescendant", node.id);
    if (follow) node.scrollIntoView({ block: "nearest" });
    this.look(this.tokens[place]);
  }
}


