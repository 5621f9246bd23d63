// One episode: its conversation token by token, its rewards, calls and branches.

import { get, picture } from "./server.js";
import { button, empty, facts, failed, h, moment, num, number, option, pairs, seconds, show, soft, table, tag, visible } from "./dom.js";
import { ended } from "./episodes.js";
import { exampleOf } from "./group.js";
import { TokenText, colouring, isHidden, measures, numbersOf } from "./tokens.js";

const WINDOW = 4000;
const FOLDED = 160; // tokens of a long given text that are shown at first

export async function episodeView({ place, path, query, run, link, go, back, setQuery, signal }) {
  const [, life, name] = path;
  const where = `runs/${run.run}/episodes/${life}/${encodeURIComponent(name)}`;
  const opened = new Set(); // long texts that are shown in full
  const pictures = new Map();
  let colour = query.colour ?? localStorage.getItem("arl-colour") ?? "sampled";
  let episode, trajectory;
  const numbers = h("div", { class: "card numbers" }, soft("Point at a token, or walk with the arrow keys: its numbers come here."));
  const turns = h("div");
  const legend = h("div", { class: "legend", role: "status" });
  const select = h("select", { id: "colour", onchange: () => {
    colour = select.value;
    localStorage.setItem("arl-colour", colour);
    setQuery({ ...query, colour });
    drawTurns();
  } });

  // Each is asked for once, however often it is drawn.
  function pictureOf(digest) {
    if (!pictures.has(digest)) pictures.set(digest, picture(`runs/${run.run}/images/${digest}`, signal));
    return pictures.get(digest);
  }

  async function read() {
    episode = await get(where, { stop: WINDOW }, signal);
    trajectory = episode.trajectories.find((one) => String(one.number) === query.trajectory) ?? episode.trajectories[0];
    draw();
    drawTurns();
  }

  function draw() {
    const { step, evaluation, group, error, message, same_example: same, failed_attempts: attempts } = episode;
    show(place,
      h("div", { class: "bar pinned" }, h("h1", {}, `Episode ${episode.episode}`), ended(episode),
        soft(group !== null && h("a", { href: link("group", [run.run, life, group]) }, `group ${group}`),
          evaluation !== null && `evaluation ${evaluation}`, step !== null && `, step ${step}`,
          episode.task && [", task ", visible(episode.task)]),
        trajectory && [h("label", { class: "push", for: "colour" }, "Colour by ", select), legend]),
      facts([
        ["Reward", num(episode.reward)], ["Staleness", num(episode.staleness)], ["Versions", versions([episode.oldest, episode.newest])],
        ["Turns", num(episode.turns)], ["Tokens", [num(episode.tokens), ", sampled ", num(episode.trained)]], ["Took", num(episode.seconds, seconds)],
        ["Advantage", num(episode.advantage)], ["Largest weight", num(episode.weight)], ["Attempts", num(episode.attempts)],
      ]),
      (error || message) && h("p", { class: "state error" }, visible([error, message].filter(Boolean).join(": "))),
      h("div", { class: "split" },
        h("div", {}, exampleOf(episode), h("nav", { "aria-label": "Trajectories" }, tree()), h("h2", {}, "Conversation"), turns),
        h("aside", { class: "side" }, trajectory && numbers, rewardsOf(episode), callsOf(episode),
          attempts.length > 0 && [h("h2", {}, "Failed attempts"), table("Failed attempts", [], attempts.map((one) => [num(one.attempt), visible(`${one.error}: ${one.message}`)]))],
          episode.siblings.length > 1 && [h("h2", {}, "Its group"), links(episode.siblings, (one) => one.episode)],
          same.length > 0 && [h("h2", {}, "Same example, other steps"), links(same, when)])));
  }

  function drawTurns() {
    if (!trajectory) {
      const why = episode.how === "running" ? "The episode still runs. Its tokens come when it has ended." : "The tokens of this episode are not kept.";
      return show(turns, empty(visible(episode.problem || why)));
    }
    const found = measures(trajectory, episode.step);
    const chosen = found[colour] ? colour : "sampled";
    show(select, Object.entries(found).map(([key, { label }]) => option(key, label, key === chosen)));
    const shade = colouring(found[chosen], trajectory.pieces.length);
    show(legend, shade.legend, soft("grey text: given"), trajectory.columns.clipped && h("span", { class: "clipped" }, "clipped"));
    const look = (k) => show(numbers, numbersOf(trajectory, found, k));
    show(turns, partsOf(trajectory).map((part) => turnOf(part, shade.of, look)), loadMore());
  }

  function turnOf({ start, stop, turn, reward }, tones, look) {
    const [first, last] = [start - trajectory.start, Math.min(stop - trajectory.start, trajectory.pieces.length)];
    const all = Array.from({ length: last - first }, (_, k) => first + k).filter((k) => !isHidden(trajectory, k));
    const isFolded = !turn && all.length > FOLDED * 1.5 && !opened.has(start);
    const text = new TokenText(turn ? `sampled, turn ${turn}` : "given", look, pictureOf);
    text.set(trajectory, isFolded ? all.slice(0, FOLDED) : all, tones);
    const more = () => {
      opened.add(start);
      drawTurns();
    };
    return h("section", { class: turn ? "turn sampled" : "turn" },
      h("div", { class: "head" }, h("b", {}, turn ? `Turn ${turn}` : start === 0 ? "Prompt" : "Given"), h("span", {}, num(stop - start), " tokens"),
        reward ? h("span", {}, "reward ", num(reward)) : null, turn && h("span", {}, "version ", versions(trajectory.versions.slice(first, last)))),
      text.node, isFolded && button(`Show ${number(all.length - FOLDED)} more tokens`, more));
  }

  function loadMore() {
    const have = trajectory.start + trajectory.pieces.length;
    if (have >= trajectory.num_tokens) return null;
    const to = Math.min(have + WINDOW, trajectory.num_tokens);
    const more = button(`Load tokens ${number(have)} to ${number(to)} of ${number(trajectory.num_tokens)}`, async () => {
      more.disabled = true;
      try {
        const { trajectories } = await get(where, { start: have, stop: to, trajectory: trajectory.number }, signal);
        append(trajectory, trajectories.find((one) => one.number === trajectory.number));
        drawTurns();
      } catch (error) {
        if (!signal.aborted) more.replaceWith(failed(error));
      }
    }, { id: "more" });
    return more;
  }

  function tree() {
    const { trajectories, branches } = episode;
    const branch = ({ number: name, role, reward }) => {
      const at = branches.find(({ second }) => second === name)?.differs_at;
      const props = { href: link("episode", path, { trajectory: name }), "aria-current": name === trajectory.number && "true" };
      const below = trajectories.filter((one) => branches.some(({ first, second }) => first === name && second === one.number));
      return h("li", {}, h("a", props, name === -1 ? "what it last saw" : `${role} ${name}`, " ", num(reward)),
        at !== undefined && soft(` from token ${number(at)}`), below.length > 0 && h("ul", { class: "tree" }, below.map(branch)));
    };
    const roots = trajectories.filter((one) => !branches.some(({ second }) => second === one.number));
    return trajectories.length > 1 && [h("h2", {}, "Trajectories"), h("ul", { class: "tree" }, roots.map(branch))];
  }

  const to = (one) => link("episode", [run.run, one.life, one.episode]);
  const isThis = (one) => one.episode === episode.episode && one.life === episode.life;
  const links = (list, told) => h("ul", { class: "tree" }, list.map((one) =>
    h("li", {}, h("a", { href: to(one), "aria-current": isThis(one) && "page" }, told(one), " ", num(one.reward)))));
  const beside = (by) => {
    const other = episode.siblings[episode.siblings.findIndex(isThis) + by];
    return other ? (location.hash = to(other)) : false;
  };

  await read();
  return {
    // The log writes an episode's tokens a moment after its step.
    update: async () => !trajectory && (episode.step === null || run.is_live) && !["rejected", "dropped"].includes(episode.outcome) && read(),
    keys: {
      Escape: back, "]": () => beside(1), j: () => beside(1), "[": () => beside(-1), k: () => beside(-1), c: () => select.focus(),
      g: () => (episode.group === null ? false : go("group", [run.run, life, episode.group])),
    },
  };
}

