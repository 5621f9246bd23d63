// What is wrong, what went wrong, and what is left.

import { get } from "./server.js";
import { bytes, clock, debounced, h, moment, num, show, visible } from "./dom.js";

const TONES = { error: "bad", warning: "warn", note: "soft" };

export async function healthView({ place, run, link, signal }) {
  const finding = (tone, ...children) => h("article", { class: "finding", style: { "--tone": `var(--${tone})` } }, children);
  const table = (title, head, rows) => rows.length
    ? h("div", { class: "sheet" }, h("table", {}, h("caption", { class: "skip" }, title), h("thead", {}, h("tr", {}, head.map((name) => h("th", { scope: "col" }, name)))), h("tbody", {}, rows)))
    : h("p", { class: "soft" }, "None.");
  const row = (...cells) => h("tr", {}, cells.map((cell) => h("td", { class: "wrap" }, cell)));
  const at = (t) => h("span", { class: "num", title: moment(t) }, clock(t));

  async function draw() {
    const health = await get(`runs/${run.run}/health`, {}, signal);
    const problems = run.problems ?? [];
    const lost = health.lost ?? {};
    show(place,
      h("h1", {}, `Health of ${run.name}`),
      h("h2", {}, "Findings"),
      health.findings.length ? health.findings.map((one) => finding(TONES[one.severity] ?? "soft", h("span", { class: `tag ${TONES[one.severity]}` }, one.severity), " ", visible(one.text), one.advice ? h("p", {}, visible(one.advice)) : null))
        : finding("good", "Nothing was found that needs you."),
      problems.map((text) => finding("warn", h("span", { class: "tag warn" }, "log"), " ", visible(text))),
      lost.events || lost.episodes ? finding("warn", h("span", { class: "tag warn" }, "log"), ` ${lost.events} records and the tokens of ${lost.episodes} episodes could not be written.`) : null,
      h("h2", {}, "Failures by cause"),
      table("Failures", ["Error", "Message", "Count", "First", "Last", "For instance"], health.failures.map((one) =>
        row(visible(one.error), visible(one.message), num(one.count), at(one.first), at(one.last), one.example && h("a", { href: link("episode", [run.run, one.example.life, one.example.episode]) }, one.example.episode)))),
      h("h2", {}, "Groups that were not trained"),
      table("Groups", ["Outcome", "Reason", "Count", "For instance"], health.rejected.map((one) =>
        row(one.outcome, visible(one.reason), num(one.count), one.example && h("a", { href: link("group", [run.run, one.example.life, one.example.group]) }, `group ${one.example.group}`)))),
      h("h2", {}, "Servers"),
      table("Servers", ["Server", "State", "Since", "Fences", "Reason"], health.servers.map((one) =>
        row(h("span", { class: "mono" }, visible(one.server)), h("span", { class: `tag ${{ serving: "good", fenced: "bad" }[one.state] ?? ""}` }, one.state), at(one.since), num(one.fences), visible(one.reason ?? "")))),
      health.restarts.length ? [h("h2", {}, "Restarts"), table("Restarts", ["When", "Process", "How"], health.restarts.map((one) => row(at(one.t), visible(one.name), visible(one.how))))] : null,
      h("h2", {}, "Warnings"),
      table("Warnings", ["Level", "From", "Text", "Count", "Last"], health.warnings.map((one) => row(h("span", { class: `tag ${one.level === "warning" ? "warn" : "bad"}` }, one.level), visible(one.logger), visible(one.text), num(one.count), at(one.last)))),
      h("h2", {}, "Ledger"), facts(Object.entries(health.ledger), num),
      h("h2", {}, "Disk"), facts(Object.entries(health.disk), (value) => num(value, bytes)));
  }
  const facts = (entries, format) => entries.length ? h("dl", { class: "facts" }, entries.map(([name, value]) => h("div", {}, h("dt", {}, name.replaceAll("_", " ")), h("dd", {}, format(value))))) : h("p", { class: "soft" }, "Nothing known.");

  await draw();
  return { update: debounced((k) => k === run.run && run.is_live && !signal.aborted && draw().catch(() => {}), 1500) };
}
