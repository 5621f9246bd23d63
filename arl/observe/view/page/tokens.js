// Tokens in text, coloured by one of their numbers, and the numbers of the one that is looked at.

import { ink, scale } from "./colour.js";
import { h, num, pairs, show, soft, visible } from "./dom.js";

const NAMES = {
  behavior_logprobs: "behavior logprob", proximal_logprobs: "proximal logprob", current_logprobs: "current logprob",
  advantages: "advantage", weights: "behavior weight", token_rewards: "token reward", values: "value", returns: "return",
  implicit_rewards: "process reward",
};
const SIGNED = new Set(["advantages", "token_rewards", "values", "returns", "implicit_rewards"]);
const DIFFERENCES = [["proximal", "behavior"], ["current", "proximal"], ["current", "behavior"]];

// {key: {label, of(k) -> number|null, signed, integer, flag}} for what this trajectory has. Given tokens have no value.
export function measures(trajectory, step) {
  const sampled = (valueOf) => (k) => (trajectory.loss_mask[k] ? (valueOf(k) ?? null) : null);
  const columns = { ...trajectory.columns, behavior_logprobs: trajectory.behavior_logprobs };
  const found = {
    sampled: { label: "sampled or given", flag: ["", "sampled"], of: sampled(() => 1) },
    version: { label: "version", integer: true, of: sampled((k) => trajectory.versions[k]) },
    staleness: { label: "staleness", integer: true, of: sampled((k) => (step === null ? null : step - 1 - trajectory.versions[k])) },
  };
  for (const name of new Set([...Object.keys(NAMES), ...Object.keys(columns)])) {
    const label = NAMES[name] ?? name.replaceAll("_", " ");
    found[name] = { label, signed: SIGNED.has(name), flag: name === "clipped" && ["within", "clipped"], of: sampled((k) => columns[name]?.[k]) };
  }
  for (const names of DIFFERENCES) {
    const [a, b] = names.map((name) => found[`${name}_logprobs`].of);
    const of = (k) => (a(k) === null || b(k) === null ? null : a(k) - b(k));
    found[names.join("-")] = { label: `${names.join(" − ")} logprob`, signed: true, of };
  }
  const isKnown = ([, { of }]) => trajectory.loss_mask.some((_, k) => of(k) !== null);
  return Object.fromEntries(Object.entries(found).filter(([key, one]) => key === "sampled" || isKnown([key, one])));
}

const swatch = ([background, color], text) => h("span", { class: "swatch", style: { background, color } }, text);

// What a measure's values look like: of(k) -> [background, text] or null, and a legend of it.
export function colouring(measure, count) {
  const values = Array.from({ length: count }, (_, k) => measure.of(k));
  const known = [...new Set(values.filter((v) => v !== null))].sort((a, b) => a - b);
  if (measure.flag) {
    const tones = [[ink("sunk"), ink("ink")], [ink("tint"), ink("ink")]];
    return { of: (k) => (values[k] === null ? null : tones[Number(values[k] > 0)]), legend: tones.map((tone, k) => measure.flag[k] && swatch(tone, measure.flag[k])) };
  }
  const { low, high, colour } = scale(values, { signed: measure.signed, ...(measure.integer && { low: known[0], high: known.at(-1) }) });
  const of = (k) => (values[k] === null ? null : colour(values[k]));
  if (measure.integer && known.length <= 12) return { of, legend: known.map((v) => swatch(colour(v), String(v))) };
  const stops = Array.from({ length: 21 }, (_, k) => colour(low + ((high - low) * k) / 20)[0]);
  const ramp = h("span", { class: "ramp", style: { background: `linear-gradient(to right, ${stops.join(", ")})` } });
  return { of, legend: [num(low), ramp, num(high)] };
}

// Everything known of token k.
export function numbersOf(trajectory, found, k) {
  const { sampled, ...others } = found;
  return [
    h("p", {}, swatch(["var(--sunk)", "inherit"], marked(trajectory.pieces[k]).replaceAll(" ", "·") || "⋯"), trajectory.loss_mask[k] ? " sampled" : " given"),
    pairs([["index", trajectory.start + k], ["id", trajectory.token_ids[k]]], String),
    pairs(Object.values(others).map(({ label, of }) => [label, of(k)])),
  ];
}

const marked = (text) => visible(text).replaceAll("\n", "↵").replaceAll("\t", "⇥");

// Whether token k of the window is a placeholder behind the first one of an image, which stands for all of them.
export const isHidden = ({ images, start }, k) => images.some((image) => image.start < start + k && start + k < image.stop);

// A box of tokens that one walks through by arrows; `look(k)` hears which one is looked at.
export class TokenText {
  // picture: digest -> a promise of a URL.
  constructor(name, look, picture) {
    this.look = look;
    this.picture = picture;
    const point = ({ target }) => {
      const at = target.closest("[data-place]")?.dataset.place;
      if (at) this.#go(Number(at));
    };
    this.node = h("div", {
      class: "tokens", role: "listbox", tabindex: "0", "aria-label": name, onkeydown: (event) => this.#key(event),
      onclick: point, onmouseover: point, onfocus: () => this.#go(this.at ?? 0),
    });
  }

  // tokens: indices in the window; colour: k -> [background, text] or null.
  set(trajectory, tokens, colour) {
    this.tokens = tokens;
    const images = new Map(trajectory.images.map((image) => [image.start - trajectory.start, image]));
    show(this.node, tokens.map((k, place) => {
      if (images.has(k)) return this.#image(images.get(k), place, `t${trajectory.number}-${trajectory.start + k}`);
      const [text, tones] = [trajectory.pieces[k], colour(k)];
      const isClipped = trajectory.columns.clipped?.[k] > 0;
      return h("span", {
        class: `t ${tones ? "toned" : "given"}${isClipped ? " clipped" : ""}`, role: "option", id: `t${trajectory.number}-${trajectory.start + k}`,
        "data-place": place, "aria-selected": "false", style: tones ? { background: tones[0], color: tones[1] } : {},
      }, tones ? marked(text) + "\n".repeat(text.split("\n").length - 1) || "⋯" : visible(text));
    }));
  }

  #image({ digest, width, height, start, stop }, place, id) {
    const said = `image ${width}x${height}, ${num(stop - start).textContent} token${stop - start === 1 ? "" : "s"}`;
    const shown = h("img", { alt: said, width, height });
    this.picture(digest).then((url) => shown.setAttribute("src", url), (error) => shown.replaceWith(soft(String(error.message ?? error))));
    return h("span", { class: "t given image", role: "option", id, "data-place": place, "aria-selected": "false" }, shown, soft(said));
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
