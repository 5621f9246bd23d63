// The frame around the views: routes in the address, the runs, and what a live run says.

import { KeyNeeded, follow, get, queryOf, setKey } from "./server.js";
import { runColour } from "./colour.js";
import { button, failed, h, loading, show, soon } from "./dom.js";
import { episodeView } from "./episode.js";
import { episodesView } from "./episodes.js";
import { groupView } from "./group.js";
import { healthView } from "./health.js";
import { runView } from "./run.js";

const VIEWS = { run: runView, episodes: episodesView, group: groupView, episode: episodeView, health: healthView };
const TABS = { run: "Run", episodes: "Episodes", health: "Health" };
const WITHIN = { group: "episodes", episode: "episodes" }; // their addresses begin with the run
const MOST_STREAMS = 3; // browsers have six connections to a server, for all their tabs
const [main, views, chips, live] = ["main", "views", "runs", "live"].map((id) => document.getElementById(id));

let runs = [];
let shown = []; // numbers of the runs that the address names: all are drawn together, other views show the first
let list = null; // the address that Escape leads back to
let view = null; // {update, keys} of the view, once it is there
let mounted = new AbortController();
let following = new AbortController();

function route() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, ...rest] = path.split("/").map(decodeURIComponent);
  return { name: name in VIEWS ? name : "run", path: rest, query: Object.fromEntries(new URLSearchParams(query)) };
}

export function link(name, path = [], query = {}) {
  const text = queryOf({ runs: shown.length < runs.length && !WITHIN[name] ? shown.join(",") : null, ...query });
  return `#/${[name, ...path].map(encodeURIComponent).join("/")}${text && `?${text}`}`;
}

const go = (...where) => (location.hash = link(...where));
const back = () => (location.hash = list ?? link("episodes"));

async function mount() {
  mounted.abort();
  mounted = new AbortController();
  view = null;
  const { signal } = mounted;
  const { name, path, query: { runs: wanted = "", ...query } } = route();
  const named = (WITHIN[name] ? path[0] : wanted).split(",");
  const all = runs.map((_, k) => k);
  shown = all.filter((k) => named.includes(String(k)));
  if (!shown.length) shown = all;
  frame(name, query);
  watch();
  main.setAttribute("aria-busy", "true");
  show(main, loading(name));
  const remember = () => (list = WITHIN[name] ? list : location.hash);
  remember();
  const setQuery = (query) => {
    history.replaceState(null, "", link(name, path, query));
    remember();
  };
  try {
    const made = await VIEWS[name]({ place: main, path, query, runs, shown, run: runs[shown[0]], link, go, back, setQuery, signal });
    if (!signal.aborted) view = made;
  } catch (error) {
    if (!signal.aborted) fail(error);
  }
  if (!signal.aborted) main.setAttribute("aria-busy", "false");
}

function frame(name, query) {
  const tab = WITHIN[name] ?? name;
  const isOn = (k) => (name === "run" ? shown.includes(k) : k === shown[0]);
  const choose = (k) => {
    const toggled = runs.map((_, other) => other).filter((other) => (other === k) !== shown.includes(other));
    shown = name === "run" ? toggled : [k];
    go(tab, [], name === "run" ? query : {});
  };
  show(views, Object.entries(TABS).map(([name, title]) =>
    h("a", { href: link(name), "aria-current": name === tab ? "page" : null }, title)));
  show(chips, runs.length > 1 && runs.map((run, k) =>
    button([h("span", { class: "dot", style: { "--tone": runColour(k) } }), run.name], () => choose(k),
      { class: "chip", "aria-pressed": String(isOn(k)), title: run.dir })));
  document.title = `${TABS[tab]} · ${runs[shown[0]]?.name ?? "arl view"}`;
}

// Follow the runs in sight, live ones first. The first event of a stream may be no news.
function watch() {
  following.abort();
  following = new AbortController();
  tellLive(false);
  const chosen = route().name === "run" ? shown : shown.slice(0, 1);
  const wanted = document.hidden ? [] : chosen.toSorted((a, b) => runs[b].is_live - runs[a].is_live).slice(0, MOST_STREAMS);
  for (const k of wanted) {
    follow(k, (event) => {
      const isNews = Object.entries(event).some(([name, value]) => JSON.stringify(value) !== JSON.stringify(runs[k][name]));
      Object.assign(runs[k], event);
      tellLive(false);
      if (isNews) refresh();
    }, tellLive, following.signal);
  }
}

const refresh = soon(() => learn().then(() => view?.update?.()).catch(() => {}), 600); // the stream tells when the server is there again

// A stream tells little: how a run ended, its lives and its problems come with the whole.
const learn = async () => (await get("runs")).forEach((run, k) => Object.assign(runs[k], run));

function tellLive(isLost) {
  const { done, total } = runs.map((run) => run.loading).find(({ done, total }) => done < total) ?? {};
  const [state, said] = isLost ? ["lost", "connection lost, trying again"]
    : total ? ["reading", `reading ${Math.floor((100 * done) / total)} %`]
    : shown.some((k) => runs[k].is_live) ? ["live", "live"] : ["still", "not running"];
  if (live.textContent !== said) live.textContent = said;
  live.dataset.state = state;
}

function fail(error) {
  if (!(error instanceof KeyNeeded)) return show(main, failed(error), h("p", { class: "state" }, button("Try again", start)));
  const field = h("input", { type: "password", id: "key", autocomplete: "off", required: true });
  const send = (event) => {
    event.preventDefault();
    setKey(field.value);
    start();
  };
  show(main, h("form", { class: "state", onsubmit: send },
    h("p", {}, h("label", { for: "key" }, "The key of this arl view: ")), field, " ", h("button", {}, "Open")));
  field.focus();
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", mount); // charts and scales are drawn in its colours

// Views may answer keys, unless somebody types. An answer is an action; one that does nothing now returns false.
document.addEventListener("keydown", (event) => {
  const isTyping = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
  if (isTyping && event.key === "Escape") event.target.blur();
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
  const action = view?.keys?.[event.key];
  if (action && action(event) !== false) event.preventDefault();
});

// Its address would lead to another view.
document.querySelector("a.skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});

window.addEventListener("hashchange", mount);
document.addEventListener("visibilitychange", watch);

async function start() {
  show(main, loading("the runs"));
  try {
    runs = await get("runs");
    await mount();
  } catch (error) {
    fail(error);
  }
}

start();
