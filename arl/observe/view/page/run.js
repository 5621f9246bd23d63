// The run: its numbers by step or by time, several runs on the same axes, and their settings.

import { get } from "./server.js";
import { Chart } from "./chart.js";
import { runColour } from "./colour.js";
import { button, clock, empty, facts, h, moment, num, option, percent, seconds, show, soft, table } from "./dom.js";

const waited = (row) => row["time/wait_s"] / (row["time/wait_s"] + row["time/train_s"]);

// Each line is [metric or a function of a row, label, style].
const CHARTS = [
  { name: "reward", title: "Reward", lines: [["reward", "training batch"], ["@reward", "held out", "points"]] },
  { name: "staleness", title: "Staleness", what: "versions between sampling and training a token",
    lines: [["staleness/mean", "mean"], ["staleness/max", "largest", "thin"]] },
  { name: "throughput", title: "Throughput", what: "episodes of the batch per second", lines: [["samples_per_s", "episodes/s"]] },
  { name: "waiting", title: "Who waited", what: "share of each step's time; the rest is training", filled: true, format: percent,
    range: () => [0, 1], lines: [[waited, "the trainer, for data"]] },
  { name: "loss", title: "Loss", lines: [["loss", "loss"]] },
  { name: "entropy", title: "Entropy", what: "nats per trained token", lines: [["entropy", "entropy"]] },
  { name: "kl", title: "KL", what: "nats per trained token",
    lines: [["behavior_kl_proximal", "sampler to proximal"], ["behavior_kl_current", "sampler to current", "dashed"], ["kl_reference", "current to reference", "thin"]] },
  { name: "ess", title: "Effective sample size", what: "1: all tokens weigh the same", lines: [["effective_sample_size", "share"]] },
  { name: "clip", title: "Clipped", what: "share of trained tokens", format: percent,
    lines: [["clip_fraction", "clipped"], ["behavior_weight_zero", "weight 0", "thin"]] },
  { name: "length", title: "Length", what: "tokens of a trajectory",
    lines: [["length/tokens", "mean"], ["length/trained_tokens", "trained", "dashed"], ["length/tokens_max", "longest", "thin"]] },
];

