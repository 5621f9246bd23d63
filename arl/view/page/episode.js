// One episode: its conversation token by token, its rewards, calls and branches.

import { get } from "./server.js";
import { button, empty, facts, failed, h, moment, num, number, option, pairs, seconds, show, soft, tag, visible } from "./dom.js";
import { ended } from "./episodes.js";
import { exampleOf } from "./group.js";
import { TokenText, colouring, measures, numbersOf } from "./tokens.js";

const WINDOW = 4000;
const FOLDED = 160; // tokens of a long given text that are shown at first

export async function episodeView({ place, path, query, run, link, go, back, setQuery, signal }) {
  const [, life, name] = path;
  const where = `runs/${run.run}/episodes/${life}/${encodeURIComponent(name)}`;
  const episode = await get(where, { start: 0, stop: WINDOW }, signal);
  let chosen = Math.max(0, episode.trajectories.findIndex((one) => String(one.number) === query.trajectory));
  let colour = query.colour ?? "";
  const opened = new Set();
  const numbers = h("div", { class: "card numbers" }, soft("Point at a token, or walk with the arrow keys: its numbers come here."));
  const turns = h("div");
  const legend = h("div", { class: "legend", role: "status" });
  const tree = h("nav", { "aria-label": "Trajectories" });
  const select = h("select", { id: "colour", onchange: () => {
    colour = select.value;
    remember();
    drawTurns();
  } });
  const remember = () => setQuery({ colour, trajectory: chosen ? episode.trajectories[chosen].number : null });

  function drawTurns() {
    const trajectory = episode.trajectories[chosen];
    if (!trajectory) {
      const isOver = episode.how !== "running";
      const why = isOver ? "The tokens of this episode are not kept." : "The episode still runs. Its tokens come when it has ended.";
      return show(turns, empty(visible(episode.problem || why)));
    }
    const found = measures(trajectory, episode.step);
    show(select, option("", "nothing"), Object.entries(found).map(([key, { label }]) => option(key, label, key === colour)));
    const shade = found[colour] ? colouring(found[colour], trajectory.pieces.length) : null;
    show(legend, shade?.legend, shade && colour !== "sampled" && soft("grey text: no value"),
      shade && trajectory.columns.clipped && h("span", { class: "t clipped" }, "clipped"));
    const look = (k) => show(numbers, numbersOf(trajectory, found, k));
    const calls = callsOfTurns(episode, trajectory);
    show(turns, parts(trajectory).map((part) => turnOf(part, trajectory, shade, look, calls)), loadMore(trajectory));
  }

  function turnOf(part, trajectory, shade, look, calls) {
    const [first, last] = [part.start - trajectory.start, Math.min(part.stop - trajectory.start, trajectory.pieces.length)];
    const all = Array.from({ length: last - first }, (_, k) => first + k);
    const id = `${trajectory.number}/${part.start}`;
    const isLong = !part.isSampled && all.length > FOLDED * 1.5 && !opened.has(id);
    const text = new TokenText(part.isSampled ? `sampled, turn ${part.turn}` : "given", look);
    const draw = (tokens) => text.set(trajectory, tokens, shade ? shade.of : null);
    draw(isLong ? all.slice(0, FOLDED) : all);
    const more = isLong && button(`Show ${number(all.length - FOLDED)} more tokens`, () => {
      opened.add(id);
      draw(all);
      more.remove();
      text.node.focus();
    });
    const call = part.isSampled ? calls[part.turn - 1] : null;
    const title = part.isSampled ? `Turn ${part.turn}` : part.start === 0 ? "Prompt" : "Given";
    return h("section", { class: `turn${part.isSampled ? " sampled" : ""}` },
      h("div", { class: "head" }, h("b", {}, title), h("span", {}, num(part.stop - part.start), " tokens"),
        part.reward ? h("span", {}, "reward ", num(part.reward)) : null, versionsOf(part, trajectory), call && turnCall(call)),
      text.node, more, call?.tools.length ? h("div", { class: "head" }, call.tools.map(toolCall)) : null);
  }

  function loadMore(trajectory) {
    const have = trajectory.start + trajectory.pieces.length;
    if (have >= trajectory.num_tokens) return null;
    const to = number(Math.min(have + WINDOW, trajectory.num_tokens));
    const more = button(`Load tokens ${number(have)} to ${to} of ${number(trajectory.num_tokens)}`, async () => {
      more.disabled = true;
      try {
        const next = await get(where, { start: have, stop: have + WINDOW, trajectory: trajectory.number }, signal);
        append(trajectory, next.trajectories.find((one) => one.number === trajectory.number));
        drawTurns();
      } catch (error) {
        if (!signal.aborted) more.replaceWith(failed(error));
      }
    }, { id: "more" });
    return more;
  }

  function drawTree() {
    const choose = (k) => (event) => {
      event.preventDefault();
      chosen = k;
      remember();
      drawTree();
      drawTurns();
    };
    const branch = ({ k, at, below }) => {
      const { number: name, role, reward } = episode.trajectories[k];
      const props = { href: link("episode", path, { trajectory: name }), "aria-current": k === chosen ? "true" : null, onclick: choose(k) };
      return h("li", {}, h("a", props, name === -1 ? "what it last saw" : `${role} ${name}`, " ", num(reward)),
        at !== null && soft(` from token ${number(at)}`), below.length > 0 && h("ul", { class: "tree" }, below.map(branch)));
    };
    show(tree, episode.trajectories.length > 1 && [h("h2", {}, "Trajectories"), h("ul", { class: "tree" }, treeOf(episode).map(branch))]);
  }

  const siblings = episode.siblings ?? [];
  const here = siblings.findIndex((one) => one.episode === episode.episode);
  const to = (one) => link("episode", [run.run, one.life, one.episode], { colour });
  const beside = (by) => here >= 0 && siblings[here + by] && (location.hash = to(siblings[here + by]));
  show(place,
    h("div", { class: "bar pinned" }, h("h1", {}, `Episode ${episode.episode}`), ended(episode),
      soft(episode.group !== null && h("a", { href: link("group", [run.run, life, episode.group]) }, `group ${episode.group}`),
        episode.evaluation !== null && `evaluation ${episode.evaluation}`, episode.step !== null && `, step ${episode.step}`),
      h("label", { class: "push", for: "colour" }, "Colour by ", select), legend),
    facts([
      ["Reward", num(episode.reward)], ["Staleness", num(episode.staleness)], ["Versions", versionRange(episode)], ["Turns", num(episode.turns)],
      ["Tokens", [num(episode.tokens), ", sampled ", num(episode.trained)]], ["Took", num(episode.seconds, seconds)],
      ["Advantage", num(episode.advantage)], ["Largest weight", num(episode.weight)], ["Attempts", num(episode.attempts)],
    ]),
    (episode.error || episode.message) && h("p", { class: "state error" }, visible([episode.error, episode.message].filter(Boolean).join(": "))),
    h("div", { class: "split" },
      h("div", {}, exampleOf(episode.example), tree, h("h2", {}, "Conversation"), turns),
      h("aside", { class: "side" }, numbers, rewardsOf(episode), callsTable(episode), attemptsOf(episode),
        siblings.length > 1 && [h("h2", {}, "Its group"), links(siblings, to, episode)],
        episode.same_example?.length > 0 && [h("h2", {}, "Same example, other steps"), links(episode.same_example, to, episode, true)])));
  drawTree();
  drawTurns();
  return {
    key(event) {
      if (event.key === "Escape") back();
      else if (event.key === "]" || event.key === "j") beside(1);
      else if (event.key === "[" || event.key === "k") beside(-1);
      else if (event.key === "c") select.focus();
      else if (event.key === "g" && episode.group !== null) go("group", [run.run, life, episode.group]);
      else return false;
      return true;
    },
  };
}

