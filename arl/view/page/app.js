// The frame around the views: routes in the address, the runs, the theme, and what a live run says.

import { KeyNeeded, follow, get, queryOf, setKey } from "./server.js";
import { runColour } from "./colour.js";
import { button, failed, h, loading, show } from "./dom.js";
import { episodeView } from "./episode.js";
import { episodesView } from "./episodes.js";
import { groupView } from "./group.js";
import { healthView } from "./health.js";
import { runView } from "./run.js";
import { timeView } from "./time.js";

const VIEWS = { run: runView, episodes: episodesView, group: groupView, episode: episodeView, time: timeView, health: healthView };
const TABS = { run: "Run", episodes: "Episodes", time: "Time", health: "Health" };
const TAB_OF = { group: "episodes", episode: "episodes" };
const MOST_STREAMS = 3;
const main = document.getElementById("main");
const live = document.getElementById("live");

let runs = [];
let shown = null; // numbers of the runs drawn together
let current = 0; // the run of the views that show one
let list = null; // the address that Escape leads back to
let view = null;
let ending = new AbortController();
const following = new Map();
const lost = new Set();

function route() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, ...rest] = path.split("/").map(decodeURIComponent);
  return { name: name in VIEWS ? name : "run", path: rest, query: Object.fromEntries(new URLSearchParams(query)) };
}

export function link(name, path = [], query = {}) {
  const all = { ...(runs.length > 1 ? { run: current || null, runs: shown.length < runs.length ? shown.join(",") : null } : {}), ...query };
  const text = queryOf(all);
  return `#/${[name, ...path].map(encodeURIComponent).join("/")}${text ? `?${text}` : ""}`;
}

const go = (...where) => (location.hash = link(...where));
const back = () => (location.hash = list ?? link("episodes"));

const chosenIn = (at) => (at.name === "run" ? shown ?? [] : [current]);

function frame(at) {
  const tab = TAB_OF[at.name] ?? at.name;
  show(document.getElementById("views"), Object.entries(TABS).map(([name, title]) =>
    h("a", { href: link(name), "aria-current": name === tab ? "page" : null }, title)));
  const toggle = at.name === "run";
  show(document.getElementById("runs"), runs.length > 1 && runs.map((run, k) => {
    const dot = h("span", { class: "dot", style: { "--tone": runColour(k) } });
    const isOn = toggle ? shown.includes(k) : k === current;
    return button([dot, run.name], () => choose(k, toggle), { class: "chip", "aria-pressed": String(isOn), title: run.dir });
  }));
  document.title = `${TABS[tab]} · ${runs[current]?.name ?? "arl view"}`;
}

function choose(k, toggle) {
  if (!toggle) {
    current = k;
    return go(TAB_OF[route().name] ?? route().name);
  }
  const without = shown.filter((other) => other !== k);
  shown = without.length === shown.length ? [...shown, k].sort((a, b) => a - b) : without.length ? without : shown;
  go("run", [], { ...route().query, runs: shown.length < runs.length ? shown.join(",") : null });
}

async function mount() {
  ending.abort();
  ending = new AbortController();
  view = null;
  const at = route();
  const valid = (k) => Number.isInteger(k) && k >= 0 && k < runs.length;
  if (at.query.runs) shown = at.query.runs.split(",").map(Number).filter(valid);
  if (!shown?.length || (!at.query.runs && at.name === "run")) shown = runs.map((_, k) => k);
  const wanted = Number(["episode", "group"].includes(at.name) ? at.path[0] : at.query.run ?? 0);
  current = valid(wanted) ? wanted : 0;
  frame(at);
  const chosen = chosenIn(at);
  watch(chosen);
  tellLive();
  main.setAttribute("aria-busy", "true");
  show(main, loading(TABS[at.name] ? TABS[at.name].toLowerCase() : at.name));
  const signal = ending.signal;
  const isList = !["episode", "group"].includes(at.name);
  if (isList) list = location.hash;
  const setQuery = (query) => {
    history.replaceState(null, "", link(at.name, at.path, query));
    if (isList) list = location.hash;
  };
  try {
    const given = { place: main, path: at.path, query: at.query, runs, shown: chosen, run: runs[current], link, go, back, setQuery, signal };
    const made = await VIEWS[at.name](given);
    if (!signal.aborted) view = made;
  } catch (error) {
    if (signal.aborted) return;
    if (error instanceof KeyNeeded) askForKey();
    else show(main, failed(error));
  }
  if (!signal.aborted) main.setAttribute("aria-busy", "false");
}

