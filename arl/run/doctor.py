"""Opens what `arl doctor` examines: the servers of a configuration, and a train engine whose weights may move."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arl.api.errors import ArlError, ConfigError
from arl.api.settings.engines import (
    DEFAULT_CONTEXT_LENGTH,
    AdapterWeightsConfig,
    LocalEngineConfig,
    RunningServersConfig,
)
from arl.api.settings.run import Config
from arl.api.train_engine import TrainEngine
from arl.api.types import SamplingParams
from arl.api.workflow import RolloutWorkflow
from arl.engine.model_files import end_token_ids, load_tokenizer, served_model
from arl.run.engines import weight_transport
from arl.run.learner import load_train_engine
from arl.run.servers import connect, open_servers
from arl.runtime.http.client import JsonClient
from arl.runtime.threads import TrainThread, offload
from arl.training.run_dir import LOCK, holder_of, is_locked, make_run_dir

if TYPE_CHECKING:
    from arl.observe.doctor.checked import Checked
    from arl.observe.doctor.examination import Examination
    from arl.observe.doctor.server_probe import ServerFacts, ServerProbe
    from arl.observe.doctor.visit import Subject

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
    from arl.observe.doctor.server_probe import ServerProbe
    from arl.observe.doctor.trainer_probe import PROBE_OPTIMIZER, TrainerProbe

    if config.policies:
        raise ConfigError("arl doctor examines servers of one policy, and `policies` is set; leave it out")
    if config.engine.protocol == "vllm":
        raise ConfigError(
            f"arl doctor asks embedded and SGLang servers, and engine.kind is {config.engine.kind}; a run compares "
            "vLLM's logprobs with the trainer's itself (engine.check_weights, docs/servers.md)"
        )
    may_publish = publish or not isinstance(config.engine, RunningServersConfig)
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
        probes: list[ServerProbe] = []
        for address in opened.addresses:
            client = JsonClient(address, api_key=opened.api_key, timeout_s=config.engine.request_timeout_s)
            stack.push_async_callback(client.aclose)
            probes.append(ServerProbe(address.rstrip("/"), client))
        if may_publish and isinstance(config.engine, RunningServersConfig):
            for probe in probes:
                stack.push_async_callback(_given_back, probe, await _own(probe), config)
        thread = TrainThread()
        stack.callback(thread.close)
        train = config.train.model_copy(update={"optimizer": PROBE_OPTIMIZER})
        engine = await thread(partial(load_train_engine, config.model, train, seed=config.seed))
        stack.push_async_callback(thread, engine.close)
        transport = await thread(weight_transport, config, engine, opened, scratch)
        stack.callback(transport.close)

        async def load() -> str | None:
            update = await thread(transport.snapshot, engine)
            await transport.deliver(update, inference)
            return update.adapter

        yield Examination(
            servers=probes,
            trainer=TrainerProbe(engine, thread),
            subject=await offload(_subject, config, workflow, engine),
            publish=load if may_publish else None,
            why_not=_NOT_OURS,
            scratch=scratch,
            on_check=on_check,
        )


async def _own(server: ServerProbe) -> ServerFacts:
    facts = await server.facts()
    if facts.label.isdecimal():
        raise ConfigError(
            f"{server.address} holds version {facts.label} of a run; --publish needs servers with the weights that "
            "they were started with, to give them back: start it again"
        )
    return facts


async def _given_back(server: ServerProbe, own: ServerFacts, config: Config) -> None:
    """Load the weights that the server was started with, under their label."""
    if isinstance(config.weights, AdapterWeightsConfig):
        return
    try:
        await server.load_directory(own.model_path, own.label)
    except ArlError as error:
        log.warning("%s did not take its own weights back; start it again: %s", server.address, error)


def _subject(config: Config, workflow: RolloutWorkflow, engine: TrainEngine) -> Subject:
    from transformers import AutoConfig

    from arl.observe.doctor.visit import Subject

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

    stored_as = str(getattr(AutoConfig.from_pretrained(config.model), "dtype", None))
    # By the settings: what a server that somebody else started says of itself is no excuse for a difference.
    serves_exactly = not isinstance(config.engine, LocalEngineConfig) or config.engine.dtype == "float32"
    of_local = min(n for n in (getattr(config.engine, "context_length", None), limit, DEFAULT_CONTEXT_LENGTH) if n)
    return Subject(
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
        decode=lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False),
        special_tokens=sorted(tokenizer.get_added_vocab()),
        render=render if getattr(of_workflow, "chat_template", None) else None,
        template_options=options,
        sampling=sampling if isinstance(sampling, SamplingParams) else None,
        end_token_ids=end_token_ids(config.model),
        model_context=limit,
        context_length=of_local if is_local else None,
        is_exact=config.train.dtype == "float32" and stored_as in ("torch.float32", "None") and serves_exactly,
        replays_truncation=config.engine.replay_truncation,
        routing=served_model(config.model, replay_routing=config.engine.replay_routing).routing,
        adapters=isinstance(config.weights, AdapterWeightsConfig),
        shards=[config.train.num_ranks],
    )