// The given and the sampled texts of what is loaded, in order.
function parts(trajectory) {
  const end = trajectory.start + trajectory.pieces.length;
  const found = [];
  let at = 0;
  const turns = trajectory.turns.length ? trajectory.turns : sampledRanges(trajectory);
  turns.forEach(([start, stop, reward], k) => {
    if (start > at) found.push({ start: at, stop: start, isSampled: false });
    found.push({ start, stop, reward, isSampled: true, turn: k + 1 });
    at = stop;
  });
  if (at < trajectory.num_tokens) found.push({ start: at, stop: trajectory.num_tokens, isSampled: false });
  return found.filter((part) => part.start < end);
}

// Where a workflow did not say its turns: what was sampled without a break.
function sampledRanges({ loss_mask: mask, start }) {
  const edges = [...mask, 0].flatMap((isSampled, k) => (isSampled !== (mask[k - 1] ?? 0) ? [k + start] : []));
  return Array.from({ length: Math.floor(edges.length / 2) }, (_, k) => [edges[2 * k], edges[2 * k + 1], 0]);
}

function append(trajectory, next) {
  for (const name of ["pieces", "token_ids", "loss_mask", "versions", "behavior_logprobs"]) trajectory[name] = trajectory[name].concat(next[name]);
  for (const name of Object.keys(trajectory.columns)) trajectory.columns[name] = trajectory.columns[name].concat(next.columns[name]);
}

