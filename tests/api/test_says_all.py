"""Which errors are shown without a traceback."""

from pathlib import Path
from typing import Any

import pytest

from arl.api.errors import FailureBudgetError, ImageError, says_all
from arl.api.images import Image
from arl.cli.command import users_traceback


def caught(call: Any, *arguments: Any) -> Exception:
    """What `call` raises, without the frames of this file that led to it."""
    try:
        call(*arguments)
    except (ImageError, ValueError) as error:
        return error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
    raise AssertionError(f"{call} raises nothing")


def of_the_user() -> None:
    Image.of("none.png")


def bug() -> int:
    return int("x")


def wrapped() -> None:
    try:
        raise KeyError("a bug")
    except KeyError as error:
        raise ImageError("no image") from error


def test_an_error_of_arls_own_code_is_its_message(tmp_path: Path) -> None:
    error = caught(Image.of, tmp_path / "none.png")
    assert says_all(error)
    assert users_traceback(error) == f"ImageError: cannot read the image {tmp_path}/none.png: No such file or directory"
    budget = FailureBudgetError("all failed")
    budget.__cause__ = error
    assert "".join(budget._render_traceback_()).count("\n") == 0


@pytest.mark.parametrize(
    ("call", "shown"),
    [(of_the_user, 'Image.of("none.png")'), (wrapped, 'raise KeyError("a bug")'), (bug, 'return int("x")')],
)
def test_an_error_to_which_the_users_code_led_has_its_traceback(call: Any, shown: str) -> None:
    error = caught(call)
    assert not says_all(error)
    assert shown in users_traceback(error)


def test_an_error_of_another_process_has_its_traceback() -> None:
    assert not says_all(ImageError("pickled"))
