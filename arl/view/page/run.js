// The run: its numbers by step or by time, several runs on the same axes, and their settings.

import { get } from "./server.js";
import { Chart, heatChart } from "./chart.js";
import { runColour } from "./colour.js";
import { button, clock, empty, facts, h, moment, num, number, option, seconds, show, soft, soon } from "./dom.js";

const percent = (value) => (typeof value === "number" ? `${number(value * 100, 1)} %` : "–");
const share = (part, other) => (row) => (row(part) === null || row(other) === null ? null : row(part) / (row(part) + row(other) || 1));

// Each line is [metric or a function of a row, label, style].
const CHARTS = [
  { name: "reward", title: "Reward", lines: [["reward", "training batch"], ["@reward", "held out", "points"]] },
  { name: "staleness", title: "Staleness", what: "versions between sampling and training a token",
    lines: [["staleness/mean", "mean"], ["staleness/max", "largest", "thin"]] },
  { name: "throughput", title: "Throughput", what: "episodes of the batch per second", lines: [["samples_per_s", "episodes/s"]] },
  { name: "waiting", title: "Who waited", what: "share of each step's time; the rest is training", filled: true, format: percent,
    range: () => [0, 1], lines: [[share("time/wait_s", "time/train_s"), "the trainer, for data"]] },
  { name: "loss", title: "Loss", lines: [["loss", "loss"]] },
  { name: "entropy", title: "Entropy", what: "nats per trained token", lines: [["entropy", "entropy"]] },
  { name: "kl", title: "KL", what: "from the sampler, and from the reference",
    lines: [["behavior_kl_proximal", "proximal"], ["behavior_kl_current", "current", "dashed"], ["kl_reference", "reference", "thin"]] },
  { name: "ess", title: "Effective sample size", what: "1: all tokens weigh the same", lines: [["effective_sample_size", "share"]] },
  { name: "clip", title: "Clipped", what: "share of trained tokens", format: percent,
    lines: [["clip_fraction", "clipped"], ["behavior_weight_zero", "weight 0", "thin"]] },
  { name: "length", title: "Length", what: "tokens of a trajectory",
    lines: [["length/tokens", "mean"], ["length/trained_tokens", "trained", "dashed"], ["length/tokens_max", "longest", "thin"]] },
];