const when = (one) => (one.evaluation !== null ? `evaluation ${one.evaluation}` : one.step === null ? one.how : `step ${one.step}`);

function versions(numbers) {
  const found = numbers.filter((version) => version !== null && version >= 0);
  const [low, high] = [Math.min(...found), Math.max(...found)];
  return found.length ? [num(low), low < high && [" to ", num(high)]] : "–";
}

// The given and the sampled texts of what is loaded, in order; `turn` counts the sampled ones from 1.
function partsOf(trajectory) {
  const found = [];
  let at = 0;
  const turns = trajectory.turns.length ? trajectory.turns : sampledRanges(trajectory);
  for (const [start, stop, reward] of [...turns, [trajectory.num_tokens]]) {
    if (start > at) found.push({ start: at, stop: start });
    if (stop !== undefined) found.push({ start, stop, reward, turn: found.filter((part) => part.turn).length + 1 });
    at = stop;
  }
  return found.filter((part) => part.start < trajectory.start + trajectory.pieces.length);
}

// Where a workflow did not say its turns: what was sampled without a break.
function sampledRanges({ loss_mask: mask, start }) {
  const edges = [...mask, 0].flatMap((isSampled, k) => (isSampled !== (mask[k - 1] ?? 0) ? [k + start] : []));
  return Array.from({ length: Math.floor(edges.length / 2) }, (_, k) => [edges[2 * k], edges[2 * k + 1], 0]);
}

