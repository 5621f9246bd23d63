"""Who may read what `arl view` shows."""

from pathlib import Path

import pytest
from made_run import began, life, looking_at
from yarl import URL

from arl.__main__ import main
from arl.observe.view import view_server


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    life(tmp_path, [began()])
    return tmp_path


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8722", "[::1]:9", "localhost:1"])
async def test_a_request_that_names_this_machine_is_answered(run_dir: Path, host: str) -> None:
    async with looking_at(run_dir) as browser:
        await browser.get("/api/runs", Host=host)


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8722", "127.0.0.1.evil.example", "10.0.0.1", "[", "", "localhost.evil"]
)
async def test_a_name_that_somebody_points_here_is_refused(run_dir: Path, host: str) -> None:
    async with looking_at(run_dir) as browser:
        for path in ("/api/runs", "/api/runs/0/stream", "/"):
            told = await browser.get(path, 403, Host=host)
            assert "address that arl view printed" in told["error"]


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
async def test_another_site_may_not_read_the_api(run_dir: Path, site: str) -> None:
    async with looking_at(run_dir) as browser:
        await browser.get("/api/runs", 403, **{"Sec-Fetch-Site": site})
        await browser.get("/api/runs", **{"Sec-Fetch-Site": "same-origin"})


async def test_every_answer_forbids_foreign_scripts_frames_and_guessed_types(run_dir: Path) -> None:
    async with looking_at(run_dir) as browser:
        for path in ("/", "/api/runs", "/api/runs/0/stream", "/api/none", "/none"):
            async with browser.session.get(path) as answer:
                policy = answer.headers["Content-Security-Policy"]
                assert "default-src 'self'" in policy
                assert "frame-ancestors 'none'" in policy
                assert "unsafe" not in policy
                assert answer.headers["X-Content-Type-Options"] == "nosniff"
                assert "Access-Control-Allow-Origin" not in answer.headers


async def test_only_reading_is_possible(run_dir: Path) -> None:
    async with looking_at(run_dir) as browser:
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            async with browser.session.request(method, "/api/runs") as answer:
                assert answer.status == 405


async def test_with_a_key_the_api_answers_to_it_alone_whatever_the_address(run_dir: Path) -> None:
    async with looking_at(run_dir, api_key="secret") as browser:
        for path in ("/api/runs", "/api/runs/0/stream", "/api/none"):
            await browser.get(path, 401)
            await browser.get(path, 401, Authorization="Bearer wrong")
        await browser.get("/api/runs", Authorization="Bearer secret", Host="server.example")


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    page = tmp_path / "page"
    (page / "inner").mkdir(parents=True)
    (page / "index.html").write_text("<!doctype html>")
    (page / "inner" / "code.js").write_text("1")
    (tmp_path / "secret.txt").write_text("secret")
    monkeypatch.setattr(view_server, "PAGE", page)
    return page


async def test_the_files_of_the_page_are_served_with_their_types(run_dir: Path, page: Path) -> None:
    async with looking_at(run_dir, api_key="secret") as browser:
        for path, kind in (("/", "text/html"), ("/inner/code.js", "/javascript")):
            async with browser.session.get(path) as answer:
                assert answer.status == 200
                assert answer.content_type.endswith(kind)


@pytest.mark.parametrize(
    "path",
    ["/../secret.txt", "/%2e%2e/secret.txt", "/..%2fsecret.txt", "//etc/passwd", "/%00", "/inner", "/none", "/link"],
)
async def test_no_file_beside_the_page_is_served(run_dir: Path, page: Path, path: str) -> None:
    (page / "link").symlink_to(page.parent / "secret.txt")
    async with (
        looking_at(run_dir) as browser,
        browser.session.get(URL(f"{browser.address}{path}", encoded=True)) as answer,
    ):
        assert answer.status in (400, 404)
        assert "secret" not in await answer.text()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--host", "0.0.0.0"], "open to other machines"),
        (["--port", "70000"], "--port is 70000"),
        (["--api-key-file", "none"], "cannot be read"),
    ],
)
def test_a_wrong_address_or_key_is_a_sentence(
    run_dir: Path, arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["view", str(run_dir), *arguments])
    assert end.value.code == 2
    assert sentence in capsys.readouterr().err
