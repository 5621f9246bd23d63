"""Adapters: loaded while the server generates, named by requests, and computed as the model that each makes."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_files import write_adapter
from conformance.conftest import Models
from protocol_client import Client, spans
from reference import Reference

SERVERS = ["embedded", pytest.param("sglang-lora", marks=pytest.mark.sglang)]
pytestmark = pytest.mark.parametrize("server", SERVERS, indirect=True)

PROMPT = torch.randint(256, (40,), generator=torch.Generator().manual_seed(5)).tolist()
SAMPLED = {"max_new_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def references(models: Models, written: Path) -> dict[str | None, Reference]:
    """The reference of each adapter; None is the model alone."""
    return {None: models.a, **{name: Reference(written / f"merged-{name}") for name in ("one", "two")}}


class Shelf:
    """Adapters on the server, under names that no other test has."""

    def __init__(self, client: Client, written: Path) -> None:
        self.client = client
        self.names: dict[str | None, str | None] = {None: None}
        self._written = written

    async def load(self, *directories: str) -> None:
        for directory in directories:
            name = f"{directory}-{uuid.uuid4().hex[:8]}"
            path = str(self._written / directory)
            answer = await self.client.post("/load_lora_adapter", {"lora_name": name, "lora_path": path})
            assert answer.status == 200, answer.body
            assert answer.body["success"]
            assert answer.body["loaded_adapters"][name] == path
            self.names[directory] = name

    async def generate(self, adapter: str | None, prompt: Sequence[int] = PROMPT, **options: Any) -> Any:
        named = {} if adapter is None else {"lora_path": self.names[adapter]}
        body = {"input_ids": list(prompt), "sampling_params": SAMPLED, "return_logprob": True, **named, **options}
        return await self.client.generate(**body)


@pytest.fixture
async def shelf(client: Client, written: Path) -> AsyncIterator[Shelf]:
    shelf = Shelf(client, written)
    yield shelf
    await client.post("/continue_generation")
    for name in shelf.names.values():
        await client.post("/unload_lora_adapter", {"lora_name": name or "none"})


async def test_requests_of_several_adapters_and_of_none_at_once(
    shelf: Shelf, references: dict[str | None, Reference]
) -> None:
    await shelf.load("one", "two")
    names = [None, "one", "two", "one", None, "two"]
    prompts = [[i, *PROMPT[: 20 + i]] for i in range(len(names))]
    answers = await asyncio.gather(*map(shelf.generate, names, prompts))
    for name, prompt, answer in zip(names, prompts, answers, strict=True):
        references[name].check_answer(answer, prompt)
        assert spans(answer) == [("a", 0, 8)]


async def test_prefixes_are_shared_under_one_adapter_alone(
    shelf: Shelf, references: dict[str | None, Reference]
) -> None:
    await shelf.load("one", "two")
    prompt = torch.randint(256, (40,)).tolist()
    cached = []
    for name in ("one", "two", None, "one", "two", None):
        answer = await shelf.generate(name, prompt)
        cached.append(answer["meta_info"]["cached_tokens"])
        references[name].check_answer(answer, prompt)
    assert cached == [0, 0, 0, 39, 39, 39]


async def test_a_request_in_flight_keeps_an_adapter_that_is_unloaded(
    shelf: Shelf, references: dict[str | None, Reference]
) -> None:
    await shelf.load("one")
    sampling = {**SAMPLED, "max_new_tokens": 300}
    running = asyncio.create_task(shelf.generate("one", sampling_params=sampling))
    await shelf.client.until_running(1)
    unloaded = await shelf.client.post("/unload_lora_adapter", {"lora_name": shelf.names["one"]})
    assert (unloaded.status, unloaded.body["success"]) == (200, True)
    assert shelf.names["one"] not in unloaded.body["loaded_adapters"]
    answer = await running
    assert len(answer["output_ids"]) == 300
    references["one"].check_answer(answer, PROMPT)


async def test_adapters_are_loaded_while_the_server_is_paused(
    shelf: Shelf, references: dict[str | None, Reference]
) -> None:
    await shelf.client.post("/pause_generation", {"mode": "in_place"})
    await shelf.load("one")
    waiting = asyncio.create_task(shelf.generate("one"))
    await shelf.client.post("/continue_generation")
    references["one"].check_answer(await waiting, PROMPT)


async def test_weights_from_a_directory_replace_the_model_below_the_adapters(shelf: Shelf, models: Models) -> None:
    await shelf.load("one")
    update = {"model_path": str(models.directory_b), "weight_version": "7"}
    assert (await shelf.client.post("/update_weights_from_disk", update)).body["success"]
    under, alone = await shelf.generate("one"), await shelf.generate(None)
    models.b.check_answer(alone, PROMPT)
    assert spans(under) == [("7", 0, 8)]
    with pytest.raises(AssertionError):
        models.b.check_answer(under, PROMPT)


async def test_loaded_adapters_are_among_the_models_and_other_names_are_refused(shelf: Shelf, written: Path) -> None:
    await shelf.load("one")
    cards = {card["id"]: card for card in (await shelf.client.get("/v1/models")).body["data"]}
    model = next(card for card in cards.values() if card["parent"] is None)
    card = cards[str(shelf.names["one"])]
    assert (card["root"], card["parent"], card["max_model_len"]) == (str(written / "one"), model["id"], None)
    body = {"input_ids": PROMPT, "lora_path": "nobody", "sampling_params": SAMPLED}
    answer = await shelf.client.post("/generate", body)
    assert answer.status == 400
    assert "LoRA adapter" in answer.message
    assert "nobody" in answer.message
    assert str(shelf.names["one"]) in answer.message


async def refusal(client: Client, path: str, **body: Any) -> str:
    answer = await client.post(path, body)
    assert answer.status == 400, answer.body
    assert answer.body["success"] is False
    return answer.body["error_message"]


async def test_what_cannot_be_loaded_or_unloaded_is_refused_and_changes_nothing(
    shelf: Shelf, written: Path, models: Models, tmp_path: Path
) -> None:
    await shelf.load("one")
    taken = await refusal(
        shelf.client, "/load_lora_adapter", lora_name=shelf.names["one"], lora_path=str(written / "two")
    )
    assert taken == f"Failed to load LoRA adapter {shelf.names['one']} because it is already loaded"
    for name, directory in (("x", "/nonexistent"), ("y", str(models.directory_a))):
        assert await refusal(shelf.client, "/load_lora_adapter", lora_name=name, lora_path=directory)
    dora = write_adapter(tmp_path / "dora", models.directory_a, 0, use_dora=True)
    assert "dora" in (await refusal(shelf.client, "/load_lora_adapter", lora_name="z", lora_path=str(dora))).lower()
    loaded = {card["id"] for card in (await shelf.client.get("/v1/models")).body["data"]}
    assert shelf.names["one"] in loaded
    assert not {"x", "y", "z"} & loaded
    said = await refusal(shelf.client, "/unload_lora_adapter", lora_name="nobody")
    assert said.startswith("LoRA with name nobody does not exist")
