"""The promises of docs/security.md that no other test holds; its table names the others."""

import os
from pathlib import Path

import aiohttp
import pytest

from arl.api.config import Config
from arl.api.engine_config import DeltaWeightsConfig, LocalEngineConfig, SGLangEngineConfig, SGLangProcessesConfig
from arl.api.errors import ConfigError
from arl.api.types import ModelRequest, SamplingParams
from arl.assembly import serve
from arl.cli import load_config
from arl.engine.tiny import TinyShape, write_tiny_model
from arl.web.process import key_of

SHAPE = TinyShape(hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=2, context_length=64)


def children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def seen_of(pid: int, name: str) -> list[bytes]:
    """The environment of a process, which its user may read, or its command line, which everybody may."""
    return Path(f"/proc/{pid}/{name}").read_bytes().split(b"\0")


async def test_servers_that_arl_starts_take_a_key_that_no_other_user_can_read(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", shape=SHAPE, seed=0)
    before = set(children())
    async with serve(
        Config(model=str(model), run_dir=tmp_path / "run", engine=LocalEngineConfig(num_servers=1))
    ) as engine:
        (server,) = set(children()) - before
        environment = dict(one.split(b"=", 1) for one in seen_of(server, "environ") if one)
        key = environment[b"ARL_SERVER_API_KEY"]
        command = seen_of(server, "cmdline")
        port = int(command[command.index(b"--port") + 1])
        assert key not in b" ".join(command)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            async with session.get("/model_info") as refused:
                assert refused.status == 401
            async with session.get("/model_info", headers={"Authorization": f"Bearer {key.decode()}"}) as answer:
                assert answer.status == 200
        response = await engine.agenerate(ModelRequest(input_ids=[1], sampling=SamplingParams(max_new_tokens=1)))
        assert len(response.output_ids) == 1
    written = [path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert written
    assert not [content for content in written if key in content]


@pytest.mark.parametrize("flag", ["--engine.api_key", "--weights.api_key=secret"])
def test_no_key_is_taken_from_the_command_line(flag: str) -> None:
    with pytest.raises(ConfigError, match=r"api_key on the command line shows the key to every user") as refused:
        load_config(Config, ["--model", "m", flag, "secret"])
    assert "secret" not in str(refused.value)
    with pytest.raises(ValueError, match="arguments has an API key"):
        SGLangProcessesConfig(arguments=("--api-key=secret",))


def test_keys_in_settings_show_in_no_text_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SGLangEngineConfig.model_validate({"addresses": ["http://a:1"], "api_key": "secret"})
    weights = DeltaWeightsConfig.model_validate({"mirrors": {"http://a:1": "http://m:1"}, "api_key": "secret"})
    assert (engine.key, weights.key) == ("secret", "secret")
    config = Config(model="m", engine=engine, weights=weights)
    assert not [
        text
        for text in (repr(config), str(config), config.model_dump_json(), str(config.model_dump()))
        if "secret" in text
    ]
    monkeypatch.setenv("ARL_SERVER_API_KEY", "servers")
    monkeypatch.setenv("ARL_MIRROR_API_KEY", "mirrors")
    assert SGLangEngineConfig(addresses=("http://a:1",)).key == "servers"
    assert DeltaWeightsConfig(mirrors={"http://a:1": "http://m:1"}).key == "mirrors"


def test_a_key_file_holds_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANY_KEY", "of-the-environment")
    file = tmp_path / "key"
    assert key_of(None, "ANY_KEY") == "of-the-environment"
    for content in (b"", b"a\nb", b"\xff", "é".encode()):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match="--api-key-file is"):
            key_of(file, "ANY_KEY")
    file.write_text("secret\n")
    assert key_of(file, "ANY_KEY") == "secret"
