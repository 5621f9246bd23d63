"""Programs on another host play episodes: over TLS, at the address by which they reach the endpoint."""

import sys
from pathlib import Path

import pytest
from certificates import certified
from nodes import Cluster, ClusterError

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(200)]

AGENTS = Path(__file__).parents[2] / "examples" / "agents"
KEY = "an-operators-key-of-32-characters"
SERVES = """
import asyncio
import sys

from arl import ScriptedEngine, ServedWorkflow, tiny_tokenizer
from arl.api.settings.endpoint import EndpointConfig, entered


async def main() -> None:
    address = {"host": "0.0.0.0", "port": 8443, "certificate": sys.argv[1]}
    tokenizer = tiny_tokenizer()
    workflow = ServedWorkflow(tokenizer)
    async with entered(workflow, EndpointConfig.model_validate(address)):
        for number in range(3):
            engine = ScriptedEngine.saying(tokenizer, "3")
            (trajectory,) = await workflow.arun_episode(engine, {"question": "1 + 2 = ?", "answer": "3"})
            print(number, trajectory.reward, flush=True)


asyncio.run(main())
"""


def test_a_program_on_another_host_plays_episodes_until_the_run_is_over(tmp_path: Path) -> None:
    certificate, both = certified(tmp_path, "node-1")
    (tmp_path / "serves.py").write_text(SERVES)
    (tmp_path / "played.py").write_text((AGENTS / "served_program.py").read_text())
    play = [sys.executable, tmp_path / "played.py", "https://node-1:8443"]
    operator = {"ARL_ENDPOINT_KEY": KEY}
    with Cluster(2, shared=tmp_path) as cluster:
        here, there = cluster.nodes
        serving = [sys.executable, tmp_path / "serves.py", both]
        running = here.start(serving, log=tmp_path / "log", env=operator)
        said = there.run(play, env={**operator, "SSL_CERT_FILE": str(certificate)}, timeout_s=120)
        assert said == "the run is over; this program played 3 episodes\n"
        assert running.wait(60) == 0
    assert (tmp_path / "log").read_text() == "0 1.0\n1 1.0\n2 1.0\n"


def test_a_host_that_does_not_know_the_certificate_gets_nothing(tmp_path: Path) -> None:
    certificate, both = certified(tmp_path, "node-1")
    (tmp_path / "serves.py").write_text(SERVES)
    url = "https://node-1:8443/episodes"
    with Cluster(2, shared=tmp_path) as cluster:
        here, there = cluster.nodes
        serving = [sys.executable, tmp_path / "serves.py", both]
        here.start(serving, log=tmp_path / "log", env={"ARL_ENDPOINT_KEY": KEY})
        waiting = ["curl", "--silent", "--retry", "60", "--retry-connrefused", "--retry-delay", "1", url]
        with pytest.raises(ClusterError, match="ended with 60"):  # curl's code for a certificate
            there.run(waiting, timeout_s=100)
        assert "send the operator's key" in there.run([*waiting, "--cacert", certificate], timeout_s=60)
