// Who did what when: lanes on a canvas, with zoom and pan.

import { get } from "./server.js";
import { ink, isDark, scale } from "./colour.js";
import { clock, debounced, empty, failed, h, number, seconds, show, visible } from "./dom.js";

const NAMES = 150;
const LANE = 22;
const EPISODE_LANE = 18;
const AXIS = 24;
const GAP = 14; // above the first lane of another kind
const MOST_LANES = 40;
const ROUND = [-4, -3, -2, -1, 0].flatMap((k) => [1, 2, 5].map((n) => n * 10 ** k)).concat([10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 43200, 86400]);
const TONES = {
  light: { training: "#0b6e8f", waiting: "#e3e3dc", snapshot: "#b4881b", checkpoint: "#6b4fbb", publishing: "#c2410c", evaluation: "#2f7d32", busy: "#7fb2c6", paused: "#b9b9b0", loading: "#c2410c", fenced: "#b3261e", turn: "#0b6e8f", tool: "#c2410c", reward: "#2f7d32", episode: "#b9c4cb" },
  dark: { training: "#56b4d9", waiting: "#2c3238", snapshot: "#d9bb4a", checkpoint: "#a996f5", publishing: "#f0934e", evaluation: "#6fc276", busy: "#3d7892", paused: "#5b636b", loading: "#f0934e", fenced: "#ff8b80", turn: "#56b4d9", tool: "#f0934e", reward: "#6fc276", episode: "#56616a" },
};

