"""The wheel holds all that a run needs: installed alone into an empty environment, it trains."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
VERSIONS = ("3.11", "3.12", "3.13")
TEN_STEPS = """
import arl

arl.write_tiny_model("model")
questions = [{"question": f"{a} + 1 = ?"} for a in range(9)]
result = arl.train(
    model="model", reward=lambda answer, example: float(len(answer) % 2), dataset=questions, run_dir="run", steps=10,
    batch_size=2, group_size=2, max_new_tokens=8,
)
assert result.summary["steps"] == 10, result.summary
"""

pytestmark = [pytest.mark.wheel, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of what git holds, so that no file of this directory sneaks in."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", source], input=archive, check=True)
    call(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", built, source, cwd=built)
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(params=VERSIONS)
def empty(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """The directory of an environment that has pip alone."""
    python = interpreter(request.param)
    if python is None:
        pytest.skip(f"needs Python {request.param}")
    call(python, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    yield tmp_path / "venv"
    shutil.rmtree(tmp_path / "venv")  # gigabytes, where torch comes with CUDA


def test_the_wheel_alone_trains_ten_steps(empty: Path, wheel: Path, tmp_path: Path) -> None:
    python, pins = empty / "bin" / "python", ROOT / "constraints" / "cpu.txt"
    call(python, "-m", "pip", "install", "--quiet", wheel, "-c", pins, cwd=tmp_path)
    call(empty / "bin" / "arl", "--version", cwd=tmp_path)
    (tmp_path / "script.py").write_text(f"if __name__ == '__main__':\n{indented(TEN_STEPS)}")
    call(python, "script.py", cwd=tmp_path)
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 10


def interpreter(version: str) -> str | None:
    """Of this version: on PATH, where a shim of pyenv may stand for a version that it does not run, or pyenv's."""
    installed = Path.home().glob(f".pyenv/versions/{version}.*/bin/python")
    for python in (f"python{version}", *map(str, sorted(installed))):
        if shutil.which(python) and not subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode:
            return python
    return None


def indented(code: str) -> str:
    return "".join(f"    {line}\n" for line in code.splitlines())


def call(*command: str | Path, cwd: Path) -> None:
    """Fails with the command's output. It sees nothing of this environment's packages."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(
        command, cwd=cwd, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}"
