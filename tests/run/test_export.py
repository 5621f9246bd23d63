"""`arl export`: the weights of any checkpoint as a Hugging Face directory, here or on a hub."""

import base64
import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from saved_run import SMALL, contents, write_run

from arl.__main__ import main
from arl.api.settings.engines import LoRAConfig
from arl.api.settings.run import Config
from arl.engine.tiny import write_tiny_model
from arl.training.checkpoints import FORMAT
from arl.training.run_dir import record_start


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "model"
    write_tiny_model(directory, shape=SMALL)
    return directory


@pytest.fixture(scope="module")
def run_dir(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("run") / "run"
    write_run(run_dir, model)
    return run_dir


def export(*argv: str | Path) -> int:
    try:
        main(["export", *map(str, argv)])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_the_newest_checkpoint_or_a_named_one_is_written(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(run_dir) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"version 2 of {run_dir}, ")
    assert said.endswith(f" MB: {run_dir}/exported/version-00000002\n")
    assert contents(run_dir / "exported" / "version-00000002") == contents(run_dir / "written 2")
    assert export(run_dir, "--version", "1", "--out", tmp_path / "one") == 0
    assert contents(tmp_path / "one") == contents(run_dir / "written 1") != contents(run_dir / "written 2")
    needed = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert needed <= contents(tmp_path / "one").keys()


def test_adapters_are_merged_or_written_alone(
    model: Path, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "run", model, lora=LoRAConfig(rank=2))
    assert export(tmp_path / "run") == 0
    assert contents(tmp_path / "run/exported/version-00000002") == contents(tmp_path / "run/written 2")
    assert export(tmp_path / "run", "--adapter") == 0
    assert contents(tmp_path / "run/exported/version-00000002-adapter").keys() == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    assert export(run_dir, "--adapter", "--out", tmp_path / "none") == 2
    assert "has no adapters: the run trained the whole model" in capsys.readouterr().err


def test_what_cannot_be_exported_is_refused_with_what_to_do(
    model: Path, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(code: int, *argv: str | Path) -> str:
        assert export(*argv) == code
        return capsys.readouterr().err

    assert "no-run is not a directory; name the run_dir" in refused(2, tmp_path / "no-run")
    assert "has no checkpoint; name the run_dir" in refused(2, tmp_path)
    assert "has no checkpoint of version 9, only of 1, 2: " in refused(2, run_dir, "--version", "9")
    (tmp_path / "there").mkdir()
    assert "there is there already; remove it" in refused(2, run_dir, "--out", tmp_path / "there")
    assert "--public needs --push" in refused(2, run_dir, "--public")
    other = write_tiny_model(tmp_path / "other", shape=SMALL, seed=1)
    assert "is not the model that" in refused(2, run_dir, "--model", other, "--out", tmp_path / "x")
    assert "cannot write /dev/full/x on " in refused(1, run_dir, "--out", "/dev/full/x")
    shutil.copytree(run_dir / "checkpoints", tmp_path / "old" / "checkpoints")
    state = tmp_path / "old/checkpoints/version-00000002/state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"format": 99}))
    newer = f"has format 99, and this arl reads {FORMAT}; export it with the arl that wrote it"
    assert newer in refused(1, tmp_path / "old")
    (state.parent / "engine" / "progress.json").unlink()
    state.write_text(json.dumps(json.loads(state.read_text()) | {"format": FORMAT}))
    assert "is not a train engine's checkpoint" in refused(1, tmp_path / "old")
    assert not (tmp_path / "old" / "exported").exists()


def test_a_model_that_was_named_relative_to_where_the_run_began_is_found_and_a_moved_one_can_be_named(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    began, run_dir = tmp_path / "began", tmp_path / "run"
    shutil.copytree(model, began / "models" / "of" / "mine")
    monkeypatch.chdir(began)
    write_run(run_dir, "models/of/mine")
    record_start(Config(model="models/of/mine", run_dir=run_dir), 1)
    monkeypatch.chdir(tmp_path)
    assert export(run_dir, "--out", "here") == 0
    (began / "models" / "of" / "mine").rename(tmp_path / "moved")
    assert export(run_dir, "--out", "elsewhere") == 1
    assert "if the model of the run was moved, --model names it" in capsys.readouterr().err
    assert export(run_dir, "--out", "elsewhere", "--model", "moved") == 0
    assert contents(tmp_path / "elsewhere") == contents(tmp_path / "here")


class Hub(ThreadingHTTPServer):
    """Speaks as much of the hub's API as an upload of small files asks for. asked: path and body of each request."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.asked: list[tuple[str, str]] = []
        self.token = "Bearer right"

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def files(self) -> dict[str, bytes]:
        (body,) = [body for path, body in self.asked if "/commit/" in path]
        lines = [json.loads(line) for line in body.splitlines()]
        values = [line["value"] for line in lines if line["key"] == "file"]
        return {value["path"]: base64.b64decode(value["content"]) for value in values}


class _Answers(BaseHTTPRequestHandler):
    server: Hub  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        self.server.asked.append((self.path, body))
        if self.headers.get("Authorization") != self.server.token:
            self._answer({"error": "Invalid credentials"}, 401)
        elif self.path == "/api/repos/create":
            self._answer({"url": f"{self.server.address}/me/adder", "name": "me/adder"})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            modes = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]
            self._answer({"files": modes})
        else:
            url = f"{self.server.address}/me/adder/commit/{'a' * 40}"
            self._answer({"success": True, "commitOid": "a" * 40, "commitUrl": url})

    def do_GET(self) -> None:
        self.server.asked.append((self.path, ""))
        self._answer({"error": "not here"}, 404)

    def _answer(self, content: dict[str, Any], status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object, **__: object) -> None: ...


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as hub:
        serving = threading.Thread(target=hub.serve_forever)
        serving.start()
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.address)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", "right")
        yield hub
        hub.shutdown()
        serving.join()


def test_a_push_uploads_what_an_export_writes_into_a_private_repository(
    hub: Hub, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(run_dir, "--push", "me/adder") == 0
    assert capsys.readouterr().out.endswith(f": {hub.address}/me/adder\n")
    created = [json.loads(body) for path, body in hub.asked if path == "/api/repos/create"]
    assert [(made["name"], made["visibility"]) for made in created] == [("adder", "private")]
    written = contents(run_dir / "written 2")
    assert {name: data for name, data in hub.files().items() if name in written} == written
    assert export(run_dir, "--push", "me/adder", "--public", "--out", tmp_path / "kept") == 0
    assert json.loads([body for path, body in hub.asked if path == "/api/repos/create"][-1])["visibility"] == "public"
    assert contents(tmp_path / "kept") == written


def test_a_push_that_fails_says_why_and_what_it_needs(
    hub: Hub, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(run_dir, "--push", "me/adder/of/mine") == 2
    hub.token = "Bearer another"
    assert export(run_dir, "--push", "me/adder") == 1
    said = capsys.readouterr().err
    assert f"cannot push to me/adder at {hub.address}: " in said
    assert "401" in said
    assert "a token with write access is needed" in said
