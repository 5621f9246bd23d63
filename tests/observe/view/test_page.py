"""The page of `arl view` in a real browser, over the real server.

ARL_NEEDS_BROWSER makes a missing browser an error.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from browsed_run import BRANCHED, GROUPS, HOSTILE_EPISODE, LONG, MEMBERS, STEP_S, BrowsedRun, browsed_run
from chromium import chromium
from made_run import looking_at
from playwright.async_api import Browser, ConsoleMessage, Page, Route, async_playwright, expect
from seeing_run import BLUE, RED, saw, seeing_run

from arl.observe.events.run_record import read_run
from arl.observe.view.viewed_run import Ending

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]
STEPS = 12
PHONE = {"width": 360, "height": 740}
VIEWS = ("run", "episodes", "group/0/1/1", f"episode/0/1/{BRANCHED}?colour=version", "health")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    path = chromium()
    expect.set_options(timeout=30_000)
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        await browser.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def run(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[BrowsedRun]:
    with browsed_run(tmp_path_factory.mktemp("runs") / "adder") as run:
        run.train(STEPS)
        assert run.flush()
        yield run


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def address(run: BrowsedRun, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """Of the server of `run`, and of a shorter run with other settings."""
    other = tmp_path_factory.mktemp("runs") / "shorter"
    with browsed_run(other, seed=7) as shorter:
        shorter.train(3)
    async with looking_at(run.run_dir, other) as server:
        yield f"{server.session._base_url}/"


@asynccontextmanager
async def opened(browser: Browser, address: str, but: str = "") -> AsyncIterator[Page]:
    """A new page in which nothing may go wrong that nobody sees, `but` this: no error of a script, no request to
    elsewhere."""
    page = await browser.new_page(viewport={"width": 1360, "height": 900})
    page.set_default_timeout(30_000)
    wrong: list[str] = []

    def hear(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not (but and but in message.text):
            wrong.append(message.text)

    page.on("console", hear)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: request.url.startswith(address) or wrong.append(request.url))
    yield page
    await page.close()
    assert wrong == []


@pytest_asyncio.fixture(loop_scope="module")
async def page(browser: Browser, address: str) -> AsyncIterator[Page]:
    async with opened(browser, address) as page:
        yield page


async def show(page: Page, address: str, view: str) -> None:
    """Open a view, and wait until it shows something."""
    await page.goto("about:blank")
    await page.goto(f"{address}#/{view}")
    await page.locator('main[aria-busy="false"]').wait_for()


async def points(page: Page, chart: str) -> list[list[Any]]:
    """Its x values, and the y values of each line."""
    await page.locator(f'[data-chart="{chart}"] canvas').wait_for()
    return await page.evaluate("name => document.querySelector(`[data-chart='${name}'] .plot`).uplot.data", chart)


async def num_colours(page: Page, canvas: str) -> int:
    """How many colours are on it."""
    return await page.evaluate(
        """selector => {
            const canvas = document.querySelector(selector);
            const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
            return new Set(new Uint32Array(pixels.buffer)).size;
        }""",
        canvas,
    )


async def test_charts_have_a_point_for_each_step_and_each_evaluation(page: Page, address: str, run: BrowsedRun) -> None:
    await show(page, address, "run?runs=0")
    steps, reward, held_out = await points(page, "reward")
    assert [s for s, y in zip(steps, reward, strict=True) if y is not None] == list(range(1, run.version + 1))
    assert held_out[0] == 0.25
    assert [s for s, y in zip(steps, held_out, strict=True) if y is not None] == list(range(0, run.version + 1, 4))
    for name in ("staleness", "throughput", "waiting", "loss", "entropy", "kl", "ess", "clip", "length"):
        assert len((await points(page, name))[0]) == run.version
    assert await num_colours(page, '[data-chart="reward"] canvas') > 3
    await page.locator('[data-chart="staleness-0"] canvas').wait_for()  # once the event log has been read
    assert await num_colours(page, '[data-chart="staleness-0"] canvas') > 3
    await page.get_by_role("button", name="time", exact=True).click()
    assert (await points(page, "loss"))[0] == [STEP_S * s for s in range(1, run.version + 1)]
    await page.get_by_label("Add a chart").select_option("my/metric")
    assert (await points(page, "my/metric"))[1] == [7.0] * run.version
    assert "x=time" in page.url
    assert "more=my%2Fmetric" in page.url


async def test_settings_that_come_while_the_log_is_read_are_shown(page: Page, address: str) -> None:
    async def as_unread(route: Route) -> None:
        answer = await route.fetch()
        runs = [{**run, "settings": {}, "version": 0} for run in await answer.json()]
        await route.fulfill(response=answer, json=runs)

    await page.route("**/api/runs", as_unread, times=1)
    await show(page, address, "run")
    await expect(page.locator("#differences tbody tr")).to_have_text("seednull7")


async def test_several_runs_share_the_axes_and_their_settings_are_compared(page: Page, address: str) -> None:
    await show(page, address, "run")
    lines = (await points(page, "loss"))[1:]
    assert sorted(sum(y is not None for y in line) for line in lines) == [3, STEPS]
    await expect(page.locator("#differences tbody tr")).to_have_count(1)
    await expect(page.locator("#differences tbody tr")).to_have_text("seednull7")
    await page.get_by_role("button", name="shorter").click()
    await expect(page.locator("#differences")).to_have_count(0)
    assert len(await points(page, "loss")) == 2


async def test_filters_and_a_search_leave_what_the_log_holds(page: Page, address: str, run: BrowsedRun) -> None:
    await show(page, address, "episodes")
    await expect(page.locator("#matched")).to_contain_text(f"1 to 100 of {run.num_episodes}")
    await page.get_by_label("Ended: any").select_option("failed")
    await expect(page.locator("#matched")).to_contain_text(f"1 to {run.num_failed} of {run.num_failed} ")
    assert set(await page.locator("#episodes tbody td:nth-child(5)").all_inner_texts()) == {"failed"}
    await page.get_by_role("button", name="Clear").click()
    await expect(page.locator("#matched")).to_contain_text(f"1 to 100 of {run.num_episodes}")
    await page.get_by_label("Step from").fill("2")
    await page.get_by_label("Step to").fill("2")
    await expect(page.locator("#matched")).to_contain_text(f" of {GROUPS * MEMBERS} ")
    await page.get_by_role("button", name="Clear").click()
    await expect(page.locator("#matched")).to_contain_text(f"1 to 100 of {run.num_episodes}")
    await page.get_by_label("Search texts").fill("onerror")
    await expect(page.locator("#episodes tbody tr")).to_have_count(1)
    assert await page.locator("#episodes tbody tr").get_attribute("data-episode") == f"1/{HOSTILE_EPISODE}"
    await page.reload()
    await expect(page.locator("#episodes tbody tr")).to_have_count(1)


async def test_a_run_of_tasks_shows_each_episodes_task_and_one_task_alone(browser: Browser, tmp_path: Path) -> None:
    with browsed_run(tmp_path / "tasks", tasks=["low", "<b>high"]) as tasks:
        tasks.train(2)
    async with looking_at(tmp_path / "tasks") as server, opened(browser, f"{server.session._base_url}/") as page:
        await show(page, f"{server.session._base_url}/", "episodes")
        await expect(page.locator("#matched")).to_contain_text(f" of {tasks.num_episodes}")
        heads = await page.locator("#episodes thead th").all_inner_texts()
        column = page.locator(f"#episodes tbody td:nth-child({heads.index('Task') + 1})")
        assert set(await column.all_inner_texts()) == {"low", "<b>high"}
        await page.get_by_label("Task: any").select_option("<b>high")
        await expect(page.locator("#matched")).to_contain_text(f" of {tasks.num_episodes // 2} ")
        assert set(await column.all_inner_texts()) == {"<b>high"}


async def test_columns_sort_and_pages_turn(page: Page, address: str, run: BrowsedRun) -> None:
    await show(page, address, "episodes")
    await page.get_by_role("button", name="Tokens").click()
    await expect(page.locator("#episodes tbody tr").first).to_have_attribute("data-episode", f"1/{LONG}")
    await expect(page.locator("th[aria-sort=descending]")).to_have_text("Tokens ↓")
    await page.get_by_role("button", name="Next \u203a").click()
    await expect(page.locator("#matched")).to_contain_text(f"101 to {run.num_episodes} of")


async def test_the_table_fits_1280_pixels_whatever_the_errors_say(page: Page, address: str) -> None:
    await page.set_viewport_size({"width": 1280, "height": 800})
    await show(page, address, "episodes?how=failed")
    await page.locator("#episodes td.text span").first.evaluate(
        "cell => (cell.textContent = 'much to say '.repeat(99))"
    )
    assert await page.locator(".sheet").evaluate("sheet => sheet.scrollWidth - sheet.clientWidth") == 0
    assert await page.locator("#episodes td.text").first.evaluate("cell => cell.clientWidth") > 100


async def test_the_keyboard_alone_leads_to_an_episode_and_back(page: Page, address: str) -> None:
    await show(page, address, "episodes")
    await page.keyboard.press("/")
    async with page.expect_response(lambda answer: "text=What+is+3+%2B+1&" in answer.url):
        await page.keyboard.type("What is 3 + 1")
    await expect(page.locator("#episodes tbody tr")).to_have_count(MEMBERS)
    await page.keyboard.press("Escape")
    await page.keyboard.press("j")
    await page.keyboard.press("j")
    name = await page.evaluate("document.activeElement.dataset.episode")
    assert name == await page.locator("#episodes tbody tr").nth(1).get_attribute("data-episode")
    assert await page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    await page.keyboard.press("Enter")
    await expect(page.locator("h1")).to_have_text(f"Episode {name.partition('/')[2]}")
    await page.keyboard.press("g")
    await expect(page.locator("h1")).to_have_text("Group 3")
    await page.keyboard.press("Escape")
    await expect(page.locator("#episodes tbody tr")).to_have_count(MEMBERS)


async def test_skipping_to_the_content_stays_in_the_view(page: Page, address: str) -> None:
    await show(page, address, "health")
    await page.keyboard.press("Tab")
    await page.keyboard.press("Enter")
    assert await page.evaluate("document.activeElement.id") == "main"
    assert page.url.endswith("#/health")
    await expect(page.locator("h1")).to_contain_text("Health")


async def test_the_numbers_of_a_token_are_the_logs(page: Page, address: str, run: BrowsedRun) -> None:
    record = read_run(run.run_dir)
    (tokens,) = record.tokens(record.episode(1, "4.1"))
    columns = tokens.columns
    await show(page, address, "episode/0/1/4.1?colour=current-behavior")
    for k in (0, *np.flatnonzero(columns["loss_mask"])[[0, 3, -1]]):
        await page.locator(f"#t0-{k}").hover()
        cells = 'Array.from(document.querySelectorAll(".numbers dd .num"), (cell) => cell.title || cell.textContent)'
        names = await page.locator(".numbers dt").all_inner_texts()
        values = await page.evaluate(cells)
        shown = {name: float(value) for name, value in zip(names, values, strict=True)}
        assert (shown["index"], shown["id"]) == (k, columns["token_ids"][k])
        if not columns["loss_mask"][k]:
            assert set(shown) == {"index", "id"}
            continue
        assert (shown["version"], shown["staleness"]) == (columns["versions"][k], 1 - columns["versions"][k])
        wanted = {"behavior logprob": "behavior_logprobs", "proximal logprob": "proximal_logprobs"}
        wanted |= {"current logprob": "current_logprobs", "advantage": "advantages", "entropy": "entropy"}
        for name, column in wanted.items():
            assert shown[name] == pytest.approx(columns[column][k], rel=1e-4), name
        difference = columns["current_logprobs"][k] - columns["behavior_logprobs"][k]
        assert shown["current \u2212 behavior logprob"] == pytest.approx(difference, rel=1e-3)


async def test_tokens_are_walked_by_arrows_and_coloured_by_each_number(page: Page, address: str) -> None:
    await show(page, address, "episode/0/1/4.1")
    texts = page.locator('[role="listbox"]')
    await texts.nth(1).focus()
    await page.keyboard.press("ArrowRight")
    selected = page.locator('.t[aria-selected="true"]')
    await expect(selected).to_have_count(1)
    assert await texts.nth(1).get_attribute("aria-activedescendant") == await selected.get_attribute("id")
    assert await texts.nth(1).inner_text() == "<add>"
    names = await page.locator("#colour option").all_inner_texts()
    assert {"sampled or given", "version", "staleness", "behavior logprob", "advantage", "clipped"} <= set(names)
    assert {"proximal \u2212 behavior logprob", "current \u2212 proximal logprob"} <= set(names)
    for name in names[1:]:
        await page.get_by_label("Colour by").select_option(name)
        await expect(page.locator(".legend")).not_to_be_empty()
        assert await page.locator(".t.toned").count() >= len("<add>")


async def test_what_an_episode_says_stays_text(page: Page, address: str) -> None:
    await show(page, address, f"episode/0/1/{HOSTILE_EPISODE}")
    said = page.locator(".turn.sampled .tokens").last
    await expect(said).to_contain_text('It is <img src=x onerror="window.hacked = 1"><b>42</b>\u20391B\u203a[31m')
    await expect(said).to_contain_text("\u2039202E\u203a")
    await show(page, address, "group/0/1/1")
    await expect(page.locator(".card .text").nth(1)).to_contain_text("<b>42</b>\u20391B\u203a[31m\u2039202E\u203a")
    await expect(page.locator(".card .text").nth(3)).to_have_text("no <i>tool</i> 1")
    assert await page.locator("main img, main b:not(.head b), main i").count() == 0
    assert await page.evaluate("window.hacked") is None


async def test_an_episode_shows_its_example_its_expected_answer_and_the_parts_of_its_reward(
    page: Page, address: str
) -> None:
    await show(page, address, "episode/0/1/0.1")
    example = page.locator("details.card")
    await expect(example.locator("dt")).to_have_text(["question", "answerexpected"])
    await expect(example.locator("dd")).to_have_text(["What is 0 + 1?", "1"])
    await expect(page.locator("aside dl.pairs")).to_contain_text("is_right1")


async def test_a_long_episode_comes_in_windows(page: Page, address: str) -> None:
    await show(page, address, f"episode/0/1/{LONG}")
    await page.get_by_role("button", name="more tokens").click()
    await expect(page.locator(".t")).to_have_count(4000)
    await page.locator("#more").click()
    await expect(page.locator("#more")).to_have_count(0)
    await expect(page.locator(".turn.sampled")).to_have_count(2)


async def test_a_running_episode_shows_its_tokens_once_they_come(browser: Browser, tmp_path: Path) -> None:
    with browsed_run(tmp_path / "run") as run:
        run.begin("0.0")
        async with looking_at(run.run_dir) as server:
            while not await server.names():
                pass
            address = f"{server.session._base_url}/"
            async with opened(browser, address) as page:
                await show(page, address, "episode/0/1/0.0")
                await expect(page.locator("main")).to_contain_text("still runs")
                run.train()
                await expect(page.locator(".turn.sampled")).to_have_count(2)


async def test_the_choice_of_colours_is_remembered(page: Page, address: str) -> None:
    await show(page, address, "episode/0/1/4.1")
    await expect(page.get_by_label("Colour by")).to_have_value("sampled")
    await page.get_by_label("Colour by").select_option("advantage")
    await show(page, address, "episode/0/1/4.2")
    await expect(page.get_by_label("Colour by")).to_have_value("advantages")


async def test_branches_are_a_tree(page: Page, address: str) -> None:
    await show(page, address, f"episode/0/1/{BRANCHED}")
    tree = page.get_by_role("navigation", name="Trajectories")
    await expect(tree.locator("li li")).to_have_count(2)
    await tree.get_by_role("link", name="agent 2").click()
    await expect(page.locator(".turn.sampled .tokens").last).to_contain_text("Branch 2")
    assert "trajectory=2" in page.url


async def test_health_counts_failures_by_cause(page: Page, address: str, run: BrowsedRun) -> None:
    await show(page, address, "health")
    cells = page.locator("table", has_text="ToolError").locator("tbody tr").first.locator("td")
    assert await cells.nth(0).inner_text() == "ToolError"
    assert await cells.nth(2).inner_text() == str(run.num_failed)
    await cells.nth(5).get_by_role("link").click()
    await expect(page.locator("main .error")).to_contain_text("ToolError: no <i>tool</i>")


async def test_it_fits_a_phone_and_the_dark(page: Page, address: str) -> None:
    await page.set_viewport_size(PHONE)
    await page.emulate_media(color_scheme="dark")
    for view in VIEWS:
        await show(page, address, view)
        assert await page.evaluate("document.documentElement.scrollWidth") == PHONE["width"], view
        assert await page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"


async def test_errors_are_the_servers_sentences(browser: Browser, address: str) -> None:
    async with opened(browser, address, but="404") as page:
        await page.goto(f"{address}#/episode/0/1/999.9")
        sentence = (await (await page.request.get(f"{address}api/runs/0/episodes/1/999.9")).json())["error"]
        await expect(page.get_by_role("alert")).to_have_text(sentence)
        assert "999.9" in sentence


async def test_a_lost_connection_is_told_until_it_is_back(browser: Browser, address: str) -> None:
    async with opened(browser, address, but="ERR_FAILED") as page:
        await page.route("**/stream", lambda route: route.abort())
        await show(page, address, "health")
        await expect(page.locator("#live")).to_have_text("connection lost, trying again")
        await page.unroute_all()
        await expect(page.locator("#live")).to_have_text("live")


async def test_a_key_is_asked_for_and_leaves_the_address(browser: Browser, run: BrowsedRun) -> None:
    async with looking_at(run.run_dir, api_key="open sesame") as server:
        address = f"{server.session._base_url}/"
        async with opened(browser, address, but="401") as page:
            await page.goto(address)
            await page.get_by_label("The key").fill("open sesame")
            await page.get_by_role("button", name="Open").click()
            await page.locator('[data-chart="loss"] canvas').wait_for()
        async with opened(browser, address) as page:
            await page.goto(f"{address}#key=open%20sesame")
            await page.locator('[data-chart="loss"] canvas').wait_for()
            assert "sesame" not in page.url


async def test_a_page_that_was_open_says_how_the_run_ended(browser: Browser, tmp_path: Path) -> None:
    ending = Ending("running", "", "")
    with browsed_run(tmp_path / "run") as run:
        run.train(2)
        async with looking_at(run.run_dir, ending_of=lambda _: ending) as server:
            address = f"{server.session._base_url}/"
            async with opened(browser, address) as page:
                await show(page, address, "run")
                facts = page.locator("main dl").first
                await expect(facts).to_contain_text("running")
                await expect(facts).to_contain_text(f"Groups{2 * GROUPS}")
                run.train()
                ending = Ending("failed", "the disk is full", "free some space")
                await expect(facts).to_contain_text("Statefailed")
                await expect(facts).to_contain_text(f"Groups{3 * GROUPS}")
                await expect(page.locator("main")).to_contain_text("the disk is full free some space")


async def test_a_live_run_grows_without_a_reload(page: Page, address: str, run: BrowsedRun) -> None:
    await show(page, address, "run?runs=0")
    before = run.version
    assert len((await points(page, "loss"))[0]) == before
    run.train(2)
    grown = "n => document.querySelector(`[data-chart='loss'] .plot`).uplot.data[0].length === n"
    await page.wait_for_function(grown, arg=before + 2)
    heat = "n => document.querySelector(`[data-chart='staleness-0'] .plot`).uplot.data[0].length === n"
    await page.wait_for_function(heat, arg=before + 2)
    zoom = "document.querySelector(`[data-chart='loss'] .plot`).uplot"
    await page.evaluate(f"{zoom}.setScale('x', {{ min: 2, max: 5 }})")
    run.train()
    await page.wait_for_function(grown, arg=before + 3)
    assert await page.evaluate(f"[{zoom}.scales.x.min, {zoom}.scales.x.max]") == [2, 5]
    await show(page, address, "episodes")
    count = page.locator("#matched")
    await expect(count).to_contain_text(f"of {run.num_episodes}")
    run.train()
    await expect(count).to_contain_text(f"of {run.num_episodes}")
    await show(page, address, "health")
    failures = page.locator("table", has_text="ToolError").locator("tbody td:nth-child(3)").first
    await expect(failures).to_have_text(str(run.num_failed))
    run.train()
    await expect(failures).to_have_text(str(run.num_failed))


async def test_an_image_is_seen_in_the_place_of_its_placeholders(browser: Browser, tmp_path: Path) -> None:
    run_dir = seeing_run(tmp_path / "run", saw(RED, BLUE))
    async with looking_at(run_dir) as server, opened(browser, f"{server.session._base_url}/") as page:
        await show(page, f"{server.session._base_url}/", "episode/0/1/0.0")
        prompt = page.get_by_role("listbox", name="given")
        pictures = prompt.get_by_role("img")
        await expect(pictures).to_have_count(2)
        for number in range(2):
            await expect(pictures.nth(number)).to_have_js_property("naturalWidth", 56)
            await expect(pictures.nth(number)).to_have_js_property("naturalHeight", 28)
        await expect(prompt).to_have_text("Look: image 56x28, 3 tokens and image 56x28, 3 tokens and ")
        await pictures.nth(1).hover()
        await expect(page.locator(".numbers")).to_contain_text("index14")


async def test_with_a_key_images_are_seen_too(browser: Browser, tmp_path: Path) -> None:
    run_dir = seeing_run(tmp_path / "run", saw(RED))
    async with looking_at(run_dir, api_key="secret") as server:
        address = f"{server.session._base_url}/"
        async with opened(browser, address) as page:
            await page.goto(f"{address}#/episode/0/1/0.0&key=secret")
            await expect(page.locator(".tokens img")).to_have_js_property("naturalWidth", 56)


async def test_an_image_that_is_gone_is_a_sentence_in_its_place(browser: Browser, tmp_path: Path) -> None:
    run_dir = seeing_run(tmp_path / "run", saw(RED))
    next((run_dir / "images").glob("*/*")).unlink()
    async with looking_at(run_dir) as server:
        address = f"{server.session._base_url}/"
        async with opened(browser, address, but="404") as page:
            await show(page, address, "episode/0/1/0.0")
            await expect(page.get_by_role("listbox", name="given")).to_contain_text("is missing from")
