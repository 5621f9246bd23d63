"""Take the pictures of `arl view` in docs/healthy.md and docs/viewing.md, from runs that are there.

    python scripts/pictures.py runs/health runs/quickstart

The first directory holds the runs of examples/health, the second is a run of `make quickstart`. `make health` trains
what is not there yet, and calls this. It needs Chromium (`make browser`).
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, FloatRect, Page, ViewportSize, sync_playwright

from arl import read_run

CHARTS: Mapping[str, Sequence[str]] = {
    "healthy": ("reward", "entropy", "ess", "equal_groups"),
    "hacking": ("reward", "episode/exact", "length", "truncated"),
    "collapse": ("reward", "entropy", "equal_groups", "grad_norm"),
    "stale": ("reward", "staleness", "kl", "ess"),
    "starved": ("reward", "equal_groups", "grad_norm", "entropy"),
    "template": ("reward", "truncated", "length", "equal_groups"),
}
"""The charts that tell about each run of examples/health, by the page's names for them."""
ADDED = ("equal_groups", "episode/exact", "truncated", "grad_norm")
"""Those that the page shows only if it is asked to."""
WIDE, TALL, PHONE = (ViewportSize(width=w, height=h) for w, h in ((1120, 760), (1120, 1240), (360, 740)))
SHOW_ONLY = """names => {
    for (const chart of document.querySelectorAll("[data-chart]"))
        if (!names.includes(chart.dataset.chart)) chart.style.display = "none";
}"""
COLOURS = 48
"""Of a picture's palette."""


def pictures_of_health(browser: Browser, runs: Path, place: Path) -> None:
    """Of each run: its charts, beside those of the healthy one, and its findings."""
    for name, charts in CHARTS.items():
        with page_of(browser, [runs / name, *([] if name == "healthy" else [runs / "healthy"])]) as page:
            more = [chart for chart in charts if chart in ADDED]
            show(page, f"run?more={','.join(more)}")
            page.evaluate(SHOW_ONLY, list(charts))
            page.wait_for_timeout(500)
            save(page.locator(".charts").screenshot(), place / f"{name}.png")
            show(page, "health?run=0")
            save(page.screenshot(clip=findings(page)), place / f"{name}-findings.png")


def findings(page: Page) -> FloatRect:
    """Where the findings are, with the page's title."""
    first, last = page.locator("h1").bounding_box(), page.locator(".finding").last.bounding_box()
    assert first
    assert last
    return FloatRect(x=0, y=first["y"] - 8, width=WIDE["width"], height=last["y"] + last["height"] - first["y"] + 16)


def pictures_of_views(browser: Browser, run_dir: Path, place: Path) -> None:
    """Of each view of a run: wide, and some of them on a phone and in the dark."""
    episode = telling_episode(run_dir)
    with page_of(browser, [run_dir]) as page:
        for name, view in {
            "run": "run",
            "episodes": "episodes?sort=staleness&descending=1",
            "staleness": f"episode/{episode}?colour=staleness",
            "weight": f"episode/{episode}?colour=weights",
            "health": "health",
        }.items():
            page.set_viewport_size(TALL if view.startswith("episode/") else WIDE)
            show(page, view)
            save(page.screenshot(), place / f"{name}.png")
        page.set_viewport_size(WIDE)
        page.emulate_media(color_scheme="dark")
        show(page, "run")
        save(page.screenshot(), place / "dark.png")
        page.set_viewport_size(PHONE)
        show(page, f"episode/{episode}?colour=advantages")
        save(page.screenshot(), place / "phone.png")


def telling_episode(run_dir: Path) -> str:
    """The address RUN/LIFE/EPISODE of an early episode of several turns and versions that did better than others."""
    record = read_run(run_dir)
    better = (
        e
        for group in record.groups
        for e in group.episodes
        if min(p.reward or 0 for p in group.episodes) < (e.reward or 0)
    )
    one = next(e for e in better if e.num_turns >= 3 and (e.newest or 0) > (e.oldest or 0))
    return f"0/{one.life}/{one.episode}"


@contextmanager
def page_of(browser: Browser, runs: Sequence[Path]) -> Iterator[Page]:
    """The page of `arl view` with these runs, which are read."""
    command = [sys.executable, "-u", "-m", "arl", "view", "--port", "0", *map(str, runs)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout
            address = next(found[0] for line in server.stdout if (found := re.search(r"http://\S+", line)))
            page = browser.new_page(viewport=WIDE, base_url=address)
            while not all(is_read(run) for run in page.request.get("api/runs").json()):
                page.wait_for_timeout(100)
            yield page
            page.close()
        finally:
            server.terminate()
            server.wait()


def is_read(run: Mapping[str, Any]) -> bool:
    return run["loading"]["total"] > 0 and run["loading"]["done"] >= run["loading"]["total"]


def show(page: Page, view: str) -> None:
    page.goto("about:blank")
    page.goto(f"#/{view}")
    page.locator('main[aria-busy="false"]').wait_for()
    page.wait_for_timeout(500)  # until its canvases are drawn


def save(picture: bytes, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.open(io.BytesIO(picture)).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    health, quickstart = map(Path, sys.argv[1:])
    docs = Path(__file__).parents[1] / "docs"
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        pictures_of_health(browser, health, docs / "health")
        pictures_of_views(browser, quickstart, docs / "viewing")
        browser.close()
