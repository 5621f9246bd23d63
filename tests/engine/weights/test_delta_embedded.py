"""From a real trainer over mirrors to embedded servers: what is served is the full export, to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from loaders import contents
from mirrors import MirrorProcess
from published import EmbeddedServer, client, request, trainee, write_model

from arl.api.config import DeltaWeightsConfig
from arl.engine.weights.delta import DeltaTransport


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[MirrorProcess]:
    mirror = MirrorProcess(tmp_path / "mirror")
    yield mirror
    mirror.kill()


@pytest.fixture
def transport(tmp_path: Path, mirror: MirrorProcess, first: EmbeddedServer) -> Iterator[DeltaTransport]:
    config = DeltaWeightsConfig(mirrors={first.address: mirror.address}, directory=tmp_path / "weights")
    transport = DeltaTransport(config, tmp_path)
    yield transport
    transport.close()


async def test_after_each_publish_servers_and_mirror_hold_the_full_export(
    transport: DeltaTransport, mirror: MirrorProcess, first: EmbeddedServer, tmp_path: Path
):
    sent: list[int] = []
    model = write_model(tmp_path / "model", dtype=torch.bfloat16)
    with trainee(model, tmp_path) as trainer:
        async with client(first) as engine:
            for version in range(3):
                update = transport.snapshot(trainer.engine)
                await transport.deliver(update, engine)
                response = await engine.agenerate(request(30))
                assert set(response.output_versions) == {version}
                if version:
                    trainer.assert_of_its_versions(response)
                trainer.engine.export(tmp_path / "export")
                (held,) = mirror.directory.glob(f"version-{version}-*")
                assert contents(held) == contents(tmp_path / "export")
                sent.append(update.num_bytes)
                trainer.train()
    assert mirror.versions == [1, 2]
    assert all(0 < later <= sent[0] / 2 for later in sent[1:])
