// Who did what when: the lanes of a run, which one zooms, pans and walks through.

import { button, clock, debounced, empty, failed, h, number, seconds, show, soft, soon, visible } from "./dom.js";
import { Lanes, laneLegend, sameSpan } from "./lanes.js";
import { get } from "./server.js";

const LEAST_S = 0.002;
const ABOUT = "Lanes of the run over time. Arrows pan, plus and minus zoom, n and p walk through the spans, Enter opens an episode.";

export async function timeView({ place, query, run, go, back, setQuery, signal }) {
  let data = null;
  let isFollowing = !query.to;
  let picked = null;
  let asked = 0;
  const canvas = h("canvas", { tabindex: "0", role: "application", "aria-label": ABOUT, "aria-describedby": "span" });
  const lanes = new Lanes(canvas);
  [lanes.from, lanes.to] = [Number(query.from), Number(query.to)];
  const tip = h("div", { class: "tip", hidden: true });
  const box = h("div", { class: "lanes" }, canvas, tip);
  const spanText = h("p", { id: "span", class: "soft", "aria-live": "polite" }, "Point at a span, or walk with n and p.");
  const note = h("div");
  const range = h("span", { class: "soft num" });
  const more = button("", () => {
    lanes.showsAll = true;
    draw();
  }, { hidden: true });

  async function read() {
    const mine = ++asked;
    try {
      const found = await get(`runs/${run.run}/time`, isFollowing ? {} : { from: lanes.from, to: lanes.to }, signal);
      if (mine !== asked) return;
      data = found;
      if (isFollowing) [lanes.from, lanes.to] = [found.from, found.to];
      const left = Object.entries(found.left_out).filter(([, n]) => n).map(([name, n]) => `${number(n)} ${name}`);
      show(note, left.length > 0 && h("p", { class: "soft" }, `Too many to draw here, zoom in for them: ${left.join(", ")}.`),
        found.problems.map((text) => h("p", { class: "soft" }, visible(text))),
        !found.lanes.some((lane) => lane.spans.length) && empty("Nothing was recorded in this time."));
      draw();
    } catch (error) {
      if (mine === asked && !signal.aborted) show(note, failed(error));
    }
  }
  const readSoon = debounced(() => !signal.aborted && read(), 120);

  function draw() {
    if (!data || signal.aborted) return;
    const hidden = lanes.draw(data, picked);
    more.hidden = !hidden;
    more.textContent = `Show ${hidden} more lanes of episodes`;
    range.textContent = `${clock(lanes.from)} to ${clock(lanes.to)} (${seconds(lanes.to - lanes.from)})`;
  }

  function move(from, to) {
    if (to - from < LEAST_S) return;
    [lanes.from, lanes.to, isFollowing] = [from, to, false];
    setQuery({ from: from.toFixed(3), to: to.toFixed(3) });
    draw();
    readSoon();
  }
  const zoom = (by, at = (lanes.from + lanes.to) / 2) => move(at - (at - lanes.from) * by, at + (lanes.to - at) * by);
  const pan = (s) => move(lanes.from + s, lanes.to + s);
  const panBy = (share) => pan((lanes.to - lanes.from) * share);
  const whole = () => move(data.began, data.ended);
  const latest = () => {
    isFollowing = true;
    setQuery({});
    read();
  };

  function saying({ span, lane, inside }) {
    const parts = [];
    if (span.kind === "episode") {
      parts.push(`Episode ${span.episode}: ${span.how}`, typeof span.reward === "number" && `reward ${number(span.reward)}`, span.step && `step ${span.step}`);
    } else parts.push(`${inside ? `Episode ${inside.episode}` : lane.name}: ${span.label || span.kind}`, span.failure, span.n && `${span.n} at once`);
    return `${visible(parts.filter(Boolean).join(", "))}\n${seconds(span.stop - span.start)}, from ${seconds(span.start - data.began)}`;
  }
  const episodeAt = (hit) => [hit?.inside, hit?.span].find((one) => one?.kind === "episode");
  const open = (one) => one && go("episode", [run.run, one.life, one.episode]);

  function point(x, y) {
    const hit = lanes.at(x, y);
    tip.hidden = !hit;
    canvas.style.cursor = episodeAt(hit) ? "pointer" : "grab";
    if (!hit) return;
    tip.textContent = spanText.textContent = saying(hit);
    const isLow = y + 16 + tip.offsetHeight > canvas.clientHeight;
    tip.style.left = `${Math.min(x + 12, Math.max(canvas.clientWidth - tip.offsetWidth - 8, 0))}px`;
    tip.style.top = `${isLow ? Math.max(y - tip.offsetHeight - 10, 0) : y + 16}px`;
  }

  function walk(by) {
    const order = lanes.hits.filter((hit) => !hit.inside).sort((a, b) => a.span.start - b.span.start);
    const now = order.findIndex((hit) => picked && sameSpan(hit.span, picked));
    const hit = order[Math.min(Math.max(now + by, 0), order.length - 1)];
    if (!hit) return;
    picked = hit.span;
    spanText.textContent = saying(hit);
    draw();
  }

  // One pointer pans, two pinch.
  const pointers = new Map();
  let wasMoved = false;
  const placeOf = (event) => {
    const { left, top } = canvas.getBoundingClientRect();
    return [event.clientX - left, event.clientY - top];
  };
  canvas.addEventListener("pointerdown", (event) => {
    pointers.set(event.pointerId, placeOf(event));
    canvas.setPointerCapture(event.pointerId);
    wasMoved = false;
  });
  canvas.addEventListener("pointermove", (event) => {
    const [now, before] = [placeOf(event), pointers.get(event.pointerId)];
    if (!data) return;
    if (!before) return point(...now);
    if (Math.abs(now[0] - before[0]) < 3 && !wasMoved) return;
    wasMoved = tip.hidden = true;
    const other = [...pointers].find(([id]) => id !== event.pointerId)?.[1];
    if (other) zoom(Math.abs(before[0] - other[0]) / Math.max(Math.abs(now[0] - other[0]), 10), lanes.tOf(other[0]));
    else pan(lanes.tOf(before[0]) - lanes.tOf(now[0]));
    pointers.set(event.pointerId, now);
  });
  const release = (event) => {
    pointers.delete(event.pointerId);
    if (event.type === "pointerup" && !wasMoved) open(episodeAt(lanes.at(...placeOf(event))));
  };
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("pointerleave", () => (tip.hidden = true));
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.shiftKey && document.activeElement !== canvas) return; // the page scrolls
    event.preventDefault();
    if (event.shiftKey) panBy((event.deltaX || event.deltaY) / 1000);
    else zoom(Math.exp(event.deltaY / 400), lanes.tOf(placeOf(event)[0]));
  }, { passive: false });

  const sizes = new ResizeObserver(draw);
  sizes.observe(box);
  signal.addEventListener("abort", () => sizes.disconnect());
  const key = (name) => [h("kbd", {}, name), " "];
  const zooms = [["−", "Zoom out", 2], ["+", "Zoom in", 0.5]];
  show(place,
    h("div", { class: "bar" }, range,
      h("span", { class: "push segments" }, zooms.map(([sign, name, by]) => button(sign, () => data && zoom(by), { "aria-label": name }))),
      button("Whole run", () => data && whole()), button("Latest", latest)),
    box, more, spanText, note, laneLegend(),
    h("p", {}, soft("Drag to pan. ", key("Ctrl"), "+ wheel zooms (the wheel alone, after a click on the lanes). ",
      ["+", "−", "←", "→"].map(key), "do, too; ", key("0"), "shows the whole run.")));
  await read();

  const follow = soon(() => isFollowing && !signal.aborted && read(), 600);
  const keys = {
    "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1.6), 0: whole, n: () => walk(1), p: () => walk(-1), Escape: back,
    ArrowLeft: () => panBy(-0.2), ArrowRight: () => panBy(0.2),
  };
  return {
    update: (k) => k === run.run && run.is_live && follow(),
    key(event) {
      if (event.key === "Enter" && document.activeElement === canvas && picked?.kind === "episode") open(picked);
      else if (data && keys[event.key]) keys[event.key]();
      else return false;
      return true;
    },
  };
}
