"""A run of a model that sees, as its user goes through it: trained, continued, replayed, read, exported, scored."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as Pictures
from sighted import write_sighted
from sighted_script import COLOURS, HALF, SIDE

import arl
from arl.observe.events.run_record import RunRecord, read_run

SCRIPT = Path(__file__).parents[1] / "sighted_script.py"
SMALL = ("--rollout.batch_size", "2", "--rollout.group_size", "4", "--rollout.max_staleness", "1")
FULL = ("--rollout.num_workers", "1", "--record", "--evaluation.every", "1", "--algorithm.preset", "decoupled_ppo")


def run(*command: str | Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parent.parent), "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.runs
@pytest.mark.timeout(600)
def test_a_run_that_sees_is_continued_replayed_read_exported_and_scored(tmp_path: Path) -> None:
    model, run_dir = write_sighted(tmp_path / "model", "qwen2_5_vl"), tmp_path / "run"
    settings = ("--model", model, "--run_dir", run_dir, *SMALL, *FULL, "--train.optimizer.lr", "1e-3")
    for steps in ("1", "3"):
        run(SCRIPT, *settings, "--steps", steps)
    record = read_run(run_dir)
    check_steps(record)
    check_files(run_dir, record)
    replayed = arl.replay(run_dir)
    assert [step.version for step in replayed.steps] == [0, 1, 2]
    assert all(step.digest == step.recorded_digest for step in replayed.steps)
    run("-m", "arl", "export", run_dir, "--out", tmp_path / "exported")
    assert (tmp_path / "exported" / "preprocessor_config.json").is_file()
    check_scores(tmp_path / "exported", tmp_path / "scored")


def check_steps(record: RunRecord) -> None:
    """The trainer recomputes what the sampler said, and both starts trained and were evaluated."""
    assert [step["version"] for step in record.steps] == [1, 2, 3]
    assert set(record.lives) == {1, 2}
    assert {row["version"] for row in record.evaluations} == {0, 1, 2, 3}
    assert all(row["num_failed"] == 0 for row in record.evaluations)
    fresh = [episode for episode in record.episodes if episode.staleness == 0 and not episode.is_undone]
    assert fresh
    for tokens in (tokens for episode in fresh for tokens in record.tokens(episode)):
        mask = tokens.columns["loss_mask"]
        logprobs = [tokens.columns[name][mask] for name in ("behavior_logprobs", "proximal_logprobs")]
        np.testing.assert_allclose(*logprobs, atol=1e-4)


def check_files(run_dir: Path, record: RunRecord) -> None:
    """Each image has one file, which the log gives back; checkpoints have none."""
    of_trajectories = [tokens.images for episode in record.episodes for tokens in record.tokens(episode)]
    assert all([image.size for image in images] == [(SIDE, SIDE), (HALF, HALF)] for images in of_trajectories)
    seen = [image for images in of_trajectories for image in images]
    assert record.groups[0].example["image"] == f"<image {SIDE}x{SIDE}>"
    assert all(
        [image.size for image in tokens.images] == [(SIDE, SIDE), (HALF, HALF)]
        for episode in record.episodes
        for tokens in record.tokens(episode)
    )
    files = sorted(path.stem for path in (run_dir / "images").glob("*/*"))
    kept = {group.example["answer"] for group in record.groups if group.outcome == "kept"}  # some wait in a checkpoint
    pictures = [Pictures.new("RGB", (side, side), colour) for colour in kept for side in (SIDE, HALF)]
    assert files == sorted({image.digest for image in (*seen, *map(arl.Image.of, pictures))})
    assert len(files) <= 2 * len(COLOURS)
    assert all(image.image.picture().size == image.size for image in seen)
    assert not [path for path in (run_dir / "checkpoints").rglob("*") if path.suffix in (".png", ".jpg", ".webp")]


def check_scores(model: Path, run_dir: Path) -> None:
    told = run("-m", "arl", "eval", SCRIPT, "--model", model, "--run_dir", run_dir, "--n", "2", "--log.format", "json")
    (result,) = [one for line in told.splitlines() if (one := json.loads(line))["kind"] == "result"]
    assert (result["num_episodes"], result["num_failed"]) == (4, 0)
