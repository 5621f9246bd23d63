"""`arl view` shows the images that a model saw, and no other file."""

from pathlib import Path

import pytest
from made_run import looking_at
from seeing_run import BLUE, PAD, RED, saw, seeing_run
from yarl import URL

from arl.api.images import PlacedImage
from arl.api.types import Trajectory
from arl.observe.view.showing import show


async def test_an_episode_names_its_images_and_their_files_are_served_for_ever(tmp_path: Path) -> None:
    run_dir = seeing_run(tmp_path / "run", saw(RED, BLUE))
    async with looking_at(run_dir) as browser:
        await browser.loaded()
        (trajectory,) = (await browser.get("/api/runs/0/episodes/1/0.0"))["trajectories"]
        assert [(one["digest"], one["width"], one["height"]) for one in trajectory["images"]] == [
            (image.digest, 56, 28) for image in (RED, BLUE)
        ]
        assert [(one["start"], one["stop"]) for one in trajectory["images"]] == [(6, 9), (14, 17)]
        (window,) = (await browser.get("/api/runs/0/episodes/1/0.0?start=0&stop=10"))["trajectories"]
        assert window["images"] == trajectory["images"][:1]
        async with browser.session.get(f"/api/runs/0/images/{RED.digest}") as answer:
            assert (answer.status, answer.content_type, await answer.read()) == (200, "image/png", RED.data)
            assert answer.headers["Cache-Control"] == "private, max-age=31536000, immutable"
            assert answer.headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(
    "name", ["..%2f..%2fsecret", "%2e%2e/secret", "a" * 64, RED.digest.upper(), f"{RED.digest}.png", "%00", "link"]
)
async def test_no_other_file_is_served(tmp_path: Path, name: str) -> None:
    run_dir = seeing_run(tmp_path / "run", saw(RED))
    (tmp_path / "secret").write_text("private")
    (run_dir / "images" / "aa").mkdir()
    (run_dir / "images" / "aa" / f"{'a' * 64}.png").symlink_to(tmp_path / "secret")
    async with (
        looking_at(run_dir) as browser,
        browser.session.get(URL(f"{browser.address}/api/runs/0/images/{name}", encoded=True)) as answer,
    ):
        assert answer.status == 404
        assert "private" not in await answer.text()


async def test_images_need_the_key_and_a_page_of_this_server(tmp_path: Path) -> None:
    run_dir, path = seeing_run(tmp_path / "run", saw(RED)), f"/api/runs/0/images/{RED.digest}"
    async with looking_at(run_dir, api_key="secret") as browser:
        await browser.get(path, 401)
    async with looking_at(run_dir) as browser:
        await browser.get(path, 403, **{"Sec-Fetch-Site": "cross-site"})


async def test_a_missing_image_is_named(tmp_path: Path) -> None:
    run_dir = seeing_run(tmp_path / "run", saw(RED))
    (path,) = (run_dir / "images").glob("*/*")
    path.unlink()
    async with looking_at(run_dir) as browser:
        told = await browser.get(f"/api/runs/0/images/{RED.digest}", 404)
    assert f"the image {RED.digest} is missing" in told["error"]


async def test_trajectories_that_saw_different_images_branch_where_the_first_differs(tmp_path: Path) -> None:
    run_dir = seeing_run(tmp_path / "run", saw(RED, RED), saw(RED, BLUE))
    async with looking_at(run_dir) as browser:
        await browser.loaded()
        told = await browser.get("/api/runs/0/episodes/1/0.0")
    assert [one["differs_at"] for one in told["branches"]] == [14]


def test_a_notebook_shows_a_mark_for_an_image_and_counts_it_as_one_token() -> None:
    seen = saw(*[RED] * 100)
    html = show([seen])._repr_html_()
    assert "[image 56x28, 3 tokens]" in html
    assert f"id {PAD}" in html
    lots = Trajectory(
        token_ids=[PAD] * 5000 + [5, 6],
        loss_mask=[0] * 5001 + [1],
        behavior_logprobs=[0.0] * 5002,
        versions=[-1] * 5001 + [0],
        reward=0.0,
        images=(PlacedImage(image=RED, start=0, stop=5000),),
    )
    html = show(lots)._repr_html_()
    assert html.count("<span") == 1 + 2 + 1, "the image, two tokens, and the legend"
    assert "more tokens" not in html
