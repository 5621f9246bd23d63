"""What Prometheus scrapes while a run trains: `log.metrics_address` + /metrics, in OpenMetrics.

A scrape runs on the run's event loop, only reads, and costs one computation a second at most, however many ask.
"""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from aiohttp import web

from arl.api.errors import ConfigError
from arl.api.settings.run import Config, LogConfig
from arl.api.version import install_command
from arl.runtime.http.server import bind, boundary, is_loopback, require_key, serving
from arl.runtime.threads import offload
from arl.training.run_result import disk_use

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from arl.training.trainer import Trainer

_FRESH_S = 1.0
"""How long an answer is given again."""
_SCAN_EVERY_S = 300.0
"""How often the sizes of files are looked at."""
_OPEN_METRICS = "application/openmetrics-text"
_LABELLED = (
    (re.compile(r"reward/(.*)", re.DOTALL), "reward_part", "part"),
    (re.compile(r"episode/(.*)", re.DOTALL), "episode_metric", "metric"),
    (re.compile(r"task/(?P<value>[^/]+)/(?P<rest>.+)", re.DOTALL), "task_", "task"),
    (re.compile(r"(staleness_)(?P<value>[^/]+)/(?P<rest>.+)"), "by_staleness_", "staleness"),
)
"""arl's names with a variable part -> a name, and the label that has the variable part."""
_MOST_SAMPLES = 1000
"""The most samples of one family. Workflows name their metrics, and the event loop builds the answer to a scrape."""
_OUTCOMES = ("trained", "rejected", "dropped", "surplus")
_UNITS = (("_per_s", "_per_second"), ("_s", "_seconds"))

Labels = Mapping[str, str]


@asynccontextmanager
async def metrics_served(config: Config) -> AsyncGenerator[Callable[[Trainer], None]]:
    """Answer scrapes within the block, if log.metrics_address is set. Call what it yields with the run's trainer.

    Raises ConfigError as check_metrics_address does.
    """
    sock = _socket_of(config.log)
    if sock is None:
        yield lambda trainer: None
        return
    scrapes = Scrapes(config)
    shape = boundary(lambda error: {"error": error.message})
    keys = [require_key(config.log.key, open_paths=frozenset())] if config.log.key else []
    app = web.Application(middlewares=[shape, *keys])
    app.router.add_get("/metrics", scrapes.answer)
    async with serving(app, sock):
        yield scrapes.read_from


def check_metrics_address(log: LogConfig) -> None:
    """Raise ConfigError if log.metrics_address is taken, open to other machines without a key, or lacks its package."""
    if sock := _socket_of(log):
        sock.close()


def _socket_of(log: LogConfig) -> socket.socket | None:
    """It listens; the caller closes it. None without an address."""
    if log.metrics_address is None:
        return None
    try:
        import prometheus_client  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError:
        raise ConfigError(
            f"log.metrics_address needs prometheus_client; install it with: {install_command('prometheus')}"
        ) from None
    host, port = log.metrics_host_and_port
    if not log.key and not is_loopback(host):
        raise ConfigError(
            f"log.metrics_address is {log.metrics_address}, open to other machines; set ARL_METRICS_KEY to "
            "the bearer token that Prometheus sends, or listen on 127.0.0.1"
        )
    try:
        return bind(host, port)
    except ConfigError as error:
        raise ConfigError(f"log.metrics_address: {error}; choose a free port") from error


