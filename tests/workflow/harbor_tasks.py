"""A task in Harbor's format, to write and to spoil."""

from pathlib import Path

CONFIG = """
schema_version = "1.4"
[metadata]
difficulty = "easy"
[agent]
timeout_sec = 20
[verifier]
timeout_sec = 30
[verifier.env]
EXPECTED = "2"
[environment]
memory_mb = 256
storage_mb = 16
"""
DOCKERFILE = """
# A comment, and a line that goes on
FROM ubuntu:24.04
ENV GREETING="hello you"
WORKDIR /app
COPY --chown=root:root notes.txt \\
     ./
COPY data /app/data/
CMD ["bash"]
"""
TESTS = """#!/bin/bash
# $EXPECTED comes from task.toml, and the tests' own file lies beside this one.
if [ "$(cat /app/answer)" = "$EXPECTED" ] && [ -f /tests/key ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
echo judged
"""


def write_task(directory: Path, *, config: str = CONFIG, dockerfile: str = DOCKERFILE, tests: str = TESTS) -> Path:
    """Count the lines of /app/notes.txt into /app/answer."""
    files = {
        "task.toml": config,
        "instruction.md": "<!-- a canary GUID 26b5c67b -->\n\nWrite the number of lines of notes.txt to answer.\n",
        "environment/Dockerfile": dockerfile,
        "environment/notes.txt": "one\ntwo\n",
        "environment/data/deep/x": "x\n",
        "tests/test.sh": tests,
        "tests/key": "",
        "solution/solve.sh": "#!/bin/bash\nwc -l < notes.txt > answer\n",
    }
    for path, text in files.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_text(text)
    return directory
