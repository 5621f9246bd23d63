"""A run whose model sees: one episode, with images among its tokens."""

from pathlib import Path

from made_run import T0, TOKENIZER, began, episode, life, tokens_of
from PIL import Image as Pictures

from arl.api.events import GroupAdmitted, GroupEnded, KeptTokens
from arl.api.images import Image, PlacedImage
from arl.api.types import Trajectory, TurnSpan

RED, BLUE = (Image.of(Pictures.new("RGB", (56, 28), colour)) for colour in ("red", "blue"))
PAD = tokens_of("#")[0]


def saw(*images: Image, answer: str = "red") -> Trajectory:
    """A prompt in which each image has three placeholders."""
    tokens, placed = tokens_of("Look: "), list[PlacedImage]()
    for image in images:
        placed.append(PlacedImage(image=image, start=len(tokens), stop=len(tokens) + 3))
        tokens += [PAD] * 3 + tokens_of(" and ")
    said, given = tokens_of(answer), len(tokens)
    return Trajectory(
        token_ids=tokens + said,
        loss_mask=[0] * given + [1] * len(said),
        behavior_logprobs=[0.0] * given + [-1.0] * len(said),
        versions=[-1] * given + [0] * len(said),
        reward=1.0,
        images=tuple(placed),
        turns=(TurnSpan(start=given, stop=given + len(said)),),
    )


def seeing_run(run_dir: Path, *trajectories: Trajectory) -> Path:
    """Of one episode, 0.0."""
    (run_dir / "events").mkdir(parents=True)
    TOKENIZER.save(str(run_dir / "events" / "tokenizer.json"))
    rows = [("0.0", number, one) for number, one in enumerate(trajectories)]
    records = [
        began(t=T0),
        GroupAdmitted(group=0, epoch=0, row=0, stamp=0, example={}, t=T0),
        *episode("0.0", T0, trajectories),
        GroupEnded(group=0, outcome="kept", t=T0 + 5),
        KeptTokens(rows=rows),
    ]
    life(run_dir, records)
    return run_dir