export async function runView({ place, query, runs, shown, setQuery, signal, link }) {
  const tables = new Map(); // of each run: its rows, the names in them, its evaluations, and its staleness
  let byTime = query.x === "time";
  const more = new Set((query.more ?? "").split(",").filter(Boolean));
  const charts = new Map();
  const [grid, about, settings] = [h("div", { class: "charts" }), h("div"), h("div")];
  let told = ""; // the settings that are shown: those of a run whose log is being read may come later
  const axes = ["step", "time"].map((name) => button(name, () => change(() => (byTime = name === "time"))));
  const axis = h("span", { class: "segments", role: "group", "aria-label": "Horizontal axis" }, axes);
  const picker = h("select", { "aria-label": "Add a chart of any metric", onchange: () => change(() => more.add(picker.value)) });
  signal.addEventListener("abort", () => charts.forEach((chart) => chart.close()));

  async function read(k) {
    const known = tables.get(k)?.rows ?? [];
    const last = known.at(-1)?.version;
    const isOn = last <= runs[k].version; // or else the run went back
    const [{ names, columns, evaluations }, staleness] = await Promise.all([
      get(`runs/${k}/steps`, { since: isOn ? last : null }, signal), get(`runs/${k}/staleness`, {}, signal)]);
    const rows = (columns.version ?? []).map((_, i) => Object.fromEntries(names.map((name) => [name, columns[name][i]])));
    evaluations.sort((a, b) => a.version - b.version);
    tables.set(k, { rows: isOn ? [...known, ...rows] : rows, names: new Set([...(tables.get(k)?.names ?? []), ...names]), evaluations, staleness });
  }

  function line(k, [what, label, style], filled) {
    const { rows, evaluations } = tables.get(k);
    const timeOf = ({ version }) => (version === 0 ? 0 : rows.find((row) => row.version === version)?.time_s);
    const isHeldOut = what[0] === "@";
    const of = isHeldOut ? evaluations : rows;
    const points = of.map((row) => [
      !byTime ? row.version : isHeldOut ? timeOf(row) : row.time_s,
      typeof what === "function" ? what(row) : row[isHeldOut ? what.slice(1) : what],
    ]).filter(([x]) => typeof x === "number");
    const ys = points.map(([, y]) => (Number.isFinite(y) ? y : null));
    return { label: shown.length > 1 ? `${runs[k].name} ${label}` : label, line: label, style, filled, colour: runColour(k), xs: points.map(([x]) => x), ys };
  }

  function chart(name, make) {
    if (!charts.has(name)) {
      charts.set(name, make(name));
      grid.append(charts.get(name).node);
    }
    return charts.get(name);
  }

  function draw() {
    for (const { lines, filled, ...options } of [...CHARTS, ...[...more].map((name) => ({ name, title: name, lines: [[name, ""]] }))]) {
      const series = lines.flatMap((one) => shown.map((k) => line(k, one, filled))).filter(({ ys }) => ys.some((y) => y !== null));
      if (series.length) chart(options.name, () => new Chart(options)).set(series, byTime ? "s" : "step");
      if (options.name === "staleness") shown.filter((k) => tables.get(k).staleness.steps.length).forEach(drawAges);
    }
    for (const name of more) {
      charts.get(name)?.tools.replaceChildren(button("×", () => remove(name), { "aria-label": `Remove ${name}` }));
    }
    const names = [...new Set(shown.flatMap((k) => [...tables.get(k).names]))].sort();
    show(picker, option("", "Add a metric …"), names.filter((name) => !charts.has(name)).map((name) => option(name)));
    axes.forEach((one, k) => one.setAttribute("aria-pressed", String(byTime === (k === 1))));
    show(about, charts.size === 0 && empty("No step yet: the first batch is not trained."), shown.map(aboutRun));
    const known = JSON.stringify(shown.map((k) => runs[k].settings));
    if (known !== told) show(settings, settingsOf(shown.map((k) => runs[k])));
    told = known;
  }

  // An area for each age, one behind the other: the fresher the darker.
  function drawAges(k) {
    const { steps, staleness, tokens, bound } = tables.get(k).staleness;
    const ages = staleness.filter((age) => Number.isInteger(Math.log2(age)) || age === 0 || age === staleness.at(-1));
    const total = (counts) => counts.reduce((a, b) => a + b, 0);
    const title = `Staleness by step${shown.length > 1 ? `: ${runs[k].name}` : ""}`;
    const what = `trained tokens by age in versions${bound === null ? "" : `; bound ${bound}`}`;
    const series = ages.map((age) => ({ label: String(age), line: `≤ ${age}`, xs: steps, filled: true, colour: runColour(k),
      ys: tokens.map((counts) => total(counts.slice(0, age + 1)) / total(counts)) }));
    chart(`staleness-${k}`, (name) => new Chart({ name, title, what, format: percent, range: () => [0, 1] })).set(series, "step");
  }

  function change(action) {
    action();
    setQuery({ x: byTime ? "time" : null, more: [...more].join(",") });
    draw();
  }

  const remove = (name) => change(() => {
    more.delete(name);
    charts.get(name).close();
    charts.delete(name);
  });

  function aboutRun(k) {
    const run = runs[k];
    const { rows, evaluations } = tables.get(k);
    const held = evaluations.filter((row) => typeof row.reward === "number");
    return [
      shown.length > 1 && h("h1", {}, h("span", { class: "dot", style: { "--tone": runColour(k) } }), ` ${run.name}`),
      facts([
        ["State", h("span", { title: run.why }, run.how)],
        ["Version", [num(run.version), run.steps && [" of ", num(run.steps)]]],
        ["Reward", num(rows.at(-1)?.reward)],
        ["Held out", held.length ? [num(held[0].reward), " → ", num(held.at(-1).reward)] : "–"],
        ["Episodes", [num(run.num_episodes), run.num_running > 0 && [", ", num(run.num_running), " running"]]],
        ["Groups", num(run.num_groups)],
        ["Began", h("span", { title: moment(run.began) }, clock(run.began))],
        ["Training time", num(rows.at(-1)?.time_s, seconds)],
        ["Lives", num(run.lives.length)],
      ]),
      !["finished", "running"].includes(run.how) && run.why && h("p", { class: "soft" }, `${run.why} ${run.next}`),
      run.problems.length > 0 && h("p", {}, h("a", { href: link("health") }, "Parts of its log cannot be read.")),
    ];
  }

  async function update() {
    await Promise.all(shown.map(read));
    draw();
  }

  const bar = h("div", { class: "bar" }, h("label", {}, "by ", axis), picker, soft("drag to zoom, double-click to see all"));
  show(place, about, bar, grid, settings);
  await update();
  return { update };
}

const flat = (value, name = "") =>
  value !== null && typeof value === "object" && !Array.isArray(value) && Object.keys(value).length
    ? Object.entries(value).flatMap(([key, part]) => flat(part, name ? `${name}.${key}` : key))
    : [[name, value]];
const said = (value) => (typeof value === "string" ? value : JSON.stringify(value ?? null));

function settingsOf(runs) {
  const settings = runs.map((run) => Object.fromEntries(flat(run.settings).filter(([name]) => name)));
  const names = [...new Set(settings.flatMap(Object.keys))].sort();
  const rows = names.map((name) => [name, ...settings.map((one) => said(one[name]))]);
  const known = settings.map((one) => Object.keys(one).length > 0); // of a run without an event log, none are
  const differing = rows.filter(([, ...values]) => new Set(values.filter((_, k) => known[k])).size > 1);
  const head = ["Setting", ...runs.map((run) => run.name)];
  return [
    runs.length > 1 && [h("h2", {}, "How their settings differ"), table("Differences", head, differing, { id: "differences", class: "mono" })],
    h("h2", {}, "Settings"),
    h("details", {}, h("summary", {}, `${rows.length} settings`), table("Settings", head, rows, { class: "mono" })),
  ];
}
