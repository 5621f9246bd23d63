"""Opens what `arl doctor` examines: the servers of a configuration, and a train engine whose weights may move."""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
import tempfile
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from arl.api.errors import ArlError, ConfigError, ServerError
from arl.api.routed_experts import Routes, Routing
from arl.api.settings.engines import (
    DEFAULT_CONTEXT_LENGTH,
    AdapterWeightsConfig,
    LocalEngineConfig,
    RunningServersConfig,
)
from arl.api.settings.run import Config
from arl.api.train_engine import TrainEngine
from arl.api.types import SamplingParams, new_id
from arl.api.workflow import RolloutWorkflow
from arl.engine.client.remote_engine import client_class
from arl.engine.client.server_client import GenerateCall, Greeting, ServerClient, greet
from arl.engine.client.sglang_client import SGLangClient
from arl.engine.model_files import load_tokenizer, served_model
from arl.run.engines import weight_transport
from arl.run.learner import load_train_engine
from arl.run.servers import connect, open_servers
from arl.runtime.http.client import Connections
from arl.runtime.threads import TrainThread, offload
from arl.training.run_dir import LOCK, holder_of, is_locked, make_run_dir

if TYPE_CHECKING:
    from arl.observe.doctor.causes import Checked
    from arl.observe.doctor.examination import Examination
    from arl.observe.doctor.trainer_probe import Sampled
    from arl.observe.doctor.visit import Subject

ResultT = TypeVar("ResultT")

log = logging.getLogger(__name__)

_NOT_OURS = "arl did not start these servers; --publish loads weights into them, and their own again afterwards"


@asynccontextmanager
async def opened_examination(
    config: Config, workflow: RolloutWorkflow, *, publish: bool, on_check: Callable[[Checked], object]
) -> AsyncGenerator[Examination]:
    """Start the servers and a train engine as a run would, or connect to given servers. Trains no run.

    publish: also load weights into servers that somebody else started. Raises ConfigError, ModelError, ServerError,
    TrainingError.
    """
    from arl.observe.doctor.examination import Examination
    from arl.observe.doctor.trainer_probe import PROBE_OPTIMIZER, TrainerProbe

    if config.policies:
        raise ConfigError("arl doctor examines servers of one policy, and `policies` is set; leave it out")
    are_given = isinstance(config.engine, RunningServersConfig)
    may_publish = publish or not are_given
    if publish and is_locked(lock := config.run_dir / LOCK):
        raise ConfigError(
            f"--publish would load weights into servers of a run that trains in {config.run_dir}: {holder_of(lock)}; "
            "leave it out, or wait for the run's end"
        )
    await offload(make_run_dir, config.run_dir)
    async with AsyncExitStack() as stack:
        scratch = await offload(lambda: Path(tempfile.mkdtemp(prefix="doctor-", dir=config.run_dir)).absolute())
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        opened = await open_servers(config, stack, config.run_dir / "logs" / "doctor")
        if opened.files is not None:  # a run may train in the same run_dir
            opened = replace(opened, files=replace(opened.files, run_dir=None))
        inference = await stack.enter_async_context(await connect(config, opened))
        connections = Connections()
        stack.push_async_callback(connections.aclose)
        probes: list[ServerProbe] = []
        for address in opened.addresses:
            client = client_class(config.engine)(connections, address.rstrip("/"), opened.api_key)
            greeting = await greet(client, sets_going=False)
            probes.append(ServerProbe(client, greeting, config.engine.request_timeout_s))
            if may_publish and are_given and not isinstance(config.weights, AdapterWeightsConfig):
                stack.push_async_callback(_given_back, client, await _own_model(client, greeting), greeting.label)
        thread = TrainThread()
        stack.callback(thread.close)
        train = config.train.model_copy(update={"optimizer": PROBE_OPTIMIZER})
        engine = await thread(partial(load_train_engine, config.model, train, seed=config.seed))
        stack.push_async_callback(thread, engine.close)
        transport = await thread(weight_transport, config, engine, opened, scratch)
        stack.callback(transport.close)

        async def publish_weights() -> str | None:
            update = await thread(transport.snapshot, engine)
            await transport.deliver(update, inference)
            return update.adapter

        yield Examination(
            servers=probes,
            trainer=TrainerProbe(engine, thread),
            subject=await offload(_subject, config, workflow, engine),
            publish=publish_weights if may_publish else None,
            why_not=_NOT_OURS,
            on_check=on_check,
        )


