"""`arl serve`: train a script's experiment with programs that arl does not start."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from arl.api.errors import ConfigError
from arl.api.settings.endpoint import ENDPOINT_KEY
from arl.api.settings.run import Config
from arl.cli.command import OTHER_FLAGS, parse, parser_of, run_command
from arl.run.experiment import Experiment, Setup
from arl.run.script import CONTINUES
from arl.run.servers import played_elsewhere
from arl.runtime.console import is_json, tell

ABOUT = (
    "Train the experiment in FILE, as its script does, with programs that run elsewhere in place of its workflow. They "
    "open episodes over HTTP, call the model, and post their rewards. The workflow's sampling and reward stay, if it "
    "is one of arl's that has them."
)
EPILOG = (
    f"{OTHER_FLAGS}--endpoint.host, --endpoint.port and the certificate say where programs find it; ${ENDPOINT_KEY} "
    "holds the key that they need. docs/serving.md explains the requests. Exit codes are those of the script."
)


def main(argv: Sequence[str]) -> None:
    """argv: the arguments after `arl serve`."""
    parser = parser_of("serve", ABOUT, EPILOG)
    parser.add_argument("file", type=Path, metavar="FILE", help="a script with an `experiment`")
    options, settings = parse(parser, argv)
    run_command(_serve, options, settings, if_stopped=CONTINUES)


async def _serve(experiment: Experiment[Any], config: Config) -> None:
    config.endpoint.operator_key  # noqa: B018 - it raises now, and not after a preparation of minutes
    if config.rollout.num_workers:
        raise ConfigError(
            f"rollout.num_workers is {config.rollout.num_workers}, but programs elsewhere play the episodes, and they "
            "need one endpoint; set it to 0"
        )
    await replace(experiment, prepare=_prepared_by(experiment.prepare)).train(config)


def _prepared_by(prepare: Callable[[Any], Setup | Awaitable[Setup]]) -> Callable[[Any], Setup | Awaitable[Setup]]:
    """The same preparation, with a workflow whose episodes are played by programs elsewhere."""

    def served(setup: Setup) -> Setup:
        if setup.workflow is None:
            raise ConfigError(
                "arl serve puts programs elsewhere in the place of one workflow, and this script has several tasks; "
                "give its experiment one workflow and dataset, or train it as a script"
            )
        return replace(setup, workflow=played_elsewhere(setup.workflow, setup.model, _say_where))

    async def served_later(setup: Awaitable[Setup]) -> Setup:
        return served(await setup)

    def prepare_served(config: Any) -> Setup | Awaitable[Setup]:
        made = prepare(config)
        return served_later(made) if inspect.isawaitable(made) else served(made)

    return prepare_served


def _say_where(url: str) -> None:
    said = f"programs open episodes by POST {url}, with the key of ${ENDPOINT_KEY}"
    if is_json():
        tell("endpoint", said, url=url)
    else:
        sys.stderr.write(said + "\n")
        sys.stderr.flush()
