"""Where the endpoint listens, what programs are told, and how it is encrypted; with the errors of wrong settings."""

import logging
import socket
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from certificates import certified
from one_turn import OneTurn
from programs import ASK, saying
from pydantic import ValidationError
from workflow.scripted_answers import TOKENIZER

from arl.api.errors import ConfigError
from arl.api.settings.endpoint import EndpointConfig, entered
from arl.api.settings.run import Config
from arl.endpoint.proxy import OpenAIProxy
from arl.endpoint.sdk_workflow import SDKWorkflow
from arl.rewards import InlineReward
from arl.rollout.workers.pool import EpisodeWorkers
from arl.runtime.http.server import check_endpoint


async def asked(proxy: OpenAIProxy, base_url: str | None = None, tls: ssl.SSLContext | bool = True) -> int:
    """The status of a call, at the URL that the episode has, or at another one."""
    async with proxy.episode(saying("a")) as session, aiohttp.ClientSession() as client:
        url = session.url if base_url is None else f"{base_url}/e/{session.name}"
        headers = {"Authorization": f"Bearer {session.api_key}"}
        async with client.post(f"{url}/v1/chat/completions", json={"messages": ASK}, headers=headers, ssl=tls) as said:
            return said.status


def endpoint(**settings: Any) -> EndpointConfig:
    return EndpointConfig.model_validate(settings)


async def test_by_default_it_is_at_a_free_port_of_loopback() -> None:
    async with OpenAIProxy(TOKENIZER) as one, OpenAIProxy(TOKENIZER) as other:
        assert one.url.startswith("http://127.0.0.1:")
        assert one.url != other.url
        assert await asked(one) == 200


@pytest.mark.parametrize(
    ("host", "url"), [("::1", "http://[::1]:"), ("::", "http://[::1]:"), ("0.0.0.0", "http://127")]
)
async def test_other_addresses_and_ipv6_have_urls_that_work(host: str, url: str) -> None:
    async with OpenAIProxy(TOKENIZER, endpoint=endpoint(host=host)) as proxy:
        assert proxy.url.startswith(url)
        assert await asked(proxy) == 200


async def test_a_port_that_is_taken_is_an_error_that_names_the_setting() -> None:
    async with OpenAIProxy(TOKENIZER) as first:
        taken = endpoint(port=int(first.url.rpartition(":")[2]))
        with pytest.raises(
            ConfigError, match=r"endpoint: cannot listen on 127.0.0.1:\d+: .*choose.*a free endpoint.port"
        ):
            async with OpenAIProxy(TOKENIZER, endpoint=taken):
                pass
        with pytest.raises(ConfigError, match=r"a free endpoint.port"):
            check_endpoint(taken)
    check_endpoint(taken)
    async with OpenAIProxy(TOKENIZER, endpoint=taken) as second:
        assert second.url == first.url
    with pytest.raises(ConfigError, match=r"an endpoint.host of this machine"):
        check_endpoint(endpoint(host="192.0.2.1"))


async def test_programs_get_the_public_url_and_it_leads_to_the_same_paths() -> None:
    public = endpoint(public_url="https://arl.example/train/")
    async with OpenAIProxy(TOKENIZER, endpoint=public) as proxy, proxy.episode(saying("a")) as session:
        assert session.base_url == f"https://arl.example/train/e/{session.name}/v1"


@pytest.mark.parametrize(
    "url", ["arl.example", "ftp://a", "http://", "http://u:p@a", "http://a?b", "http://a b", "http://a:x"]
)
def test_a_public_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValidationError, match=r"public_url is .*; write http\(s\)://HOST"):
        endpoint(public_url=url)


async def test_with_a_certificate_it_speaks_tls_and_nothing_else(tmp_path: Path) -> None:
    certificate, both = certified(tmp_path)
    trusting = ssl.create_default_context(cafile=str(certificate))
    async with OpenAIProxy(TOKENIZER, endpoint=endpoint(certificate=both)) as proxy:
        assert proxy.url.startswith("https://127.0.0.1:")
        assert await asked(proxy, tls=trusting) == 200
        with pytest.raises(aiohttp.ClientError):
            await asked(proxy, proxy.url.replace("https", "http"))
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await asked(proxy)


def test_files_that_are_no_certificate_or_no_key_of_it_are_errors_that_name_them(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    certificate, _ = certified(tmp_path)
    _, locked = certified(tmp_path / "other", password=b"secret")
    for file in (tmp_path / "none.pem", tmp_path / "key.pem", certificate, locked):
        with pytest.raises(ConfigError, match=r"endpoint.certificate: .*\.pem cannot be used"):
            check_endpoint(endpoint(certificate=file))


@pytest.mark.parametrize(
    ("settings", "warns"),
    [({"host": "0.0.0.0"}, True), ({"host": "0.0.0.0", "public_url": "https://arl.example"}, False), ({}, False)],
)
async def test_plain_http_beyond_loopback_is_a_warning(
    settings: dict[str, str], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with OpenAIProxy(TOKENIZER, endpoint=endpoint(**settings)):
        pass
    assert [record for record in caplog.records if "without TLS" in record.message] == caplog.records
    assert bool(caplog.records) == warns


async def says_nothing(base_url: str, api_key: str, data: object) -> str:
    return base_url


def right(answer: str, data: object) -> float:
    return 1.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


async def test_the_settings_of_a_run_reach_the_endpoints_that_its_workflow_opens() -> None:
    port = free_port()
    proxy = OpenAIProxy(TOKENIZER)
    async with entered(SDKWorkflow(says_nothing, InlineReward(right), proxy=proxy), endpoint(port=port)):
        assert proxy.url == f"http://127.0.0.1:{port}"
    async with SDKWorkflow(says_nothing, InlineReward(right), proxy=proxy):
        assert not proxy.url.endswith(f":{port}"), "they are of that run alone"


async def test_settings_that_nothing_takes_are_an_error_and_an_address_of_its_own_prevails() -> None:
    own = OpenAIProxy(TOKENIZER, endpoint=endpoint(host="::1"))
    for workflow in (OneTurn(), SDKWorkflow(says_nothing, InlineReward(right), proxy=own)):
        with pytest.raises(ConfigError, match=r"endpoint.port is set, but \w+ opens no endpoint that takes it"):
            async with entered(workflow, endpoint(port=free_port())):
                pass
        async with entered(workflow, endpoint(lease_s=5)):
            pass
    same = endpoint(host="::1")
    async with entered(SDKWorkflow(says_nothing, InlineReward(right), proxy=own), same):
        assert own.url.startswith("http://[::1]:")


@pytest.mark.runs
async def test_the_endpoint_of_a_worker_process_takes_them_too(tmp_path: Path) -> None:
    """One worker; more cannot share a port."""
    workflow = SDKWorkflow(says_nothing, InlineReward(right), TOKENIZER)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = endpoint(port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match=r"a free endpoint.port"):
            async with EpisodeWorkers(workflow, 1, tmp_path, settings):
                pass


@pytest.mark.parametrize("setting", [{"port": 8000}, {"public_url": "http://a"}])
def test_workers_cannot_share_an_address(setting: dict[str, Any]) -> None:
    config = {"model": "m", "endpoint": setting, "rollout": {"num_workers": 2}}
    with pytest.raises(ValidationError, match=r"each of rollout.num_workers=2 processes has an endpoint of its own"):
        Config.model_validate(config)
    Config.model_validate({**config, "rollout": {"num_workers": 1}})


def test_its_key_is_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARL_ENDPOINT_KEY", "of-the-environment")
    assert EndpointConfig().operator_key == "of-the-environment"
