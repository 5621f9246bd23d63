// What is wrong, what went wrong, and what is left.

import { get } from "./server.js";
import { bytes, clock, facts, h, moment, num, show, table, tag, visible } from "./dom.js";

const TONES = { error: "bad", warning: "warn", note: "soft", log: "warn" };
const STATES = { serving: "good", fenced: "bad" };

export async function healthView({ place, run, link, signal }) {
  const at = (t) => h("span", { class: "num", title: moment(t) }, clock(t));
  const episode = ({ life, episode }) => h("a", { href: link("episode", [run.run, life, episode]) }, episode);
  const group = ({ life, group }) => h("a", { href: link("group", [run.run, life, group]) }, `group ${group}`);
  const known = (name, values, format) => Object.keys(values).length > 0 && [h("h2", {}, name),
    facts(Object.entries(values).map(([name, value]) => [name.replaceAll("_", " "), num(value, format)]))];
  const list = (name, head, rows) => [h("h2", {}, name), table(name, head, rows)];

  function findings({ findings }) {
    const found = [...findings, ...run.problems.map((text) => ({ severity: "log", text }))];
    const told = ({ severity, text, advice }) => h("article", { class: "finding", style: { "--tone": `var(--${TONES[severity]})` } },
      tag(severity, TONES[severity]), " ", visible(text), advice && h("p", {}, visible(advice)));
    const none = h("article", { class: "finding", style: { "--tone": "var(--good)" } }, "Nothing was found that needs you.");
    return [h("h2", {}, "Findings"), found.length ? found.map(told) : none];
  }

  async function update() {
    const health = await get(`runs/${run.run}/health`, {}, signal);
    show(place,
      h("h1", {}, `Health of ${run.name}`),
      findings(health),
      list("Failures by cause", ["Error", "Message", "Count", "First", "Last", "For instance"],
        health.failures.map((one) => [visible(one.error), visible(one.message), num(one.count), at(one.first), at(one.last), episode(one.example)])),
      list("Groups that were not trained", ["Outcome", "Reason", "Count", "For instance"],
        health.rejected.map((one) => [one.outcome, visible(one.reason), num(one.count), group(one.example)])),
      list(run.is_live ? "Servers, in the last minute" : "Servers, in the last minute of the run", ["Server", "State", "Since", "Turns/s", "Tokens/s", "Fences", "Reason"],
        health.servers.map((one) => [visible(one.server), tag(one.state, STATES[one.state]), at(one.since),
          num(one.turns_per_s), num(one.tokens_per_s), num(one.fences), visible(one.reason ?? "")])),
      list("Restarts", ["When", "Process", "How"], health.restarts.map((one) => [at(one.t), visible(one.name), visible(one.how)])),
      list("Warnings", ["Level", "From", "Text", "Count", "Last"],
        health.warnings.map((one) => [tag(one.level, one.level === "warning" ? "warn" : "bad"), visible(one.logger), visible(one.text), num(one.count), at(one.last)])),
      known("Ledger", health.ledger), known("Disk", health.disk, bytes));
  }

  await update();
  return { update };
}
