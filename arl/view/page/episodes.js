// The table of episodes, and a group side by side.

import { get } from "./server.js";
import { scale } from "./colour.js";
import { debounced, empty, failed, h, moment, num, number, seconds, show, visible } from "./dom.js";

const PAGE = 100;
const HOWS = ["running", "finished", "rejected", "failed", "timed_out", "overtaken", "straggler", "stopped", "lost"];
const COLUMNS = [
  ["step", "Step", (row) => num(row.step), "n"],
  ["episode", "Episode", (row) => h("span", { class: "mono" }, row.episode)],
  ["row", "Example", (row) => num(row.row), "n"],
  ["reward", "Reward", (row, tone) => [typeof row.reward === "number" ? h("span", { class: "square", style: { background: tone(row.reward)[0] } }) : null, num(row.reward)], "n"],
  ["how", "Ended", (row) => ended(row)],
  ["staleness", "Staleness", (row) => num(row.staleness), "n"],
  ["turns", "Turns", (row) => num(row.turns), "n"],
  ["tokens", "Tokens", (row) => num(row.tokens), "n"],
  ["trained", "Sampled", (row) => num(row.trained), "n"],
  ["advantage", "Advantage", (row) => num(row.advantage), "n"],
  ["clipped", "Clipped", (row) => num(row.clipped, (v) => (v === null ? "–" : `${number(100 * v, 1)} %`)), "n"],
  ["seconds", "Time", (row) => num(row.seconds, seconds), "n"],
  [null, "Role", (row) => (row.roles ?? []).join(", ")],
  ["error", "Error", (row) => h("span", { title: visible(row.message ?? "") }, visible([row.error, row.message].filter(Boolean).join(": "))), "text"],
];

export function ended(row) {
  const tone = { finished: "good", failed: "bad", timed_out: "bad", lost: "warn", rejected: "warn" }[row.how] ?? "";
  const group = ["rejected", "dropped"].includes(row.outcome) && row.how === "finished" ? `, group ${row.outcome}` : "";
  return [h("span", { class: `tag ${group ? "warn" : tone}`, title: visible(row.reason || row.message || "") || null }, row.how.replace("_", " ") + group), row.is_undone ? h("span", { class: "tag warn" }, "undone") : null];
}