// Follow these runs, and no others. Browsers have six connections to a server, for all their tabs: a tab in front uses three.
function watch(chosen) {
  const grows = (run) => run.is_live || run.loading.done < run.loading.total;
  const wanted = document.hidden ? [] : chosen.filter((k) => runs[k] && (grows(runs[k]) || chosen.length === 1)).slice(0, MOST_STREAMS);
  for (const [k, stop] of following) {
    if (wanted.includes(k)) continue;
    stop.abort();
    following.delete(k);
    lost.delete(k);
  }
  for (const k of wanted) if (!following.has(k)) watchOne(k);
}

document.addEventListener("visibilitychange", () => {
  watch(chosenIn(route()));
  tellLive();
});

function watchOne(k) {
  const stop = new AbortController();
  following.set(k, stop);
  const tell = (event) => {
    Object.assign(runs[k], event);
    tellLive();
    view?.update?.(k, event);
  };
  follow(k, tell, (isLost) => {
    if (isLost) lost.add(k);
    else lost.delete(k);
    tellLive();
  }, stop.signal);
}

function tellLive() {
  const chosen = chosenIn(route());
  const reading = runs.find((run, k) => chosen.includes(k) && run.loading && run.loading.done < run.loading.total);
  const isLive = chosen.some((k) => runs[k]?.is_live);
  const state = lost.size ? "lost" : reading ? "reading" : isLive ? "live" : "still";
  const part = reading ? Math.floor((100 * reading.loading.done) / reading.loading.total) : 0;
  const said = { lost: "connection lost, trying again", reading: `reading ${part} %`, live: "live", still: "not running" }[state];
  if (live.textContent !== said) live.textContent = said;
  live.dataset.state = state;
}

function askForKey() {
  const field = h("input", { type: "password", id: "key", autocomplete: "off", required: true });
  const send = (event) => {
    event.preventDefault();
    setKey(field.value);
    start();
  };
  const label = h("label", { for: "key" }, "The key of this arl view: ");
  show(main, h("form", { class: "state", onsubmit: send }, h("p", {}, label), field, " ", h("button", {}, "Open")));
  field.focus();
}

// The theme: the system's, until somebody presses the switch.
const theme = document.getElementById("theme");
function setTheme(name) {
  if (name === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  localStorage.setItem("arl-theme", name);
  theme.textContent = { system: "◐", dark: "☾", light: "☀" }[name];
  theme.title = `Colours: ${name}`;
  theme.setAttribute("aria-label", `Colours: ${name}. Press for the next`);
}
setTheme(localStorage.getItem("arl-theme") ?? "system");
theme.addEventListener("click", () => {
  const names = ["system", "dark", "light"];
  setTheme(names[(names.indexOf(localStorage.getItem("arl-theme")) + 1) % 3]);
  mount();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => mount());

// Views may answer keys, unless somebody types.
document.addEventListener("keydown", (event) => {
  const isTyping = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
  if (isTyping && event.key === "Escape") event.target.blur();
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
  if (view?.key?.(event)) event.preventDefault();
});

window.addEventListener("hashchange", mount);

async function start() {
  show(main, loading("the runs"));
  try {
    runs = await get("runs");
    await mount();
  } catch (error) {
    if (error instanceof KeyNeeded) askForKey();
    else show(main, failed(error), h("p", { class: "state" }, button("Try again", start)));
  }
}

start();