function versionsOf(part, trajectory) {
  if (!part.isSampled) return null;
  const found = trajectory.versions.slice(part.start - trajectory.start, part.stop - trajectory.start).filter((v) => v >= 0);
  const [low, high] = [Math.min(...found), Math.max(...found)];
  return found.length ? h("span", {}, low === high ? `version ${low}` : `versions ${low} to ${high}`) : null;
}

const versionRange = ({ oldest, newest }) => (oldest === null ? null : oldest === newest ? num(oldest) : [num(oldest), " to ", num(newest)]);

// Calls say their episode, not their turn: by order, where one trajectory has all turns.
function callsOfTurns(episode, trajectory) {
  const calls = [...(episode.calls ?? [])].sort((a, b) => a.t - b.t);
  const found = [];
  for (const call of calls) {
    if (call.event === "TurnEnded" && !(call.stop in { abort: 1 })) found.push({ ...call, tools: [] });
    else if (call.event === "ToolEnded" && found.length) found.at(-1).tools.push(call);
  }
  return episode.trajectories.length === 1 && found.length === trajectory.turns.length ? found : [];
}

function turnCall(call) {
  const told = [call.stop, call.sends > 1 && `sent ${call.sends} times`].filter(Boolean).join(", ");
  return h("span", { title: `${visible(call.server ?? "")}, queued ${seconds(call.queued_s ?? 0)}` }, num(call.seconds, seconds), told && `, ${told}`);
}

const toolCall = (call) =>
  h("span", {}, tag(visible(call.tool || "tool"), call.failure ? "bad" : ""), " ", num(call.seconds, seconds), call.failure ? ` ${call.failure}` : "");

function rewardsOf(episode) {
  const made = (episode.parts ?? []).map((part, k) => [
    episode.parts.length > 1 && h("h3", {}, `${part.role ?? "agent"} ${k}`),
    pairs([["reward", part.reward], ...Object.entries(part.rewards ?? {}), ...Object.entries(part.metrics ?? {})]),
    part.is_truncated && h("span", { class: "tag warn" }, "cut at its length limit"),
  ]);
  return made.length ? [h("h2", {}, "Reward and metrics"), made] : null;
}

function callsTable(episode) {
  if (!episode.calls?.length) return null;
  const title = (call) => ({ TurnEnded: "turn", ToolEnded: `tool ${call.tool}`, RewardEnded: `reward ${call.reward}` })[call.event];
  const wrong = (call) => call.failure || call.error || (["stop", "length", "abort"].includes(call.stop) ? "" : call.stop);
  const row = (call) => h("tr", {}, h("td", {}, visible(title(call)), wrong(call) && tag(visible(wrong(call)), "bad")),
    h("td", { class: "n", title: moment(call.began) }, seconds(call.began - episode.began)), h("td", { class: "n" }, num(call.seconds, seconds)));
  return [h("h2", {}, `${episode.calls.length} calls`),
    h("div", { class: "sheet" }, h("table", {}, h("tbody", {}, episode.calls.slice(0, 200).map(row))))];
}

function attemptsOf({ failed_attempts: attempts }) {
  const told = (one) => h("p", { class: "finding", style: { "--tone": "var(--bad)" } }, `${one.attempt}: ${visible(`${one.error}: ${one.message}`)}`);
  return attempts?.length > 0 && [h("h2", {}, "Failed attempts"), attempts.map(told)];
}

function links(list, to, episode, withStep = false) {
  const when = (one) => (typeof one.evaluation === "number" ? `evaluation ${one.evaluation}` : one.step === null ? one.how : `step ${one.step}`);
  const isThis = (one) => one.episode === episode.episode && one.life === episode.life;
  return h("ul", { class: "tree" }, list.map((one) =>
    h("li", {}, h("a", { href: to(one), "aria-current": isThis(one) ? "page" : null }, withStep ? when(one) : one.episode, " ", num(one.reward)))));
}

// Trajectories under the one that they branched from: the latest before them with at least as long a common beginning.
function treeOf(episode) {
  const nodes = episode.trajectories.map((one, k) => ({ k, number: one.number, at: null, below: [] }));
  const roots = new Set(nodes);
  const way = [];
  for (const { first, second, differs_at: at } of episode.branches ?? []) {
    const [before, node] = [first, second].map((wanted) => nodes.find((one) => one.number === wanted));
    if (!before || !node) continue;
    if (way.at(-1) !== before) way.splice(0, way.length, before);
    while (way.length > 1 && way.at(-1).at >= at) way.pop();
    node.at = at;
    way.at(-1).below.push(node);
    roots.delete(node);
    way.push(node);
  }
  return [...roots];
}
