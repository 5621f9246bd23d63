// Elements from text, and numbers as text. Nothing that a run holds is ever parsed as HTML.

export function h(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "class") node.className = value;
    else if (name === "value") node.value = value;
    else if (name === "style") for (const [key, text] of Object.entries(value)) node.style.setProperty(key, text);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...said(children));
  return node;
}

// What is null, undefined or false is left out.
const said = (children) => children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);

export function show(place, ...children) {
  place.replaceChildren(...said(children));
  return place;
}

export const button = (text, onclick, props = {}) => h("button", { type: "button", onclick, ...props }, text);
export const tag = (text, tone = "", title = null) => h("span", { class: `tag ${tone}`, title }, text);
export const soft = (...children) => h("span", { class: "soft" }, children);
export const item = (name, value) => [h("dt", {}, name), h("dd", {}, value)];
export const facts = (entries) =>
  h("dl", { class: "facts" }, entries.filter(([, value]) => value).map(([name, value]) => h("div", {}, item(name, value))));
export const option = (value, text = value, selected = false) => h("option", { value, selected }, text);

// Names and numbers under each other, without those that are not known.
export function pairs(entries, format = number) {
  const known = entries.filter(([, value]) => value !== null && value !== undefined && value !== "");
  const made = (value) => (value instanceof Node || Array.isArray(value) ? value : num(value, format));
  return known.length ? h("dl", { class: "pairs" }, known.map(([name, value]) => item(name, made(value)))) : null;
}

// rows: lists of cells
export function table(title, head, rows) {
  if (!rows.length) return h("p", { class: "soft" }, "None.");
  const cells = (row) => h("tr", {}, row.map((cell) => h("td", { class: "wrap" }, cell)));
  const top = h("thead", {}, h("tr", {}, head.map((name) => h("th", { scope: "col" }, name))));
  return h("div", { class: "sheet" }, h("table", {}, h("caption", { class: "skip" }, title), top, h("tbody", {}, rows.map(cells))));
}

export const loading = (what) =>
  h("p", { class: "state", role: "status" }, h("span", { class: "spin", "aria-hidden": "true" }), `Reading ${what} …`);
export const empty = (sentence) => h("p", { class: "state" }, sentence);
export const failed = (error) => h("p", { class: "state error", role: "alert" }, String(error?.message ?? error));

const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

// A number at a precision that one can read; `full` has all of it.
export function number(value, digits = 3) {
  if (value === null || value === undefined || value === "") return "–";
  if (typeof value !== "number") return String(value);
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "nan" : value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  let text;
  if (Number.isInteger(value)) text = size < 1e7 ? grouped.format(value) : value.toPrecision(4);
  else if (size >= 1e5 || size < 1e-3) text = value.toExponential(digits - 1);
  else if (size >= 100) text = size >= 1000 ? grouped.format(value) : value.toFixed(1);
  else text = size >= 10 ? value.toFixed(2) : value.toFixed(digits);
  return text.replace("e-", "e−").replace("-", "−");
}

export function seconds(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "–";
  if (value < 0) return `−${seconds(-value)}`;
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1e3).toFixed(value < 0.01 ? 1 : 0)} ms`;
  if (value < 100) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  if (value < 6000) return `${Math.floor(value / 60)} min ${String(Math.floor(value % 60)).padStart(2, "0")} s`;
  return `${Math.floor(value / 3600)} h ${String(Math.floor((value % 3600) / 60)).padStart(2, "0")} min`;
}

export function bytes(value) {
  if (typeof value !== "number") return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let k = 0;
  while (value >= 1000 && k < units.length - 1) [value, k] = [value / 1000, k + 1];
  return `${k && value < 100 ? value.toFixed(1) : value.toFixed(0)} ${units[k]}`;
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

// A token's text: newlines, tabs and, at its ends, spaces can be seen, too.
export const piece = (text) => marked(text).replace(/^ +| +$/g, (spaces) => "·".repeat(spaces.length));
export const marked = (text) => visible(text).replace(/\n/g, "↵").replace(/\t/g, "⇥");

// Calls `action` a while after the first of several calls, so that a stream of them cannot put it off for ever.
export function soon(action, wait) {
  let isDue = false;
  return () => {
    if (isDue) return;
    isDue = true;
    setTimeout(() => {
      isDue = false;
      action();
    }, wait);
  };
}

// Calls `action` once no call has come for a while.
export function debounced(action, wait = 120) {
  let timer = 0;
  return (...args) => {
    clearTimeout(timer);
    timer = setTimeout(action, wait, ...args);
  };
}