export async function runView({ place, query, runs, shown, setQuery, signal, link }) {
  const tables = new Map();
  let byTime = query.x === "time";
  const more = (query.more ?? "").split(",").filter(Boolean);
  const charts = new Map();
  const heats = new Map();
  const grid = h("div", { class: "charts" });
  const about = h("div");
  const picker = h("select", { "aria-label": "Add a chart of any metric" });
  const axis = h("span", { class: "segments", role: "group", "aria-label": "Horizontal axis" }, ["step", "time"].map((name) =>
    h("button", { type: "button", "aria-pressed": String((name === "time") === byTime), onclick: (event) => {
      byTime = name === "time";
      for (const button of axis.children) button.setAttribute("aria-pressed", String(button === event.target));
      remember();
      draw();
    } }, name)));
  signal.addEventListener("abort", () => [...charts.values(), ...heats.values()].forEach((chart) => chart.close()));

  const remember = () => setQuery({ x: byTime ? "time" : null, more: more.join(","), runs: query.runs });

  async function read(k) {
    const known = tables.get(k);
    const version = known?.columns.version?.at(-1);
    const since = known && version !== undefined && version <= (runs[k].version ?? Infinity) ? version : null;
    const [found, old] = await Promise.all([get(`runs/${k}/steps`, { since }, signal), get(`runs/${k}/staleness`, {}, signal)]);
    tables.set(k, { ...(since === null ? found : joined(known, found)), old });
  }

  function line(k, [what, label, style]) {
    const { columns, evaluations } = tables.get(k);
    const xs = columns[byTime ? "time_s" : "version"] ?? [];
    const named = shown.length > 1 ? `${runs[k].name} ${label}` : label;
    const made = { label: named, line: label, style, colour: runColour(k) };
    if (typeof what === "function") {
      const ys = xs.map((_, row) => what((name) => columns[name]?.[row] ?? null));
      return { ...made, xs, ys };
    }
    if (!what.startsWith("@")) return { ...made, xs, ys: columns[what] ?? [] };
    const at = (row) => (byTime ? (columns.time_s?.[columns.version.indexOf(row.version)] ?? (row.version === 0 ? 0 : null)) : row.version);
    const rows = evaluations.filter((row) => at(row) !== null).sort((a, b) => a.version - b.version);
    return { ...made, xs: rows.map(at), ys: rows.map((row) => row[what.slice(1)] ?? null) };
  }

  function draw() {
    const wanted = [...CHARTS, ...more.map((name) => ({ name, title: name, lines: [[name, ""]], isMore: true }))];
    for (const options of wanted) {
      const series = options.lines.flatMap((one) => shown.map((k) => ({ ...line(k, one), filled: options.filled })))
        .filter(({ xs, ys }) => xs.length && ys.some((y) => typeof y === "number"));
      let chart = charts.get(options.name);
      if (!series.length) continue;
      if (!chart) {
        chart = new Chart({ ...options, xName: "" });
        charts.set(options.name, chart);
        grid.append(chart.node);
        const remove = button("×", () => drop(options.name), { "aria-label": `Remove ${options.name}` });
        if (options.isMore) chart.node.querySelector("h3").after(remove);
      }
      chart.options.xName = byTime ? "s" : "step";
      chart.set(series);
    }
    for (const k of shown.toReversed()) drawStaleness(k);
    const names = [...new Set(shown.flatMap((k) => tables.get(k).names))].sort();
    show(picker, option("", "Add a metric …"), names.filter((name) => !charts.has(name)).map((name) => option(name)));
    if (!grid.children.length) show(grid, h("div", { class: "chart" }, empty("No step yet: the first batch is not trained.")));
    else grid.querySelector(".state")?.parentNode.remove();
    drawFacts();
  }

  function drawStaleness(k) {
    const { old } = tables.get(k);
    if (!old.steps.length) return;
    const title = shown.length > 1 ? `Staleness by step: ${runs[k].name}` : "Staleness by step";
    if (!heats.has(k)) {
      const chart = heatChart({ name: `staleness-${k}`, title, what: "share of trained tokens; dashed: the bound" });
      heats.set(k, chart);
      if (charts.has("staleness")) charts.get("staleness").node.after(chart.node);
      else grid.append(chart.node);
    }
    heats.get(k).update(old);
  }

  function drop(name) {
    charts.get(name).close();
    charts.get(name).node.remove();
    charts.delete(name);
    more.splice(more.indexOf(name), 1);
    remember();
    draw();
  }

  function drawFacts() {
    show(about, shown.map((k) => {
      const run = runs[k];
      const { columns, evaluations } = tables.get(k);
      const held = evaluations.filter((row) => typeof row.reward === "number");
      return [
        shown.length > 1 && h("h1", {}, h("span", { class: "dot", style: { "--tone": runColour(k), display: "inline-block" } }), ` ${run.name}`),
        facts([
          ["State", h("span", { title: run.why || null }, run.how)],
          ["Version", [num(run.version), run.steps ? [" of ", num(run.steps)] : null]],
          ["Reward", num(columns.reward?.at(-1) ?? null)],
          ["Held out", held.length ? [num(held[0].reward), " → ", num(held.at(-1).reward)] : "–"],
          ["Episodes", [num(run.num_episodes), run.num_running ? [", ", num(run.num_running), " running"] : null]],
          ["Groups", num(run.num_groups)],
          ["Began", h("span", { title: moment(run.began) }, clock(run.began))],
          ["Training time", num(columns.time_s?.at(-1) ?? null, seconds)],
          ["Lives", num(run.lives?.length ?? null)],
        ]),
        run.why && !["finished", "running"].includes(run.how) && h("p", { class: "soft" }, `${run.why} ${run.next ?? ""}`),
        !run.has_events && h("p", { class: "soft" }, "This run has no event log: only the metrics of its steps can be shown."),
        run.has_events && run.problems?.length ? h("p", {}, h("a", { href: link("health") }, "Parts of its log cannot be read.")) : null,
      ];
    }));
  }

  picker.addEventListener("change", () => {
    if (picker.value) more.push(picker.value);
    remember();
    draw();
  });

  await Promise.all(shown.map(read));
  const bar = h("div", { class: "bar" }, h("label", {}, "by ", axis), picker, soft("drag to zoom, double-click to see all"));
  show(place, about, bar, grid, await settings(runs, shown, signal));
  draw();

  const changed = new Set();
  const refresh = soon(async () => {
    const these = [...changed];
    changed.clear();
    try {
      await Promise.all(these.map(read));
    } catch {
      return; // the stream tells when the server is there again
    }
    if (!signal.aborted) draw();
  }, 300);
  return {
    update(k) {
      if (!shown.includes(k)) return;
      changed.add(k);
      refresh();
    },
  };
}

// The rows known so far, and those that came since.
function joined(known, found) {
  const names = [...new Set([...known.names, ...found.names])];
  const before = known.columns.version?.length ?? 0;
  const after = found.columns.version?.length ?? 0;
  const column = (table, name, count) => table.columns[name] ?? Array(count).fill(null);
  const whole = (name) => [name, [...column(known, name, before), ...column(found, name, after)]];
  const columns = Object.fromEntries([...new Set([...names, "version"])].map(whole));
  return { names, columns, evaluations: found.evaluations };
}

const flat = (value, name = "") =>
  value !== null && typeof value === "object" && !Array.isArray(value) && Object.keys(value).length
    ? Object.entries(value).flatMap(([key, part]) => flat(part, name ? `${name}.${key}` : key))
    : [[name, value]];
const said = (value) => (typeof value === "string" ? value : JSON.stringify(value) ?? "–");

function sheet(id, head, rows) {
  const row = ([name, ...values]) => h("tr", {}, h("th", { scope: "row" }, name), values.map((value) => h("td", { class: "wrap mono" }, said(value))));
  const top = head && h("thead", {}, h("tr", {}, head.map((name) => h("th", { scope: "col" }, name))));
  return h("div", { class: "sheet" }, h("table", { id }, top, h("tbody", {}, rows.map(row))));
}

async function settings(runs, shown, signal) {
  const made = [];
  if (shown.length > 1) {
    const { settings } = await get("compare-settings", {}, signal);
    const rows = settings.map(({ name, values }) => [name, ...shown.map((k) => values[k])]);
    made.push(h("h2", {}, "How their settings differ"),
      rows.length ? sheet("differences", ["Setting", ...shown.map((k) => runs[k].name)], rows) : empty("Their settings are the same."));
  }
  for (const k of shown) {
    const rows = flat(runs[k].settings ?? {}).filter(([name]) => name);
    made.push(h("h2", {}, shown.length > 1 ? `Settings of ${runs[k].name}` : "Settings"),
      rows.length ? h("details", {}, h("summary", {}, `${rows.length} settings`), sheet(null, null, rows)) : empty("The log does not say the settings."));
  }
  return made;
}
