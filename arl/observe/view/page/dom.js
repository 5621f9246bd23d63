// Elements from text, and numbers as text. Nothing that a run holds is ever parsed as HTML.

export function h(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (!isShown(value)) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "value") node.value = value;
    else if (name === "style") for (const [key, text] of Object.entries(value)) node.style.setProperty(key, text);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  return show(node, children);
}

const isShown = (child) => child !== null && child !== undefined && child !== false;

// Children that are null, undefined or false are left out.
export function show(place, ...children) {
  place.replaceChildren(...children.flat(Infinity).filter(isShown));
  return place;
}

export const button = (text, onclick, props = {}) => h("button", { type: "button", onclick, ...props }, text);
export const tag = (text, tone = "", title = null) => h("span", { class: `tag ${tone}`, title }, text);
export const soft = (...children) => h("span", { class: "soft" }, children);
export const key = (name) => [h("kbd", {}, name), " "];
export const option = (value, text = value, selected = false) => h("option", { value, selected }, text);
export const item = (name, value) => [h("dt", {}, name), h("dd", {}, value)];
export const facts = (entries) =>
  h("dl", { class: "facts" }, entries.filter(([, value]) => value).map(([name, value]) => h("div", {}, item(name, value))));

// Names and numbers under each other, without those that are not known.
export function pairs(entries, format = number) {
  const known = entries.filter(([, value]) => isShown(value) && value !== "");
  const made = (value) => (value instanceof Node || Array.isArray(value) ? value : num(value, format));
  return known.length > 0 && h("dl", { class: "pairs" }, known.map(([name, value]) => item(name, made(value))));
}

// rows: lists of cells
export function table(title, head, rows, props = {}) {
  if (!rows.length) return h("p", { class: "soft" }, "None.");
  const cells = (row) => h("tr", {}, row.map((cell) => h("td", { class: "wrap" }, cell)));
  const top = head.length > 0 && h("thead", {}, h("tr", {}, head.map((name) => h("th", { scope: "col" }, name))));
  return h("div", { class: "sheet" }, h("table", props, h("caption", { class: "skip" }, title), top, h("tbody", {}, rows.map(cells))));
}

export const loading = (what) =>
  h("p", { class: "state", role: "status" }, h("span", { class: "spin", "aria-hidden": "true" }), `Reading ${what} …`);
export const empty = (sentence) => h("p", { class: "state" }, sentence);
export const failed = (error) => h("p", { class: "state error", role: "alert" }, String(error?.message ?? error));

const [WHOLE, SHORT, FAR] = [{ maximumFractionDigits: 0 }, { maximumSignificantDigits: 4 }, { maximumSignificantDigits: 3, notation: "scientific" }]
  .map((options) => new Intl.NumberFormat("en", options));

// A number at a precision that one can read.
export function number(value) {
  if (typeof value !== "number") return String(value ?? "–");
  const size = Math.abs(value);
  const form = size >= 1e9 || (size < 1e-3 && size > 0) ? FAR : Number.isInteger(value) || size >= 1000 ? WHOLE : SHORT;
  return form.format(value).replace("E", "e").replaceAll("-", "−");
}

export const percent = (share) => (typeof share === "number" ? `${number(Math.round(share * 1000) / 10)} %` : "–");

// 5.2 ms, 5.2 s, 1:05, 2:01:05; digits: of the seconds beyond a minute.
export function seconds(value, digits = 0) {
  if (typeof value !== "number") return "–";
  if (value < 0) return `−${seconds(-value, digits)}`;
  if (value < 60) return value < 1 && value > 0 ? `${number(value * 1e3)} ms` : `${number(value)} s`;
  const t = Number(value.toFixed(digits));
  const [hours, minutes, rest] = [Math.floor(t / 3600), Math.floor((t % 3600) / 60), Number((t % 60).toFixed(digits))];
  const padded = (n) => `${n < 10 ? "0" : ""}${n}`;
  return hours ? `${hours}:${padded(minutes)}:${padded(rest)}` : `${minutes}:${padded(rest)}`;
}

export function bytes(value) {
  const k = Math.max(["B", "kB", "MB", "GB", "TB"].findLastIndex((_, power) => value >= 1000 ** power), 0);
  return `${number(value / 1000 ** k)} ${["B", "kB", "MB", "GB", "TB"][k]}`;
}

export const clock = (t) => (typeof t === "number" ? new Date(t * 1000).toLocaleTimeString("en-GB") : "–");
export const moment = (t) => (typeof t === "number" ? new Date(t * 1000).toISOString() : "");

// <span>0.123</span> whose title is 0.12345678
export const num = (value, format = number) =>
  h("span", { class: "num", title: typeof value === "number" ? String(value) : null }, format(value));

// Control and direction characters become visible: an escape sequence or a bidi override in an episode does nothing.
const INVISIBLE = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;
export const visible = (text) =>
  text.replace(INVISIBLE, (c) => {
    const code = c.charCodeAt(0).toString(16).toUpperCase();
    return `‹${code.padStart(code.length > 2 ? 4 : 2, "0")}›`;
  });

// Calls `action` a while after the first of several calls, so that a stream of them cannot put it off for ever.
export function soon(action, wait) {
  let timer = null;
  return () => (timer ??= setTimeout(() => {
    timer = null;
    action();
  }, wait));
}