class Scrapes:
    """Answers scrapes with the numbers of one run."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._trainer: Trainer | None = None
        self._began = time.monotonic()
        self._answers: dict[bool, tuple[float, bytes, str]] = {}
        """Whether it is in OpenMetrics -> when it was made, the answer, its content type."""
        self._scan: asyncio.Future[dict[str, int]] | None = None
        self._scanned_at = -_SCAN_EVERY_S
        self._disk: Mapping[str, int] = {}

    def read_from(self, trainer: Trainer) -> None:
        self._trainer = trainer

    async def answer(self, request: web.Request) -> web.Response:
        is_open = _OPEN_METRICS in request.headers.get("Accept", "")
        now = time.monotonic()
        known = self._answers.get(is_open)
        if known is None or now - known[0] >= _FRESH_S:
            from prometheus_client.exposition import choose_encoder

            encode, content_type = choose_encoder(f"{_OPEN_METRICS}; version=1.0.0" if is_open else "")
            known = self._answers[is_open] = now, encode(self), content_type
        return web.Response(body=known[1], headers={"Content-Type": known[2]})

    def collect(self) -> Iterable[Metric]:
        """Every family, as prometheus_client asks a registry for them."""
        families = _Families()
        self._add_run(families)
        if self._trainer:
            _add_step(families, self._trainer)
            _add_live(families, self._trainer)
            _add_evaluations(families, self._trainer)
        about = "Size of each directory in run_dir, and of the files beside them."
        for part, size in self._sizes().items():
            families.gauge("disk_bytes", size, about, part=part)
        return [*families.by_name.values()]

    def _add_run(self, families: _Families) -> None:
        config, trainer = self._config, self._trainer
        about = {
            "model": config.model,
            "run_dir": str(config.run_dir),
            "host": socket.gethostname(),
            "algorithm": config.algorithm.preset,
            "engine": config.engine.kind,
            "batch_size": str(config.rollout.batch_size),
            "group_size": str(config.rollout.group_size),
            "max_staleness": str(config.rollout.max_staleness),
        }
        families.info("run", about, "The run and its settings.")
        families.gauge("steps", config.steps, "Batches to train.")
        since_s = trainer.since_step_s if trainer else None
        families.gauge(
            "since_step_seconds",
            time.monotonic() - self._began if since_s is None else since_s,
            "Since the last step ended; before the first step, since training or the run began.",
        )

    def _sizes(self) -> Mapping[str, int]:
        """The sizes at the last scan. A thread scans in the background, so the first scrapes may have none."""
        now = time.monotonic()
        if self._scan is not None and self._scan.done():
            self._disk, self._scan = self._scan.result(), None
        if self._scan is None and now - self._scanned_at >= _SCAN_EVERY_S:
            self._scanned_at, self._scan = now, offload(disk_use, self._config.run_dir)
        return self._disk


class _Families:
    """Metric families under construction."""

    def __init__(self) -> None:
        self.by_name: dict[str, Any] = {}

    def gauge(self, name: str, value: float, about: str, **labels: str) -> None:
        from prometheus_client.metrics_core import GaugeMetricFamily

        self._add(GaugeMetricFamily, name, value, about, labels)

    def counter(self, name: str, value: float, about: str, **labels: str) -> None:
        """The client appends `_total` to the name."""
        from prometheus_client.metrics_core import CounterMetricFamily

        self._add(CounterMetricFamily, name, value, about, labels)

    def info(self, name: str, values: Labels, about: str) -> None:
        from prometheus_client.metrics_core import InfoMetricFamily

        self.by_name[name] = InfoMetricFamily(f"arl_{name}", about, value=_encodable(values))

    def _add(self, kind: Any, name: str, value: float, about: str, labels: Labels) -> None:
        if name not in self.by_name:
            self.by_name[name] = kind(f"arl_{name}", about, labels=list(labels))
        family = self.by_name[name]
        if len(family.samples) < _MOST_SAMPLES:
            family.add_metric(list(_encodable(labels).values()), value)


def _encodable(labels: Labels) -> dict[str, str]:
    """The name of a directory, or one that a workflow chose, may hold what UTF-8 has no bytes for."""
    return {name: value.encode(errors="backslashreplace").decode() for name, value in labels.items()}


def gauge_name(name: str) -> tuple[str, dict[str, str]]:
    """The name after `arl_`, and the labels, of one of arl's metrics (docs/algorithms.md)."""
    for pattern, family, label in _LABELLED:
        if found := pattern.fullmatch(name):
            groups = found.groupdict()
            return family + _words(groups.get("rest", "")), {label: groups.get("value", found[1])}
    return _words(name), {}


def _words(name: str) -> str:
    words = re.sub(r"[^a-zA-Z0-9]+", "_", name)
    return next((words.removesuffix(end) + unit for end, unit in _UNITS if words.endswith(end)), words)


def _add_step(families: _Families, trainer: Trainer) -> None:
    """The last step's metrics, without those that are live elsewhere."""
    families.gauge("version", trainer.version, "Version of the trainer: the number of batches trained.")
    if trainer.published_version is not None:
        families.gauge("published_version", trainer.published_version, "Version that all serving servers hold.")
    if trainer.last_step is None:
        return
    live = {"version", "weights/version", *trainer.rollout.counters(), *trainer.inference_engine.counters()}
    for name, value in trainer.last_step.metrics.items():
        if name not in live:
            family, labels = gauge_name(name)
            families.gauge(
                family, value, f"The last step's {name.partition('/')[0]}, see docs/algorithms.md.", **labels
            )


def _add_live(families: _Families, trainer: Trainer) -> None:
    """The state of the run at this moment."""
    buffer = trainer.buffer
    about = "Groups by their place in the buffer; taken ones wait for the publication of the weights they trained."
    num_taken = buffer.num_charged - buffer.num_running - buffer.num_finished
    for state, count in (("running", buffer.num_running), ("finished", buffer.num_finished), ("taken", num_taken)):
        families.gauge("groups", count, about, state=state)
    families.gauge("groups_charged", buffer.num_charged, "Groups in the buffer, in all states.")
    families.gauge("groups_capacity", buffer.capacity, "Groups for which the buffer has room.")
    counts = dict(trainer.rollout.counters())
    for outcome in _OUTCOMES:
        families.counter("episodes", counts.pop(f"episodes_{outcome}"), "Episodes by outcome.", outcome=outcome)
    for name, value in counts.items():
        family, labels = gauge_name(name)
        if labels:  # of a task
            families.gauge(family, value, f"{family}, see docs/algorithms.md.", **labels)
        else:
            _add_counter(families, name, value)
    for name, value in trainer.inference_engine.counters().items():
        kind = name.removeprefix("servers/")
        if kind in ("serving", "fenced"):
            families.gauge("servers", value, "Inference servers by state.", state=kind)
        else:
            _add_counter(families, name, value)


def _add_counter(families: _Families, name: str, value: float) -> None:
    """Times are means, or the worst of late: gauges. All other numbers only grow."""
    add = families.gauge if name.endswith("_s") else families.counter
    add(_words(name), value, f"{name}, see docs/algorithms.md.")


def _add_evaluations(families: _Families, trainer: Trainer) -> None:
    if not trainer.evaluations:
        return
    last = trainer.evaluations[max(trainer.evaluations)]
    best = max(evaluation.reward for evaluation in trainer.evaluations.values())
    families.gauge("evaluation_reward", last.reward, "Held-out reward of the last evaluation.")
    families.gauge("evaluation_best_reward", best, "The best held-out reward so far.")
    families.gauge("evaluation_version", last.version, "Version that the last evaluation ran on.")
    families.gauge("evaluation_failed_episodes", last.num_failed, "Failed episodes of the last evaluation.")
