"""From a checkpoint of a run to a Hugging Face directory: without servers, the script, or the optimizer's memory.

What is heavy, the engine above all, is imported when an export begins: `arl try` imports this module.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arl.api.errors import CheckpointError, ConfigError, ModelError
from arl.engine.model_files import model_digest
from arl.training.run_dir import checkpoint_of, last_directory, saved_versions


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedWeights:
    """The policy's weights in a checkpoint of a run."""

    run_dir: Path
    version: int
    checkpoint: Path
    """The train engine's part."""
    model: str
    """The model that the run began from, a directory or a name on the hub. It has config, tokenizer and frozen
    weights."""

    @classmethod
    def of(
        cls, run_dir: Path, version: int | None = None, model: str | None = None, policy: str | None = None
    ) -> SavedWeights:
        """version: the newest if None. model: where the run's model is now, if it was moved. policy: of a run of
        several, whose weights.

        Raises ConfigError if there is no such checkpoint or policy, or the model is another one, CheckpointError.
        """
        path, identity = _checkpoint(run_dir, version)
        known = identity.get("policies") or {}
        if policy is None and known:
            raise ConfigError(
                f"{run_dir} has several policies; name one with --policy: {', '.join(known)}. arl try and arl eval "
                f"play all of them, given the run's `policies`: --config {run_dir}/config.yaml"
            )
        if policy is not None and policy not in known:
            one = "has one policy, without a name; leave --policy out"
            of = f"has the policies {', '.join(known)}" if known else one
            raise ConfigError(f"--policy is {policy!r:.80}, and {run_dir} {of}")
        engine = path / "engine" / policy if policy else path / "engine"
        return cls(
            run_dir=run_dir,
            version=int(path.name.rpartition("-")[2]),
            checkpoint=engine / "policy" if (engine / "policy").is_dir() else engine,
            model=_found(run_dir, identity, model, f"policies.{policy}.model" if policy else "model"),
        )

    @classmethod
    def of_policies(cls, run_dir: Path, version: int | None, policies: Collection[str]) -> dict[str, SavedWeights]:
        """Those of each policy. Raises as `of` does, and ConfigError if the run has others than these."""
        path, identity = _checkpoint(run_dir, version)
        known = identity.get("policies") or {}
        if {*known} != {*policies}:
            raise ConfigError(
                f"{run_dir} was trained with the policies {', '.join(known) or 'none'}, and the settings name "
                f"{', '.join(policies) or 'none'}; set `policies` as it was"
            )
        number = int(path.name.rpartition("-")[2])
        return {name: cls.of(run_dir, number, policy=name) for name in known}

    def export(self, directory: Path, *, adapter: bool = False) -> int:
        """Write a Hugging Face directory, whole or not at all, on this process's CPU; returns its bytes.

        adapter: the adapters alone, in peft's format; else they are merged. Raises ConfigError if the directory exists
        or there are no adapters, CheckpointError, ModelError, and TransportError if it cannot be written.
        """
        from arl.engine.fsdp.snapshot import export_weights

        if directory.exists():
            raise ConfigError(f"{directory} is there already; remove it, or name another directory")
        try:
            return export_weights(self.checkpoint, self.model, directory, adapter=adapter)
        except CheckpointError as error:
            if self.checkpoint.exists():
                raise
            raise CheckpointError(
                f"the checkpoint of version {self.version} was deleted meanwhile, as {self.run_dir} has newer ones; "
                "export one of those"
            ) from error
        except ModelError as error:
            raise ModelError(f"{error}; if the model of the run was moved, --model names it") from error


def _checkpoint(run_dir: Path, version: int | None) -> tuple[Path, dict[str, Any]]:
    """The checkpoint of a version, or the newest; and what identifies its run. Raises ConfigError, CheckpointError."""
    from arl.training.checkpoints import read_values

    saved = sorted(saved_versions(run_dir / "checkpoints"))
    if not saved:
        missing = "is not a directory" if not run_dir.is_dir() else "has no checkpoint"
        raise ConfigError(
            f"{run_dir} {missing}; name the run_dir of a run that has saved: it does so at its end, and every "
            "checkpoint.every_s seconds"
        )
    if version is not None and version not in saved:
        raise ConfigError(
            f"{run_dir} has no checkpoint of version {version}, only of {', '.join(map(str, saved))}: a run keeps "
            "the newest checkpoint.keep of them"
        )
    path = checkpoint_of(run_dir / "checkpoints", saved[-1] if version is None else version)
    return path, read_values(path, "export it with the arl that wrote it")["identity"]


def _found(run_dir: Path, identity: Mapping[str, Any], given: str | None, key: str) -> str:
    named = str(identity[key])
    if given is None and not Path(named).is_dir() and (there := Path(last_directory(run_dir)) / named).is_dir():
        named = str(there)  # the run began in another directory
    model, known = given or named, identity.get(f"{key}_digest")
    if known is not None and (digest := model_digest(model)) is not None and digest != known:
        raise ConfigError(
            f"{model} is not the model that {run_dir} was trained from, or it was changed since; name that model with "
            "--model"
        )
    return model
