// The table of episodes.

import { get } from "./server.js";
import { rewardScale } from "./colour.js";
import { button, empty, failed, h, key, num, number, option, percent, seconds, show, soft, soon, tag, visible } from "./dom.js";

const PAGE = 100;
const HOWS = ["running", "finished", "rejected", "failed", "timed_out", "overtaken", "straggler", "stopped", "lost"];
const DEFAULTS = { sort: "began", descending: "1", offset: "0" };
const COLUMNS = [
  ["step", "Step", (row) => num(row.step), "n"],
  ["task", "Task", (row) => visible(row.task), "tasks"],
  ["episode", "Episode", (row) => h("span", { class: "mono" }, row.episode)],
  ["row", "Example", (row) => num(row.row), "n"],
  ["reward", "Reward", (row, tone) => [row.reward !== null && h("span", { class: "square", style: { background: tone(row.reward)[0] } }), num(row.reward)], "n"],
  ["how", "Ended", (row) => ended(row)],
  ["staleness", "Staleness", (row) => num(row.staleness), "n"],
  ["turns", "Turns", (row) => num(row.turns), "n"],
  ["tokens", "Tokens", (row) => num(row.tokens), "n"],
  ["trained", "Sampled", (row) => num(row.trained), "n"],
  ["advantage", "Advantage", (row) => num(row.advantage), "n"],
  ["clipped", "Clipped", (row) => num(row.clipped, percent), "n"],
  ["seconds", "Time", (row) => num(row.seconds, seconds), "n"],
  [null, "Role", (row) => row.roles.join(", ")],
  ["error", "Error", (row) => h("span", { title: visible(row.message) }, visible([row.error, row.message].filter(Boolean).join(": "))), "text"],
];

const UNDONE = "The run went back to a checkpoint that does not know this episode.";

export function ended(row) {
  const tone = { finished: "good", failed: "bad", timed_out: "bad", lost: "warn", rejected: "warn" }[row.how] ?? "";
  const group = ["rejected", "dropped"].includes(row.outcome) && row.how === "finished" ? `, group ${row.outcome}` : "";
  const why = visible(row.reason || row.message);
  return [tag(row.how.replace("_", " ") + group, group ? "warn" : tone, why), row.is_undone && tag("undone", "warn", UNDONE)];
}