export async function episodesView({ place, query, runs, run, link, go, setQuery, signal }) {
  const wanted = { sort: "began", descending: "1", offset: "0", ...query };
  delete wanted.run;
  delete wanted.runs;
  let rows = [];
  let matched = 0;
  let focus = 0;
  let asked = 0;
  const body = h("tbody");
  const head = h("tr");
  const count = h("span", { class: "soft", role: "status", id: "matched" });
  const note = h("div");
  const back = h("button", { type: "button", onclick: () => turn(-1) }, "‹ Back");
  const next = h("button", { type: "button", onclick: () => turn(1) }, "Next ›");

  const changed = debounced(() => {
    wanted.offset = "0";
    read();
  }, 150);
  const field = (name, props) => h("input", { name, value: wanted[name] ?? "", autocomplete: "off", ...props, oninput: (event) => {
    wanted[name] = event.target.value;
    changed();
  } });
  const choice = (name, label, values) => h("select", { name, "aria-label": label, onchange: (event) => {
    wanted[name] = event.target.value;
    changed();
  } }, h("option", { value: "" }, label), values.map((value) => h("option", { value, selected: wanted[name] === value }, value.replace("_", " "))));
  const range = (name, label, step = "1") => h("label", {}, label,
    field(`${name}_from`, { type: "number", step, placeholder: "from", "aria-label": `${label} from` }), field(`${name}_to`, { type: "number", step, placeholder: "to", "aria-label": `${label} to` }));
  const search = field("text", { type: "search", placeholder: "Search what was said, examples and errors   ( / )", "aria-label": "Search texts" });
  const workflows = [...new Set((run.lives ?? []).map((life) => life.workflow))].filter(Boolean);
  const filters = h("form", { class: "filters", role: "search", onsubmit: (event) => event.preventDefault() }, search,
    choice("how", "Ended: any", HOWS), choice("outcome", "Group: any", ["kept", "rejected", "dropped"]), choice("kind", "Training and evaluation", ["training", "evaluation"]),
    workflows.length > 1 && choice("workflow", "Environment: any", workflows),
    h("button", { type: "button", onclick: () => go("episodes") }, "Clear"),
    h("details", { open: innerWidth > 760 }, h("summary", {}, "by numbers and names"), h("div", {},
      range("step", "Step"), range("reward", "Reward", "any"), range("staleness", "Staleness"), range("tokens", "Tokens"),
      h("label", {}, "Example", field("example", { type: "number", min: "0" })), h("label", {}, "Group", field("group", { type: "number", min: "0" })),
      h("label", {}, "Role", field("role", { size: "8" })), h("label", {}, "Error", field("error", { size: "12" })))));

  function turn(by) {
    wanted.offset = String(Math.max(0, Number(wanted.offset) + by * PAGE));
    focus = 0;
    return read();
  }

  async function read() {
    const mine = ++asked;
    const { sort: _, ...rest } = wanted;
    setQuery({ ...rest, sort: wanted.sort === "began" ? null : wanted.sort, descending: wanted.descending === "1" ? null : "0", offset: wanted.offset === "0" ? null : wanted.offset });
    try {
      const found = await get(`runs/${run.run}/episodes`, { ...wanted, limit: PAGE }, signal);
      if (mine !== asked || signal.aborted) return;
      ({ rows, matched } = found);
      draw(found);
      if (found.searched && found.searched.done < found.searched.total) setTimeout(() => mine === asked && !signal.aborted && read(), 50);
    } catch (error) {
      if (mine === asked && !signal.aborted) show(note, failed(error));
    }
  }

  function draw({ total, searched }) {
    const first = Number(wanted.offset);
    const searching = searched && searched.done < searched.total ? `, ${Math.floor((100 * searched.done) / searched.total)} % searched` : "";
    count.textContent = rows.length ? `${number(first + 1)} to ${number(first + rows.length)} of ${number(matched)}${matched < total ? ` (${number(total)} in all)` : ""}${searching}` : `0 of ${number(total)}${searching}`;
    [back.disabled, next.disabled] = [first === 0, first + rows.length >= matched];
    show(head, COLUMNS.map(([key, title, , kind]) => {
      const isIt = key && wanted.sort === key;
      return h("th", { scope: "col", class: kind, "aria-sort": isIt ? (wanted.descending === "1" ? "descending" : "ascending") : null },
        key ? h("button", { type: "button", onclick: () => sortBy(key) }, title, isIt ? (wanted.descending === "1" ? " ↓" : " ↑") : "") : title);
    }));
    const tone = scale([0, 1, ...rows.map((row) => row.reward)]).colour;
    const hadFocus = body.contains(document.activeElement);
    focus = Math.min(focus, Math.max(rows.length - 1, 0));
    show(body, rows.map((row, k) => h("tr", { class: "row", tabindex: k === focus ? "0" : "-1", "data-episode": `${row.life}/${row.episode}`, onclick: () => open(row), onfocus: () => (focus = k) },
      COLUMNS.map(([, , cell, kind]) => h("td", { class: kind }, cell(row, tone))))));
    if (hadFocus) body.children[focus]?.focus({ preventScroll: true });
    const nothing = total ? "No episode matches these filters." : run.has_events ? "No episode has begun yet." : "This run has no event log, so its episodes cannot be shown.";
    show(note, rows.length || searching ? null : empty(nothing));
  }

  function sortBy(key) {
    wanted.descending = wanted.sort === key && wanted.descending === "1" ? "0" : "1";
    wanted.sort = key;
    focus = 0;
    wanted.offset = "0";
    read();
  }

  const open = (row) => go("episode", [run.run, row.life, row.episode]);

  show(place, filters,
    h("div", { class: "bar" }, count, h("span", { class: "soft" }, h("kbd", {}, "j"), " ", h("kbd", {}, "k"), " move, ", h("kbd", {}, "Enter"), " opens, ", h("kbd", {}, "g"), " its group"), h("span", { class: "push" }), back, next),
    h("div", { class: "sheet" }, h("table", { id: "episodes" }, h("caption", { class: "skip" }, `Episodes of ${run.name}`), h("thead", {}, head), body)), note);
  await read();

  const live = debounced(() => !signal.aborted && read(), 700);
  return {
    update: (k, event) => k === run.run && (event.num_episodes !== undefined) && Number(wanted.offset) === 0 && live(),
    key(event) {
      const by = { j: 1, ArrowDown: 1, k: -1, ArrowUp: -1 }[event.key];
      const inTable = body.contains(document.activeElement);
      if (by && rows.length && (inTable || event.key.length === 1)) {
        focus = inTable ? Math.min(Math.max(focus + by, 0), rows.length - 1) : focus;
        body.children[focus].focus();
      } else if (event.key === "/") search.focus();
      else if (event.key === "Enter" && inTable) open(rows[focus]);
      else if (event.key === "g" && inTable && rows[focus].group !== null) go("group", [run.run, rows[focus].life, rows[focus].group]);
      else if (event.key === "n" && !next.disabled) turn(1);
      else if (event.key === "p" && !back.disabled) turn(-1);
      else return false;
      return true;
    },
  };
}