function append(trajectory, next) {
  for (const name of ["pieces", "token_ids", "loss_mask", "versions", "behavior_logprobs"]) trajectory[name].push(...next[name]);
  trajectory.images.push(...next.images.filter(({ start }) => start > (trajectory.images.at(-1)?.start ?? -1)));
  for (const name of Object.keys(trajectory.columns)) trajectory.columns[name].push(...next.columns[name]);
}

const rewardsOf = ({ parts }) => parts.length > 0 && [h("h2", {}, "Reward and metrics"), parts.map((part, k) => [
  parts.length > 1 && h("h3", {}, `${part.role} ${k}`),
  pairs([["reward", part.reward], ...Object.entries(part.rewards), ...Object.entries(part.metrics)]),
  part.is_truncated && tag("cut at its length limit", "warn"),
])];

// Turns, tools and rewards, each with when it began and how long it took.
function callsOf({ calls, began }) {
  const told = {
    TurnEnded: ({ stop, sends, server, queued_s: queued }) => ["turn", "", `${stop}, sent ${sends} times to ${server}, queued ${seconds(queued)}`,
      !["stop", "length", "abort"].includes(stop) && stop],
    ToolEnded: ({ tool, failure }) => ["tool ", tool, "", failure],
    RewardEnded: ({ reward, value, parts, error }) => ["reward ", reward, value === null ? "" : [["value", value], ...Object.entries(parts)]
      .map(([name, part]) => `${name} ${number(part)}`).join(", "), error],
  };
  const row = (call) => {
    const [kind, name, title, wrong] = told[call.event](call);
    return [[h("span", { title: visible(title) }, kind, visible(name)), wrong && tag(visible(wrong), "bad")],
      h("span", { class: "num", title: moment(call.began) }, seconds(call.began - began)), num(call.seconds, seconds)];
  };
  return calls.length > 0 && [h("h2", {}, `${calls.length} calls`), table("Calls", ["", "After", "Took"], calls.slice(0, 200).map(row))];
}
