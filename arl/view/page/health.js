// What is wrong, what went wrong, and what is left.

import { get } from "./server.js";
import { bytes, clock, facts, h, moment, num, show, soon, table, tag, visible } from "./dom.js";

const TONES = { error: "bad", warning: "warn", note: "soft" };
const STATES = { serving: "good", fenced: "bad" };

export async function healthView({ place, run, link, signal }) {
  const finding = (tone, ...children) => h("article", { class: "finding", style: { "--tone": `var(--${tone})` } }, children);
  const at = (t) => h("span", { class: "num", title: moment(t) }, clock(t));
  const episode = (one) => one && h("a", { href: link("episode", [run.run, one.life, one.episode]) }, one.episode);
  const group = (one) => one && h("a", { href: link("group", [run.run, one.life, one.group]) }, `group ${one.group}`);
  const known = (entries) => (entries.length ? facts(entries) : h("p", { class: "soft" }, "Nothing known."));
  const section = (title, ...children) => [h("h2", {}, title), children];

  function findings(health) {
    const { events = 0, episodes = 0 } = health.lost ?? {};
    const found = health.findings.map(({ severity, text, advice }) =>
      finding(TONES[severity], tag(severity, TONES[severity]), " ", visible(text), advice ? h("p", {}, visible(advice)) : null));
    const problems = [...(run.problems ?? [])];
    if (events || episodes) problems.push(`${events} records and the tokens of ${episodes} episodes could not be written.`);
    found.push(...problems.map((text) => finding("warn", tag("log", "warn"), " ", visible(text))));
    return found.length ? found : finding("good", "Nothing was found that needs you.");
  }

  async function draw() {
    const health = await get(`runs/${run.run}/health`, {}, signal);
    show(place,
      h("h1", {}, `Health of ${run.name}`),
      section("Findings", findings(health)),
      section("Failures by cause", table("Failures", ["Error", "Message", "Count", "First", "Last", "For instance"],
        health.failures.map((one) => [visible(one.error), visible(one.message), num(one.count), at(one.first), at(one.last), episode(one.example)]))),
      section("Groups that were not trained", table("Groups", ["Outcome", "Reason", "Count", "For instance"],
        health.rejected.map((one) => [one.outcome, visible(one.reason), num(one.count), group(one.example)]))),
      section("Servers", table("Servers", ["Server", "State", "Since", "Fences", "Reason"],
        health.servers.map((one) => [visible(one.server), tag(one.state, STATES[one.state]), at(one.since), num(one.fences), visible(one.reason ?? "")]))),
      health.restarts.length ? section("Restarts", table("Restarts", ["When", "Process", "How"],
        health.restarts.map((one) => [at(one.t), visible(one.name), visible(one.how)]))) : null,
      section("Warnings", table("Warnings", ["Level", "From", "Text", "Count", "Last"],
        health.warnings.map((one) => [tag(one.level, one.level === "warning" ? "warn" : "bad"), visible(one.logger), visible(one.text), num(one.count), at(one.last)]))),
      section("Ledger", known(Object.entries(health.ledger).map(([name, value]) => [name.replaceAll("_", " "), num(value)]))),
      section("Disk", known(Object.entries(health.disk).map(([name, value]) => [name, num(value, bytes)]))));
  }

  await draw();
  const again = soon(() => !signal.aborted && draw().catch(() => {}), 1000);
  return { update: (k) => k === run.run && again() };
}
