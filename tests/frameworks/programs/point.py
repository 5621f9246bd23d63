"""What the programs ask for: a point, small enough for a model that knows nothing."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Point(BaseModel):
    """A point."""

    model_config = ConfigDict(extra="forbid")
    x: int = Field(ge=0, le=9)
    colour: Literal["red", "green"]


def told(*points: Point) -> None:
    """Print the points as the tests read them."""
    for point in points:
        print(Point.model_validate(point.model_dump()).model_dump_json())  # noqa: T201
