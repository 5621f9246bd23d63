// Who did what when: the lanes of a run, which one zooms, pans and walks through.

import { button, clock, empty, failed, h, key, number, seconds, show, soft, soon, visible } from "./dom.js";
import { Lanes, laneLegend, sameSpan } from "./lanes.js";
import { get } from "./server.js";

const LEAST_S = 0.002;
const ABOUT = "Lanes of the run over time. Arrows pan, plus and minus zoom, n and p walk through the spans, Enter opens an episode.";

export async function timeView({ place, query, run, go, back, setQuery, signal }) {
  let [data, isFollowing, picked, asked] = [null, !query.to, null, 0];
  const canvas = h("canvas", { tabindex: "0", role: "application", "aria-label": ABOUT, "aria-describedby": "span" });
  const lanes = new Lanes(canvas);
  [lanes.from, lanes.to] = [Number(query.from), Number(query.to)];
  const spanText = h("div", { id: "span", class: "soft", "aria-live": "polite" }, "Point at a span, or walk with n and p.");
  const note = h("div");
  const range = h("span", { class: "soft num" });

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
  const readSoon = soon(() => !signal.aborted && read(), 120);

  function draw() {
    if (!data) return;
    lanes.draw(data, picked);
    range.textContent = `${clock(lanes.from)} to ${clock(lanes.to)} (${seconds(lanes.to - lanes.from)})`;
  }

  function move(from, to) {
    if (!data || to - from < LEAST_S) return;
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

  function say({ span, lane, inside }) {
    const parts = span.kind === "episode"
      ? [`Episode ${span.episode}: ${span.how}`, span.reward !== null && `reward ${number(span.reward)}`, span.step && `step ${span.step}`]
      : [`${inside ? `Episode ${inside.episode}` : lane.name}: ${span.label || span.kind}`, span.failure];
    spanText.textContent = [visible(parts.filter(Boolean).join(", ")), seconds(span.stop - span.start), `from ${seconds(span.start - data.began)}`].join(", ");
  }
  const open = (one) => (one?.episode ? go("episode", [run.run, one.life, one.episode]) : false);

  function point(hit) {
    canvas.style.cursor = hit?.lane.kind === "episodes" ? "pointer" : "grab";
    if (hit) say(hit);
  }

  function walk(by) {
    const order = lanes.hits.filter((hit) => !hit.inside).sort((a, b) => a.span.start - b.span.start);
    const now = order.findIndex((hit) => picked && sameSpan(hit.span, picked));
    const hit = order[Math.min(Math.max(now + by, 0), order.length - 1)];
    if (!hit) return;
    picked = hit.span;
    say(hit);
    draw();
  }

  // One pointer pans, two pinch; a press without a move opens.
  const pointers = new Map();
  let wasMoved = false;
  const on = (name, action) => canvas.addEventListener(name, (event) => {
    const { left, top } = canvas.getBoundingClientRect();
    action(event, [event.clientX - left, event.clientY - top]);
  }, { passive: false });
  on("pointerdown", (event, now) => {
    pointers.set(event.pointerId, now);
    canvas.setPointerCapture(event.pointerId);
    wasMoved = false;
  });
  on("pointermove", (event, now) => {
    const before = pointers.get(event.pointerId);
    if (!before) return point(lanes.at(...now));
    if (Math.abs(now[0] - before[0]) < 3 && !wasMoved) return;
    wasMoved = true;
    const other = [...pointers].find(([id]) => id !== event.pointerId)?.[1];
    if (other) zoom(Math.abs(before[0] - other[0]) / Math.max(Math.abs(now[0] - other[0]), 10), lanes.tOf(other[0]));
    else pan(lanes.tOf(before[0]) - lanes.tOf(now[0]));
    pointers.set(event.pointerId, now);
  });
  on("pointercancel", (event) => pointers.delete(event.pointerId));
  on("pointerup", (event, now) => {
    pointers.delete(event.pointerId);
    const hit = lanes.at(...now);
    if (!wasMoved) open(hit?.inside ?? hit?.span);
  });
  on("wheel", (event, [x]) => {
    if (!event.ctrlKey && document.activeElement !== canvas) return; // the page scrolls
    event.preventDefault();
    zoom(Math.exp(event.deltaY / 400), lanes.tOf(x));
  });

  const sizes = new ResizeObserver(draw);
  const box = h("div", { class: "lanes" }, canvas);
  sizes.observe(box);
  signal.addEventListener("abort", () => sizes.disconnect());
  show(place,
    h("div", { class: "bar pinned" }, range,
      h("span", { class: "push segments" }, button("−", () => zoom(2), { "aria-label": "Zoom out" }), button("+", () => zoom(0.5), { "aria-label": "Zoom in" })),
      button("Whole run", () => data && whole()), button("Latest", latest), spanText),
    box, note, laneLegend(),
    h("p", {}, soft("Drag to pan. ", key("Ctrl"), "+ wheel zooms (the wheel alone, after a click on the lanes). ",
      ["+", "−", "←", "→"].map(key), "do, too; ", key("0"), "shows the whole run.")));
  await read();
  return {
    update: async () => isFollowing && read(),
    keys: {
      "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1.6), 0: whole, n: () => walk(1), p: () => walk(-1), Escape: back,
      ArrowLeft: () => panBy(-0.2), ArrowRight: () => panBy(0.2), Enter: () => document.activeElement === canvas && open(picked),
    },
  };
}