export const shownValue = (value) => visible(typeof value === "string" ? value : JSON.stringify(value, null, 1) ?? "");

export const pairs = (entries, format = number) => {
  const known = entries.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return known.length ? h("dl", { class: "pairs" }, known.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value instanceof Node || Array.isArray(value) ? value : num(value, format))])) : null;
};

export async function groupView({ place, path, run, link, back, signal }) {
  const [, life, number_] = path;
  async function draw() {
    const group = await get(`runs/${run.run}/groups/${life}/${number_}`, {}, signal);
    const cards = group.episodes.map((row) => h("article", { class: "card", "aria-label": `Episode ${row.episode}` },
      h("div", { class: "reward" }, num(row.reward), ended(row), h("a", { class: "push mono", href: link("episode", [run.run, row.life, row.episode]) }, row.episode)),
      pairs([...Object.entries(row.rewards ?? {}), ["advantage", row.advantage], ["staleness", row.staleness], ["turns", row.turns], ["sampled tokens", row.trained], ["time", num(row.seconds, seconds)]]),
      h("div", { class: "text" }, visible(row.answer || row.message || ""))));
    show(place,
      h("div", { class: "bar" }, h("h1", {}, `Group ${group.group}`), h("span", { class: "tag" }, group.outcome || "running"), group.reason && h("span", { class: "soft" }, visible(`${group.reason} ${group.detail ?? ""}`)),
        h("span", { class: "soft" }, "example ", h("a", { href: link("episodes", [], { example: group.row }) }, `row ${group.row}`), group.step === null ? "" : `, trained in step ${group.step}`)),
      h("dl", { class: "facts" }, [["Admitted at version", group.stamp], ["Epoch", group.epoch]].map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, num(value)))),
        [["Ran", group.ended, group.admitted], ["Waited for a batch", group.taken, group.ended]].map(([name, to, from]) => to && from && h("div", {}, h("dt", {}, name), h("dd", { title: moment(to) }, num(to - from, seconds))))),
      exampleOf(group.example), h("h2", {}, `${cards.length} episodes`), cards.length ? h("div", { class: "columns", tabindex: "0" }, cards) : empty("No episode of it has begun."));
  }
  await draw();
  return { key: (event) => event.key === "Escape" && (back(), true), update: debounced(() => !signal.aborted && run.is_live && draw().catch(() => {}), 1500) };
}

export const exampleOf = (example) => {
  const entries = Object.entries(example ?? {});
  return entries.length ? h("details", { class: "card", open: entries.length < 6 }, h("summary", {}, "Example"), h("dl", { class: "pairs left" }, entries.map(([name, value]) => [h("dt", {}, visible(name)), h("dd", { class: "mono" }, shownValue(value))]))) : null;
};