export async function timeView({ place, query, run, go, back, setQuery, signal }) {
  let data = null;
  let [from, to] = [Number(query.from) || null, Number(query.to) || null];
  let isFollowing = to === null;
  let allLanes = false;
  let picked = null;
  let hits = [];
  let asked = 0;
  const canvas = h("canvas", { tabindex: "0", role: "application", "aria-label": "Lanes of the run over time. Arrows pan, plus and minus zoom, n and p walk through what is drawn, Enter opens an episode.", "aria-describedby": "span" });
  const tip = h("div", { class: "tip", hidden: true });
  const box = h("div", { class: "lanes", style: { "touch-action": "pan-y" } }, canvas, tip);
  const spanText = h("p", { id: "span", class: "soft", "aria-live": "polite" }, "Point at a span, or walk with n and p.");
  const note = h("div");
  const range = h("span", { class: "soft num" });
  const more = h("button", { type: "button", hidden: true, onclick: () => { allLanes = true; draw(); } });

  async function read() {
    const mine = ++asked;
    try {
      const found = await get(`runs/${run.run}/time`, { from: isFollowing && from === null ? null : from, to: isFollowing ? null : to, limit: 2000 }, signal);
      if (mine !== asked) return;
      data = found;
      if (from === null || isFollowing) [from, to] = [found.from, found.to];
      const left = Object.entries(found.left_out ?? {}).filter(([, n]) => n);
      show(note, left.length ? h("p", { class: "soft" }, `Too many to draw here, zoom in for them: ${left.map(([name, n]) => `${number(n)} ${name}`).join(", ")}.`) : null,
        (found.problems ?? []).map((text) => h("p", { class: "soft" }, visible(text))), found.lanes.some((lane) => lane.spans.length) ? null : empty("Nothing was recorded in this time."));
      draw();
    } catch (error) {
      if (mine === asked && !signal.aborted) show(note, failed(error));
    }
  }
  const readSoon = debounced(read, 120);

  function move(newFrom, newTo) {
    const least = 0.002;
    if (newTo - newFrom < least) return;
    [from, to] = [newFrom, newTo];
    isFollowing = false;
    setQuery({ from: from.toFixed(3), to: to.toFixed(3) });
    draw();
    readSoon();
  }
  const zoom = (by, at = (from + to) / 2) => move(at - (at - from) * by, at + (to - at) * by);
  const pan = (share) => move(from + (to - from) * share, to + (to - from) * share);

  const names = () => (canvas.clientWidth < 600 ? 84 : NAMES);
  const xOf = (t) => names() + ((t - from) / (to - from)) * (canvas.clientWidth - names());
  const tOf = (x) => from + ((x - names()) / (canvas.clientWidth - names())) * (to - from);

  function draw() {
    if (!data || signal.aborted) return;
    const tones = TONES[isDark() ? "dark" : "light"];
    const rewards = data.lanes.flatMap((lane) => lane.spans.map((span) => span.reward));
    const reward = scale(rewards);
    const width = canvas.clientWidth || 600;
    const episodeLanes = data.lanes.filter((lane) => lane.kind === "episodes");
    const hidden = allLanes ? 0 : Math.max(0, episodeLanes.length - MOST_LANES);
    const lanes = hidden ? data.lanes.filter((lane) => lane.kind !== "episodes" || episodeLanes.indexOf(lane) < MOST_LANES) : data.lanes;
    more.hidden = !hidden;
    more.textContent = `Show ${hidden} more lanes of episodes`;
    const tops = [];
    let height = AXIS;
    lanes.forEach((lane, k) => {
      height += k && lanes[k - 1].kind !== lane.kind ? GAP : 0;
      tops.push(height);
      height += lane.kind === "episodes" ? EPISODE_LANE : LANE;
    });
    const density = devicePixelRatio || 1;
    canvas.style.height = `${height + 8}px`;
    canvas.width = width * density;
    canvas.height = (height + 8) * density;
    const pen = canvas.getContext("2d");
    pen.scale(density, density);
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    drawAxis(pen, width, height);
    hits = [];
    lanes.forEach((lane, k) => {
      const [top, tall] = [tops[k], lane.kind === "episodes" ? EPISODE_LANE : LANE];
      if (lane.kind !== "episodes" || k === 0 || lanes[k - 1].kind !== "episodes") {
        pen.fillStyle = ink("soft");
        pen.fillText(fitted(pen, lane.kind === "episodes" ? "episodes" : visible(lane.name.replace(/^server |https?:\/\//g, "")), names() - 16), 8, top + tall / 2);
      }
      pen.save();
      pen.beginPath();
      pen.rect(names(), top, width, tall);
      pen.clip();
      for (const span of lane.spans) drawSpan(pen, span, lane, top, tall, tones, reward);
      pen.restore();
    });
    drawArrows(pen, lanes, tops, width);
    range.textContent = `${clock(from)} – ${clock(to)} (${seconds(to - from)})`;
  }

  function drawAxis(pen, width, height) {
    const wish = ((to - from) / (width - names())) * 110;
    const step = ROUND.find((one) => one >= wish) ?? 864000;
    pen.strokeStyle = ink("grid");
    pen.fillStyle = ink("soft");
    for (let t = Math.ceil((from - data.began) / step) * step; t <= to - data.began; t += step) {
      const x = Math.round(xOf(t + data.began)) + 0.5;
      pen.beginPath();
      pen.moveTo(x, AXIS - 4);
      pen.lineTo(x, height);
      pen.stroke();
      pen.fillText(sinceStart(t), x + 4, AXIS / 2);
    }
  }

  function drawSpan(pen, span, lane, top, tall, tones, reward) {
    const [left, right] = [xOf(span.start), xOf(span.stop)];
    if (right < names() || left > canvas.clientWidth) return;
    const wide = Math.max(right - left - 0.5, 1);
    const isEpisode = span.kind === "episode";
    pen.fillStyle = tones[span.kind] ?? tones.busy;
    if (isEpisode && ["failed", "timed_out"].includes(span.how)) pen.fillStyle = tones.fenced;
    else if (isEpisode && typeof span.reward === "number") pen.fillStyle = reward.colour(span.reward)[0];
    const hasParts = isEpisode && wide > 30 && span.children?.length;
    const bodyTall = hasParts ? tall - 8 : tall - 4;
    pen.globalAlpha = isEpisode ? 0.8 : 1;
    pen.fillRect(left, top + 1, wide, bodyTall);
    pen.globalAlpha = 1;
    hits.push({ left, right: left + Math.max(wide, 3), top, bottom: top + tall, span, lane });
    if (span === picked || (isEpisode && picked?.episode === span.episode && picked?.life === span.life)) {
      pen.strokeStyle = ink("focus");
      pen.lineWidth = 2;
      pen.strokeRect(left, top + 1, wide, tall - 3);
      pen.lineWidth = 1;
    }
    for (const child of hasParts ? span.children : []) {
      const at = xOf(child.start);
      pen.fillStyle = child.failure ? tones.fenced : tones[child.kind];
      pen.fillRect(at, top + bodyTall + 2, Math.max(xOf(child.stop) - at - 0.5, 1), 4);
      if (xOf(child.stop) - at > 3) hits.push({ left: at, right: xOf(child.stop), top: top + bodyTall + 1, bottom: top + tall, span: child, lane, inside: span });
    }
    if (wide > 44 && !isEpisode) {
      pen.fillStyle = span.kind === "waiting" || span.kind === "paused" ? ink("ink") : isDark() ? "#111" : "#fff";
      if (span.kind === "busy") pen.fillStyle = ink("ink");
      pen.fillText(fitted(pen, visible(span.label || (span.kind === "busy" ? String(span.n ?? "") : span.kind)), wide - 8), Math.max(left, names()) + 4, top + tall / 2 - 1);
    }
  }

  function drawArrows(pen, lanes, tops, width) {
    const of = (id) => lanes.findIndex((lane) => lane.id === id);
    pen.save();
    pen.beginPath();
    pen.rect(names(), AXIS, width, 1e5);
    pen.clip();
    pen.strokeStyle = ink("soft");
    pen.globalAlpha = 0.55;
    for (const arrow of (data.arrows ?? []).slice(0, 400)) {
      const [a, b] = [of(arrow.from.lane), of(arrow.to.lane)];
      if (a < 0 || b < 0) continue;
      const [x, y, u, v] = [xOf(arrow.from.t), tops[a] + LANE / 2, xOf(arrow.to.t), tops[b] + (b > a ? 2 : LANE - 4)];
      if (Math.max(x, u) < names() || Math.min(x, u) > width) continue;
      pen.beginPath();
      pen.moveTo(x, y);
      pen.bezierCurveTo(x, (y + v) / 2, u, (y + v) / 2, u, v);
      const tip = b > a ? -4 : 4;
      pen.moveTo(u - 3, v + tip);
      pen.lineTo(u, v);
      pen.lineTo(u + 3, v + tip);
      pen.stroke();
    }
    pen.restore();
  }

  const saying = (hit) => {
    const { span, lane, inside } = hit;
    const what = span.kind === "episode" ? `Episode ${span.episode}: ${span.how}${typeof span.reward === "number" ? `, reward ${number(span.reward)}` : ""}${span.step ? `, step ${span.step}` : ""}` : visible(`${inside ? `Episode ${inside.episode}` : lane.name}: ${span.label || span.kind}`);
    return `${what}${span.failure ? ` (${visible(String(span.failure))})` : ""}${span.n ? `, ${span.n} at once` : ""}\n${seconds(span.stop - span.start)}, from ${seconds(span.start - data.began)}`;
  };
  const at = (x, y) => hits.findLast((hit) => x >= hit.left - 1 && x <= hit.right + 1 && y >= hit.top && y <= hit.bottom);
  const open = (hit) => {
    const one = hit?.inside ?? hit?.span;
    if (one?.kind === "episode") go("episode", [run.run, one.life, one.episode]);
  };

  function point(x, y) {
    const hit = at(x, y);
    tip.hidden = !hit;
    canvas.style.cursor = hit && (hit.inside ?? hit.span).kind === "episode" ? "pointer" : "grab";
    if (!hit) return;
    tip.textContent = spanText.textContent = saying(hit);
    tip.style.left = `${Math.min(x + 12, Math.max(canvas.clientWidth - tip.offsetWidth - 8, 0))}px`;
    tip.style.top = `${y + 16 + tip.offsetHeight > canvas.clientHeight ? Math.max(y - tip.offsetHeight - 10, 0) : y + 16}px`;
  }

  // One pointer pans, two pinch.
  const pointers = new Map();
  let wasMoved = false;
  const placeOf = (event) => [event.clientX - canvas.getBoundingClientRect().left, event.clientY - canvas.getBoundingClientRect().top];
  canvas.addEventListener("pointerdown", (event) => {
    pointers.set(event.pointerId, placeOf(event));
    canvas.setPointerCapture(event.pointerId);
    wasMoved = false;
  });
  canvas.addEventListener("pointermove", (event) => {
    const now = placeOf(event);
    const before = pointers.get(event.pointerId);
    if (!before) return point(...now);
    if (Math.abs(now[0] - before[0]) < 3 && !wasMoved) return;
    wasMoved = true;
    tip.hidden = true;
    const other = [...pointers].find(([id]) => id !== event.pointerId)?.[1];
    if (other) zoom(Math.abs(before[0] - other[0]) / Math.max(Math.abs(now[0] - other[0]), 10), tOf(other[0]));
    else move(from + tOf(before[0]) - tOf(now[0]), to + tOf(before[0]) - tOf(now[0]));
    pointers.set(event.pointerId, now);
  });
  const release = (event) => {
    pointers.delete(event.pointerId);
    if (event.type === "pointerup" && !wasMoved) open(at(...placeOf(event)));
  };
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("pointerleave", () => (tip.hidden = true));
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.shiftKey && document.activeElement !== canvas) return; // the page scrolls
    event.preventDefault();
    if (event.shiftKey) pan((event.deltaX || event.deltaY) / 1000);
    else zoom(Math.exp(event.deltaY / 400), tOf(placeOf(event)[0]));
  }, { passive: false });

  function walk(by) {
    const order = hits.filter((hit) => !hit.inside).sort((a, b) => a.span.start - b.span.start);
    const now = order.findIndex((hit) => hit.span === picked);
    const hit = order[Math.min(Math.max(now + by, 0), order.length - 1)];
    if (!hit) return;
    picked = hit.span;
    spanText.textContent = saying(hit);
    draw();
  }
  const whole = () => move(data.began, data.ended);
  const latest = () => {
    [from, to, isFollowing] = [null, null, true];
    setQuery({});
    read();
  };

  const sizes = new ResizeObserver(() => draw());
  sizes.observe(box);
  signal.addEventListener("abort", () => sizes.disconnect());
  const tones = TONES[isDark() ? "dark" : "light"];
  show(place,
    h("div", { class: "bar" }, range, h("span", { class: "push segments" }, h("button", { type: "button", "aria-label": "Zoom out", onclick: () => zoom(2) }, "−"), h("button", { type: "button", "aria-label": "Zoom in", onclick: () => zoom(0.5) }, "+")),
      h("button", { type: "button", onclick: () => data && whole() }, "Whole run"), h("button", { type: "button", onclick: latest }, "Latest")),
    box, more, spanText, note,
    h("div", { class: "legend" }, Object.entries(tones).filter(([name]) => name !== "episode").map(([name, tone]) => h("span", {}, h("span", { class: "swatch", style: { background: tone } }, "\u00a0"), ` ${name}`)), h("span", {}, "episodes: by reward, dark low, yellow high")),
    h("p", { class: "soft" }, "Drag to pan. ", h("kbd", {}, "Ctrl"), " + wheel zooms (the wheel alone, after a click on the lanes). ", h("kbd", {}, "+"), " ", h("kbd", {}, "−"), " ", h("kbd", {}, "←"), " ", h("kbd", {}, "→"), " do, too; ", h("kbd", {}, "0"), " shows the whole run."));
  await read();
  const follow = debounced(() => isFollowing && !signal.aborted && ([from, to] = [null, null], read()), 600);
  return {
    update: (k) => k === run.run && run.is_live && follow(),
    key(event) {
      const does = { "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1.6), 0: whole, ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), n: () => walk(1), p: () => walk(-1), Enter: () => document.activeElement === canvas && open({ span: picked }), Escape: back }[event.key];
      if (!does || !data || (event.key === "Enter" && document.activeElement !== canvas)) return false;
      does();
      return true;
    },
  };
}

// 5.2 s, 1:05, 2:01:05
function sinceStart(t) {
  if (t < 60) return `${Number(t.toFixed(4))} s`;
  const [hours, minutes, rest] = [Math.floor(t / 3600), Math.floor((t % 3600) / 60), Number((t % 60).toFixed(4))];
  const padded = (n) => `${n < 10 ? "0" : ""}${n}`;
  return hours ? `${hours}:${padded(minutes)}:${padded(rest)}` : `${minutes}:${padded(rest)}`;
}

function fitted(pen, text, width) {
  if (pen.measureText(text).width <= width) return text;
  let end = text.length;
  while (end > 1 && pen.measureText(`${text.slice(0, end)}…`).width > width) end--;
  return `${text.slice(0, end)}…`;
}
