// The episodes of one example, side by side.

import { get } from "./server.js";
import { empty, facts, h, item, moment, num, pairs, seconds, show, soft, tag, visible } from "./dom.js";
import { ended } from "./episodes.js";

export async function groupView({ place, path, run, link, back, signal }) {
  const card = (row) => h("article", { class: "card", "aria-label": `Episode ${row.episode}` },
    h("div", { class: "reward" }, num(row.reward), ended(row),
      h("a", { class: "mono", href: link("episode", [run.run, row.life, row.episode]) }, row.episode)),
    pairs([...Object.entries(row.rewards), ["advantage", row.advantage], ["staleness", row.staleness],
      ["turns", row.turns], ["sampled tokens", row.trained], ["time", num(row.seconds, seconds)]]),
    h("div", { class: "text" }, visible(row.answer || row.message)));

  let group;
  async function read() {
    group = await get(`runs/${run.run}/groups/${path[1]}/${path[2]}`, {}, signal);
    const lasted = (from, to) => from !== null && to !== null && h("span", { title: moment(to) }, num(to - from, seconds));
    const example = h("a", { href: link("episodes", [], { example: group.row, ...(group.task && { task: group.task }) }) }, `row ${group.row}`);
    show(place,
      h("div", { class: "bar" }, h("h1", {}, `Group ${group.group}`), tag(group.outcome || "running"),
        group.reason && soft(visible(`${group.reason} ${group.detail}`)),
        soft("example ", example, group.step !== null && `, trained in step ${group.step}`)),
      facts([...(group.task ? [["Task", visible(group.task)]] : []), ["Admitted at version", num(group.stamp)], ["Epoch", num(group.epoch)],
        ["Ran", lasted(group.admitted, group.ended)], ["Waited for a batch", lasted(group.ended, group.taken)]]),
      exampleOf(group),
      h("h2", {}, `${group.episodes.length} episodes`),
      group.episodes.length ? h("div", { class: "columns", tabindex: "0" }, group.episodes.map(card)) : empty("No episode of it has begun."));
  }

  await read();
  const isOver = () => group.step !== null || ["rejected", "dropped"].includes(group.outcome);
  return { update: async () => isOver() || read(), keys: { Escape: back } };
}

export function exampleOf({ example, expected }) {
  const entries = Object.entries(example);
  const text = (value) => visible(typeof value === "string" ? value : JSON.stringify(value, null, 1));
  return entries.length > 0 && h("details", { class: "card", open: entries.length < 6 }, h("summary", {}, "Example"),
    h("dl", { class: "pairs left" }, entries.map(([name, value]) => item([visible(name), name === expected && tag("expected")], h("span", { class: "mono" }, text(value))))));
}