export async function episodesView({ place, query, run, go, setQuery, signal }) {
  const wanted = { ...DEFAULTS, ...query };
  const tasks = [...new Set(run.lives.flatMap((life) => life.tasks))];
  const columns = COLUMNS.filter(([, , , kind]) => kind !== "tasks" || tasks.length);
  let [rows, matched, focus, asked] = [[], 0, 0, 0];
  const [head, body, note] = [h("tr"), h("tbody"), h("div")];
  const count = h("span", { class: "soft", role: "status", id: "matched" });
  const back = button("‹ Back", () => turn(-1));
  const next = button("Next ›", () => turn(1));

  const changed = soon(() => !signal.aborted && change({ offset: "0" }), 150);
  const oninput = ({ target }) => {
    wanted[target.name] = target.value;
    changed();
  };
  const field = (name, props) => h("input", { name, value: wanted[name] ?? "", autocomplete: "off", oninput, ...props });
  const choice = (name, label, values) => values.length > 1 && h("select", { name, "aria-label": label, oninput },
    option("", label), values.map((value) => option(value, value.replace("_", " "), wanted[name] === value)));
  const range = (name, label, step = "1") => h("label", {}, label, ["from", "to"].map((end) =>
    field(`${name}_${end}`, { type: "number", step, placeholder: end, "aria-label": `${label} ${end}` })));
  const exact = (name, label, props) => h("label", {}, label, field(name, props));
  const search = field("text", { type: "search", placeholder: "Search what was said, examples and errors   ( / )", "aria-label": "Search texts" });
  const filters = h("form", { class: "filters", role: "search", onsubmit: (event) => event.preventDefault() }, search,
    choice("how", "Ended: any", HOWS), choice("outcome", "Group: any", ["kept", "rejected", "dropped"]),
    choice("kind", "Training and evaluation", ["training", "evaluation"]),
    choice("workflow", "Workflow: any", [...new Set(run.lives.map((life) => life.workflow))]),
    choice("task", "Task: any", tasks),
    button("Clear", () => go("episodes")),
    h("details", { open: innerWidth > 760 }, h("summary", {}, "by numbers and names"), h("div", {},
      range("step", "Step"), range("reward", "Reward", "any"), range("staleness", "Staleness"), range("tokens", "Tokens"),
      exact("example", "Example", { type: "number", min: "0" }), exact("group", "Group", { type: "number", min: "0" }),
      exact("role", "Role", { size: "8" }), exact("error", "Error", { size: "12" }))));

  function change(values) {
    Object.assign(wanted, values);
    focus = 0;
    setQuery(Object.fromEntries(Object.entries(wanted).filter(([name, value]) => DEFAULTS[name] !== value)));
    return read();
  }
  const turn = (by) => change({ offset: String(Math.max(0, Number(wanted.offset) + by * PAGE)) });
  const sortBy = (sort) => change({ sort, descending: wanted.sort === sort && wanted.descending === "1" ? "0" : "1", offset: "0" });

  async function read() {
    const mine = ++asked;
    try {
      const found = await get(`runs/${run.run}/episodes`, { ...wanted, limit: PAGE }, signal);
      if (mine !== asked) return;
      ({ rows, matched } = found);
      draw(found);
      if (found.searched?.done < found.searched?.total) setTimeout(() => mine === asked && !signal.aborted && read(), 50);
    } catch (error) {
      if (mine === asked && !signal.aborted) show(note, failed(error));
    }
  }

  function draw({ total, searched }) {
    const first = Number(wanted.offset);
    const isSearching = searched?.done < searched?.total;
    const these = rows.length ? `${number(first + 1)} to ${number(first + rows.length)}` : "0";
    count.textContent = `${these} of ${number(matched)}${matched < total ? ` (${number(total)} in all)` : ""}`
      + (isSearching ? `, ${Math.floor((100 * searched.done) / searched.total)} % searched` : "");
    [back.disabled, next.disabled] = [first === 0, first + rows.length >= matched];
    show(head, columns.map(([name, title, , kind]) => {
      const order = name !== wanted.sort ? null : wanted.descending === "1" ? "descending" : "ascending";
      const arrow = { descending: " ↓", ascending: " ↑" }[order] ?? "";
      return h("th", { scope: "col", class: kind, "aria-sort": order }, name ? button(title + arrow, () => sortBy(name)) : title);
    }));
    const tone = rewardScale(rows.map((row) => row.reward));
    const hadFocus = inTable();
    focus = Math.min(focus, Math.max(rows.length - 1, 0));
    show(body, rows.map((row, k) => h("tr", {
      class: "row", tabindex: k === focus ? "0" : "-1", "data-episode": `${row.life}/${row.episode}`, onclick: () => open(row), onfocus: () => (focus = k),
    }, columns.map(([, , cell, kind]) => h("td", { class: kind }, cell(row, tone))))));
    if (hadFocus) body.children[focus]?.focus({ preventScroll: true });
    const nothing = total ? "No episode matches these filters."
      : run.has_events ? "No episode has begun yet." : "This run has no event log, so its episodes cannot be shown.";
    show(note, !rows.length && !isSearching && empty(nothing));
  }

  const open = (row) => go("episode", [run.run, row.life, row.episode]);
  const inTable = () => body.contains(document.activeElement);
  const step = (by) => () => {
    if (inTable()) focus = Math.min(Math.max(focus + by, 0), rows.length - 1);
    body.children[focus]?.focus();
  };
  const inside = (action) => () => inTable() && action(rows[focus]);

  const keys = soft(key("j"), key("k"), "move, ", key("Enter"), "opens, ", key("g"), "its group");
  show(place, filters, h("div", { class: "bar" }, count, keys, h("span", { class: "push" }), back, next),
    h("div", { class: "sheet" }, h("table", { id: "episodes" }, h("caption", { class: "skip" }, `Episodes of ${run.name}`), h("thead", {}, head), body)), note);
  await read();
  return {
    update: async () => wanted.offset === "0" && read(),
    keys: {
      "/": () => search.focus(), n: () => next.click(), p: () => back.click(),
      j: step(1), k: step(-1), ArrowDown: inside(step(1)), ArrowUp: inside(step(-1)), Enter: inside(open),
      g: inside((row) => row.group !== null && go("group", [run.run, row.life, row.group])),
    },
  };
}
