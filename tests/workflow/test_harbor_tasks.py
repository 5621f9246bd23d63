"""Tasks in Harbor's format: what arl reads of them, and what it refuses when it loads them."""

from pathlib import Path

import pytest
from workflow.harbor_tasks import DOCKERFILE, write_task

from arl.api.errors import DatasetError
from arl.workflow.harbor_task import HarborTask, harbor_tasks, plain_image


def test_a_dataset_has_a_row_for_each_task_in_the_order_of_paths(tmp_path: Path) -> None:
    for name in ("b/second", "a/first"):
        write_task(tmp_path / name)
    first, second = harbor_tasks(tmp_path)
    assert [first["task"], second["task"]] == ["first", "second"]
    assert first == {
        "task": "first",
        "path": str(tmp_path / "a/first"),
        "instruction": "Write the number of lines of notes.txt to answer.",
        "agent_timeout_s": 20.0,
        "verifier_timeout_s": 30.0,
        "metadata": {"difficulty": "easy"},
    }


def test_the_defaults_are_harbors(tmp_path: Path) -> None:
    task = HarborTask.read(write_task(tmp_path / "t", config=""))
    assert (task.agent_timeout_s, task.verifier_timeout_s, task.memory_mb, task.allows_network) == (
        None,
        600,
        None,
        True,
    )


def test_older_names_of_settings_are_read(tmp_path: Path) -> None:
    config = 'version = "1.0"\n[environment]\nmemory = "2G"\nstorage = "512M"\nallow_internet = false\n'
    task = HarborTask.read(write_task(tmp_path / "t", config=config))
    assert (task.memory_mb, task.storage_mb, task.allows_network) == (2048, 512, False)


@pytest.mark.parametrize(
    ("config", "needs"),
    [
        ('[[steps]]\nname = "a"', "several steps"),
        ("[environment]\ngpus = 1", "GPUs"),
        ('[environment]\nos = "windows"', "Windows"),
        ('[verifier]\nenvironment_mode = "separate"', "tests in an environment of their own"),
        ('[agent]\nuser = "agent"', "users of the image"),
        ('[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["a.b"]', "some hosts of the network"),
        ('[[environment.mcp_servers]]\nname = "a"\nurl = "http://a"', "MCP servers"),
        ('[environment.healthcheck]\ncommand = "true"', "a health check"),
    ],
)
def test_what_arl_does_not_do_is_refused_by_name(tmp_path: Path, config: str, needs: str) -> None:
    write_task(tmp_path / "good")
    write_task(tmp_path / "odd", config=config)
    with pytest.raises(DatasetError, match=f"the task {tmp_path}/odd needs .*{needs}.*, which arl does not do"):
        harbor_tasks(tmp_path)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ("[agent", "is not a task of Harbor's that arl can read"),
        ('[agent]\ntimeout_sec = "soon"', "has a value of the wrong type"),
        ('agent = "me"', "has a value of the wrong type"),
        ('[environment.env]\nKEY = "${KEY}"', "takes KEY from this machine's environment"),
    ],
)
def test_a_task_that_cannot_be_read_is_an_error_with_its_path(tmp_path: Path, config: str, why: str) -> None:
    with pytest.raises(DatasetError, match=f"{tmp_path}/t.*{why}"):
        HarborTask.read(write_task(tmp_path / "t", config=config))


def test_a_task_without_tests_and_a_directory_without_tasks_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="there is no task below"):
        harbor_tasks(tmp_path)
    (write_task(tmp_path / "t") / "tests/test.sh").unlink()
    with pytest.raises(DatasetError, match=r"has no tests/test\.sh"):
        harbor_tasks(tmp_path)


def test_a_dockerfile_that_only_copies_needs_no_image(tmp_path: Path) -> None:
    image = HarborTask.read(write_task(tmp_path / "t")).plain_image()
    context = tmp_path / "t/environment"
    assert image.workdir == "/app"
    assert image.env == {"GREETING": "hello you"}
    assert image.sources == {"/app/notes.txt": context / "notes.txt", "/app/data/deep/x": context / "data/deep/x"}


@pytest.mark.parametrize(
    "line",
    [
        "RUN apt-get update",
        "FROM my/image:1",
        "FROM ubuntu:24.04 AS base",
        "COPY --from=base /a /b",
        "ADD https://a/b /c",
        "ADD a.tar.gz /c",
        "USER nobody",
        "WORKDIR $HOME",
        "ARG X=1",
    ],
)
def test_what_takes_an_image_is_named_when_the_sandbox_has_none(tmp_path: Path, line: str) -> None:
    task = HarborTask.read(write_task(tmp_path / "t", dockerfile=f"{DOCKERFILE}\n{line}\n"))
    with pytest.raises(DatasetError, match="takes Docker") as refused:
        task.plain_image()
    assert f"needs `{line}`" in str(refused.value)


@pytest.mark.parametrize(
    ("copy", "paths"),
    [
        ("COPY . /app", ["/app/Dockerfile", "/app/a.py", "/app/b.py", "/app/d/c"]),
        ("COPY *.py /app/", ["/app/a.py", "/app/b.py"]),
        ("COPY a.py b.py /srv", ["/srv/a.py", "/srv/b.py"]),
        ("COPY a.py /app/main.py", ["/app/main.py"]),
        ('COPY ["a.py", "/x y/"]', ["/x y/a.py"]),
        ("COPY d d", ["/w/d/c"]),
    ],
)
def test_files_are_copied_as_docker_copies_them(tmp_path: Path, copy: str, paths: list[str]) -> None:
    for name in ("a.py", "b.py", "d/c"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "Dockerfile").write_text(f"FROM debian\nWORKDIR /w\n{copy}\n")
    assert sorted(plain_image(tmp_path / "Dockerfile").sources) == paths


def test_a_file_that_is_not_there_is_an_error_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("COPY none /app\n")
    with pytest.raises(DatasetError, match="cannot read `COPY none /app`: there is no none in"):
        plain_image(tmp_path / "Dockerfile")