class ServerProbe:
    """A server of any kind, as the doctor asks it: by the client of its kind, without cached prefixes."""

    def __init__(self, client: ServerClient, greeting: Greeting, timeout_s: float) -> None:
        self.address = client.address
        self.context_length: int | None = greeting.traits.get("context length")
        self.num_late = greeting.num_late
        self._client = client
        self._timeout_s = timeout_s

    async def tokens_of(self, text: str) -> list[int] | None:
        return await self._tokens({"prompt": text})

    async def rendered(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any] | None
    ) -> list[int] | None:
        body = {"messages": list(messages), "add_generation_prompt": True}
        return await self._tokens({**body, "chat_template_kwargs": dict(options)} if options else body)

    async def _tokens(self, body: dict[str, Any]) -> list[int] | None:
        try:
            return (await self._client.look_up("tokenize", {**body, "add_special_tokens": False})).get("tokens")
        except ServerError:  # it has no tokenizer, or no chat template
            return None

    async def score(self, token_ids: Sequence[int], adapter: str | None = None) -> Sequence[float]:
        return await self._in_time(self._client.score(token_ids, adapter))

    async def sample(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        adapter: str | None = None,
        wants_kept_ids: bool = False,
        routing: Routing | None = None,
    ) -> Sampled:
        from arl.observe.doctor.trainer_probe import Sampled

        if wants_kept_ids:
            self._client.check_kept_ids(sampling)
        call = GenerateCall(
            rid=f"arl-doctor-{(name := new_id())}",
            input_ids=np.array(prompt_ids, np.int32),
            num_continued=0,
            sampling=sampling,
            max_new_tokens=sampling.max_new_tokens,
            cache_key=name,
            adapter=adapter,
            wants_kept_ids=wants_kept_ids,
            routes_from=None if routing is None else 0,
        )
        answer = await self._in_time(self._client.generate(call))
        labels = [answer.label] * len(answer.output_ids)
        for label, start, stop in answer.spans:
            labels[start:stop] = [label] * (min(stop, len(labels)) - start)
        routes = None
        if routing is not None and answer.experts is not None:
            shape = len(prompt_ids) + len(answer.output_ids) - 1, routing.num_layers, routing.experts_per_token
            if answer.experts.size != math.prod(shape):
                said = f"{self.address} returned routes of {answer.experts.size} numbers; they must be {shape}"
                raise ServerError(said)
            routes = Routes.joined([Routes.of(answer.experts.reshape(shape).astype(routing.dtype)), 1])
        return Sampled(
            prompt_ids=prompt_ids,
            output_ids=answer.output_ids,
            logprobs=np.array(answer.output_logprobs, np.float64),
            labels=labels,
            temperature=sampling.logprob_temperature,
            kept_ids=answer.kept_ids,
            routes=routes,
        )

    async def _in_time(self, call: Coroutine[Any, Any, ResultT]) -> ResultT:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await call
        except TimeoutError:
            raise ServerError(f"{self.address} gave no answer within {self._timeout_s:g} s") from None


async def _own_model(client: ServerClient, greeting: Greeting) -> Path:
    """The directory of the weights that the server was started with. Raises ConfigError if it holds a run's."""
    if greeting.label.isdecimal():
        raise ConfigError(
            f"{client.address} holds version {greeting.label} of a run; --publish needs servers with the weights that "
            "they were started with, to give them back: start it again"
        )
    cards = (await client.look_up("v1/models")).get("data") or [{}]  # vLLM names the path there
    return Path((await client.look_up("model_info")).get("model_path") or cards[0].get("root") or "")


async def _given_back(client: ServerClient, model: Path, label: str) -> None:
    """Load the weights that the server was started with, under their label."""
    body = {"model_path": str(model), "weight_version": label, "flush_cache": True}
    try:
        if isinstance(client, SGLangClient):
            await client.call("POST", "/update_weights_from_disk", body)
        else:
            await client.load_directory(model, version=0, flush_cache=True)
            await client.call("POST", "/update_weight_version", {"new_version": label})
    except ArlError as error:
        log.warning("%s did not take its own weights back; start it again: %s", client.address, error)


def _subject(config: Config, workflow: RolloutWorkflow, engine: TrainEngine) -> Subject:
    from transformers import AutoConfig

    from arl.observe.doctor.visit import Subject

    stored_as = str(getattr(AutoConfig.from_pretrained(config.model), "dtype", None))
    # By the settings: what a server that somebody else started says of itself is no excuse for a difference.
    serves_exactly = not isinstance(config.engine, LocalEngineConfig) or config.engine.dtype == "float32"
    tokenizer: Any = load_tokenizer(config.model)
    of_workflow: Any = getattr(workflow, "tokenizer", None) or tokenizer
    options: Mapping[str, Any] | None = getattr(workflow, "template_options", None)
    sampling = getattr(workflow, "sampling", None)
    is_local = isinstance(config.engine, LocalEngineConfig)
    limit = engine.limits.context_length

    def render(messages: Sequence[Mapping[str, Any]]) -> list[int]:
        text = of_workflow.apply_chat_template(
            [*messages], add_generation_prompt=True, tokenize=False, **(options or {})
        )
        return of_workflow.encode(text, add_special_tokens=False)

    of_local = min(n for n in (getattr(config.engine, "context_length", None), limit, DEFAULT_CONTEXT_LENGTH) if n)
    return Subject(
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
        special_tokens=sorted(tokenizer.get_added_vocab()),
        render=render if getattr(of_workflow, "chat_template", None) else None,
        template_options=options,
        sampling=sampling if isinstance(sampling, SamplingParams) else None,
        model_context=limit,
        context_length=of_local if is_local else None,
        is_exact=config.train.dtype == "float32" and stored_as in ("torch.float32", "None") and serves_exactly,
        replays_truncation=config.engine.replay_truncation,
        routing=served_model(config.model, replay_routing=config.engine.replay_routing).routing,
        adapters=isinstance(config.weights, AdapterWeightsConfig),
    )
