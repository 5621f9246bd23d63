// The table of episodes, and a group side by side.

import { get } from "./server.js";
import { scale } from "./colour.js";
import { button, debounced, empty, failed, h, num, number, option, seconds, show, soft, soon, tag, visible } from "./dom.js";

const PAGE = 100;
const HOWS = ["running", "finished", "rejected", "failed", "timed_out", "overtaken", "straggler", "stopped", "lost"];
const DEFAULTS = { sort: "began", descending: "1", offset: "0" };
const COLUMNS = [
  ["step", "Step", (row) => num(row.step), "n"],
  ["episode", "Episode", (row) => h("span", { class: "mono" }, row.episode)],
  ["row", "Example", (row) => num(row.row), "n"],
  ["reward", "Reward", (row, tone) => [square(row.reward, tone), num(row.reward)], "n"],
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

const square = (value, tone) => typeof value === "number" && h("span", { class: "square", style: { background: tone(value)[0] } });

export function ended(row) {
  const tone = { finished: "good", failed: "bad", timed_out: "bad", lost: "warn", rejected: "warn" }[row.how] ?? "";
  const group = ["rejected", "dropped"].includes(row.outcome) && row.how === "finished" ? `, group ${row.outcome}` : "";
  const why = visible(row.reason || row.message || "") || null;
  return [tag(row.how.replace("_", " ") + group, group ? "warn" : tone, why), row.is_undone && tag("undone", "warn")];
}

export async function episodesView({ place, query, runs, run, link, go, setQuery, signal }) {
  const wanted = { ...DEFAULTS, ...query };
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
  const back = button("‹ Back", () => turn(-1));
  const next = button("Next ›", () => turn(1));

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
  } }, option("", label), values.map((value) => option(value, value.replace("_", " "), wanted[name] === value)));
  const range = (name, label, step = "1") => h("label", {}, label, ["from", "to"].map((end) =>
    field(`${name}_${end}`, { type: "number", step, placeholder: end, "aria-label": `${label} ${end}` })));
  const exact = (name, label, props) => h("label", {}, label, field(name, props));
  const search = field("text", { type: "search", placeholder: "Search what was said, examples and errors   ( / )", "aria-label": "Search texts" });
  const workflows = [...new Set((run.lives ?? []).map((life) => life.workflow))].filter(Boolean);
  const filters = h("form", { class: "filters", role: "search", onsubmit: (event) => event.preventDefault() }, search,
    choice("how", "Ended: any", HOWS), choice("outcome", "Group: any", ["kept", "rejected", "dropped"]),
    choice("kind", "Training and evaluation", ["training", "evaluation"]),
    workflows.length > 1 && choice("workflow", "Environment: any", workflows),
    button("Clear", () => go("episodes")),
    h("details", { open: innerWidth > 760 }, h("summary", {}, "by numbers and names"), h("div", {},
      range("step", "Step"), range("reward", "Reward", "any"), range("staleness", "Staleness"), range("tokens", "Tokens"),
      exact("example", "Example", { type: "number", min: "0" }), exact("group", "Group", { type: "number", min: "0" }),
      exact("role", "Role", { size: "8" }), exact("error", "Error", { size: "12" }))));

  function turn(by) {
    wanted.offset = String(Math.max(0, Number(wanted.offset) + by * PAGE));
    focus = 0;
    return read();
  }

  async function read() {
    const mine = ++asked;
    setQuery(Object.fromEntries(Object.entries(wanted).filter(([name, value]) => DEFAULTS[name] !== value)));
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
    const these = rows.length ? `${number(first + 1)} to ${number(first + rows.length)}` : "0";
    count.textContent = `${these} of ${number(matched)}${matched < total ? ` (${number(total)} in all)` : ""}${searching}`;
    [back.disabled, next.disabled] = [first === 0, first + rows.length >= matched];
    show(head, COLUMNS.map(([key, title, , kind]) => {
      const order = !key || wanted.sort !== key ? null : wanted.descending === "1" ? "descending" : "ascending";
      const arrow = { descending: " ↓", ascending: " ↑" }[order] ?? "";
      return h("th", { scope: "col", class: kind, "aria-sort": order }, key ? button(title + arrow, () => sortBy(key)) : title);
    }));
    const tone = scale([0, 1, ...rows.map((row) => row.reward)]).colour;
    const hadFocus = body.contains(document.activeElement);
    focus = Math.min(focus, Math.max(rows.length - 1, 0));
    const cells = (row) => COLUMNS.map(([, , cell, kind]) => h("td", { class: kind }, cell(row, tone)));
    show(body, rows.map((row, k) => h("tr", {
      class: "row", tabindex: k === focus ? "0" : "-1", "data-episode": `${row.life}/${row.episode}`,
      onclick: () => open(row), onfocus: () => (focus = k),
    }, cells(row))));
    if (hadFocus) body.children[focus]?.focus({ preventScroll: true });
    const nothing = total ? "No episode matches these filters."
      : run.has_events ? "No episode has begun yet." : "This run has no event log, so its episodes cannot be shown.";
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

  const key = (name) => h("kbd", {}, name);
  const keys = soft(key("j"), " ", key("k"), " move, ", key("Enter"), " opens, ", key("g"), " its group");
  const caption = h("caption", { class: "skip" }, `Episodes of ${run.name}`);
  show(place, filters, h("div", { class: "bar" }, count, keys, h("span", { class: "push" }), back, next),
    h("div", { class: "sheet" }, h("table", { id: "episodes" }, caption, h("thead", {}, head), body)), note);
  await read();

  const live = soon(() => !signal.aborted && read(), 700);
  return {
    update: (k) => k === run.run && Number(wanted.offset) === 0 && live(),
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
