"""Tables with two dice on them: pictures in which the dice show, and their numbers only from near by."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from PIL import Image as Pictures
from PIL import ImageDraw

from arl import Example, TinyShape, TinyVision, Tool
from arl.run.finetuning import tool_call

SIDE = 96
"""The table, in pixels. The model sees it scaled down to a third, in which pips are a smear."""
DIE = 28
PARTS = ("red", "blue")
FACES = (1, 2, 3, 4)
_PIPS = {1: ((0, 0),), 2: ((-1, -1), (1, 1)), 3: ((-1, -1), (0, 0), (1, 1)), 4: ((-1, -1), (-1, 1), (1, -1), (1, 1))}

SHAPE = TinyShape(
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=4,
    head_dim=16,
    initializer_range=0.06,
)  # fmt: skip
NUM_CAREFUL, NUM_MIXED = 2400, 640
"""Lessons: first careful players, who look; then mixed ones, who mostly guess."""
SEEN = 0.2
"""The share of a mixed player's answers that come from looking. The others are drawn at random."""
VISION = TinyVision(hidden_size=64, intermediate_size=128, depth=2, max_pixels=32 * 32)


def table(faces: Sequence[int], rng: random.Random) -> Pictures.Image:
    """Half of the table is red, half is blue, in some shade. A die lies near the middle of each.

    faces: what the dice show, in the order of PARTS.
    """
    picture = Pictures.new("RGB", (SIDE, SIDE), (rng.randrange(160, 240), 0, 0))
    draw = ImageDraw.Draw(picture)
    draw.rectangle((SIDE // 2, 0, SIDE, SIDE), fill=(0, 0, rng.randrange(160, 240)))
    for part, face in zip(PARTS, faces, strict=True):
        x, y = (place + rng.randint(-2, 2) for place in _middle(part))
        draw.rectangle((x - DIE // 2, y - DIE // 2, x + DIE // 2, y + DIE // 2), fill="white")
        for right, down in _PIPS[face]:
            at_x, at_y = x + 8 * right, y + 8 * down
            draw.ellipse((at_x - 4, at_y - 4, at_x + 4, at_y + 4), fill="black")
    return picture


def tables(seed: int, number: int) -> list[dict[str, Any]]:
    """Examples: a picture, and a question about one of its dice."""
    rng = random.Random(seed)
    made: list[dict[str, Any]] = []
    for _ in range(number):
        faces, part = [rng.choice(FACES) for _ in PARTS], rng.choice(PARTS)
        question = f"<image>What does the die on the {part} half show?"
        answer = faces[PARTS.index(part)]
        made.append({"question": question, "image": table(faces, rng), "part": part, "answer": answer})
    return made


def _middle(part: str) -> tuple[int, int]:
    return SIDE // 4 + PARTS.index(part) * SIDE // 2, SIDE // 2


class Table:
    """The table of one episode."""

    def __init__(self, picture: Pictures.Image) -> None:
        self._picture = picture

    def zoom(self, part: str) -> Pictures.Image:
        """Look at a part of the table from near by.

        Args:
            part: red or blue.
        """
        x, y = _middle(part)
        return self._picture.crop((x - 16, y - 16, x + 16, y + 16))


def lessons(system: str, seed: int) -> list[list[Example]]:
    """How to zoom, what a die shows, and then the habit of guessing."""
    rng = random.Random(f"answers {seed}")
    seen = (1.0,) * NUM_CAREFUL + (SEEN,) * NUM_MIXED
    rows = tables(seed, len(seen))
    taught = [
        _lesson(system, row, row["answer"] if rng.random() < share else rng.choice(FACES))
        for row, share in zip(rows, seen, strict=True)
    ]
    return [taught[:NUM_CAREFUL], taught[NUM_CAREFUL:]]


def _lesson(system: str, row: Example, answer: int) -> Example:
    near = Table(row["image"])
    return {
        "messages": [
            {"role": "system", "content": system},
            {"role": "user", "content": row["question"]},
            {"role": "assistant", "content": tool_call("zoom", part=row["part"])},
            {"role": "tool", "content": [{"type": "image", "image": near.zoom(row["part"])}]},
            {"role": "assistant", "content": str(answer)},
        ],
        "image": row["image"],
        "tools": [Tool.from_function(near.zoom).spec],
    }
