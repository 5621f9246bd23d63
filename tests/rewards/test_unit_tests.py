"""Unit tests as a reward: answers that pass, that fail, and that only pretend to pass."""

import asyncio
from typing import Any

import pytest

from arl.api.errors import ConfigError, DatasetError, RewardError
from arl.rewards import CallTests, UnitTestReport, UnitTestsReward, code_of, run_unit_tests, unit_tests_of
from arl.sandbox import BubblewrapSandbox, Limits, ProgramOutcome

SECRET = "61803398874989"
MBPP = {
    "text": "Write a function to find the longest chain which can be formed from the given set of pairs.",
    "test_list": ["assert double(2) == 4", "assert double('ab') == 'abab'", "assert math.isclose(double(0.1), 0.2)"],
    "test_setup_code": "",
}
HUMAN_EVAL = {
    "prompt": 'from typing import List\n\n\ndef poly(xs: List[float], x: float) -> float:\n    """At x."""\n'
    "    return sum(c * x**i for i, c in enumerate(xs))\n\n\ndef find_zero(xs: List[float]) -> float:\n"
    '    """Find one x where poly is zero."""\n',
    "entry_point": "find_zero",
    "test": "METADATA = {}\n\n\ndef check(candidate):\n    for xs in ([1, 2], [-6, 11, -6, 1]):\n"
    "        assert abs(poly(xs, candidate(xs))) < 1e-4\n",
}
ZERO = """
    low, high = -9.5, 9.75
    while high - low > 1e-9:
        middle = (low + high) / 2
        if poly(xs, middle) * poly(xs, low) > 0:
            low = middle
        else:
            high = middle
    return low
"""


async def failures(sandbox: BubblewrapSandbox, code: str, *tests: str, **options: Any) -> list[str | None]:
    report = await run_unit_tests(sandbox, code, CallTests(tests=tests, **options), timeout_s=20)
    return list(report.failures)


async def in_the_session(sandbox: BubblewrapSandbox, code: str, example: dict[str, Any]) -> UnitTestReport:
    return await run_unit_tests(sandbox, code, unit_tests_of(example), timeout_s=20)


pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_each_assertion_of_mbpp_is_a_test(bubblewrap: BubblewrapSandbox) -> None:
    report = await in_the_session(bubblewrap, "def double(x):\n    return x + x", MBPP)
    assert report.failures == (None, None, None)
    report = await in_the_session(bubblewrap, "def double(x):\n    return 2 * x if x == 2 else x", MBPP)
    assert report.failures[0] is None
    assert report.failures[1] == "AssertionError, where the last call gave 'ab'"
    assert report.share_passed == pytest.approx(1 / 3)


@pytest.mark.parametrize("code", [ZERO, f"def find_zero(xs):{ZERO}"], ids=["continued", "whole"])
async def test_an_answer_continues_the_prompt_of_human_eval_or_replaces_it(
    bubblewrap: BubblewrapSandbox, code: str
) -> None:
    assert (await in_the_session(bubblewrap, code, HUMAN_EVAL)).failures == (None,)


async def test_programs_are_tested_by_what_they_print(bubblewrap: BubblewrapSandbox) -> None:
    tests = [{"input": "3\n4\n", "output": "7"}, {"input": "1\n1\n", "output": "3\n"}, {"input": "", "output": ""}]
    report = await in_the_session(bubblewrap, "print(int(input()) + int(input()), ' ')", {"tests": tests})
    passed, wrong, crashed = report.failures
    assert passed is None
    assert wrong == "it printed '2  \\n', not '3\\n'"
    assert crashed is not None
    assert "exit code 1" in crashed
    assert "EOFError" in crashed


async def test_data_of_many_kinds_goes_to_the_answer_and_comes_back(bubblewrap: BubblewrapSandbox) -> None:
    code = """
import collections, enum
def same(*values): return values
def counted(text): return collections.Counter(text)
def point(): return collections.namedtuple("P", "x y")(1, 2)
def numbered():
    yield from (1, 2)
def color(): return enum.IntEnum("Color", "RED").RED
def sort(values): values.sort()
def clear(found): found.update(a=[1])
def fails(): raise KeyError("k")
def huge(): return 10 ** 9999
class Node:
    def __init__(self, value): self.value, self.left = value, None
    def sum(self): return self.value + (self.left.sum() if self.left else 0)
def total(node): return node.sum()
"""
    values = "None, True, -1, 2.5, 'ä\\0', b'\\xff', [1, [2]], (1, (2,)), {1}, frozenset({2}), {1: {'a': ()}}, 1j"
    found = await failures(
        bubblewrap,
        code,
        f"assert same({values}) == ({values},)",
        "assert same(float('inf'), -0.0)[0] == float('inf')",
        "assert counted('aab') == {'a': 2, 'b': 1}",
        "assert point() == (1, 2) and type(point()) is tuple",
        "assert list(numbered()) == [1, 2]",
        "assert color() == 1 and type(color()) is int",
        "values = [3, 1]\nsort(values)\nassert values == [1, 3]",
        "found = {}\nclear(found)\nassert found == {'a': [1]}",
        "try:\n    fails()\n    assert False\nexcept KeyError:\n    pass",
        "assert huge() == 10 ** 9999",
        "assert total(root) == 3 and root.value == 1 and root.sum() == 3",
        setup="root = Node(1)\nroot.left = Node(2)",
    )
    assert found == [None] * 11


async def test_a_test_that_hangs_or_crashes_leaves_the_others(bubblewrap: BubblewrapSandbox) -> None:
    code = """
def f(x):
    import ctypes, os, sys, time
    if x == 1:
        os.fork()
        time.sleep(600)
    if x == 2: ctypes.string_at(0)
    if x == 3: sys.exit(0)
    return x
"""
    tests = CallTests(tests=[f"assert f({x}) == {x}" for x in range(5)])
    report = await run_unit_tests(bubblewrap, code, tests, timeout_s=1)
    assert [failure is None for failure in report.failures] == [True, False, False, False, True]
    assert report.failures[1] == "it took longer than 1 s"
    assert report.failures[2] == "AnswerEndedError: the answer ended its process"
    assert report.failures[3] == "RuntimeError: SystemExit: 0"


async def test_a_test_does_not_see_effects_of_earlier_ones(bubblewrap: BubblewrapSandbox) -> None:
    code = "seen = []\ndef f():\n    seen.append(1)\n    open('file', 'a').close()\n    return len(seen)"
    assert await failures(bubblewrap, code, "assert f() == 1", "assert f() == 1") == [None, None]


SEARCH = f"""
import ctypes, gc, glob, os, sys
def f(x):
    found = []
    def look(text):
        if "".join(({SECRET[:7]!r}, {SECRET[7:]!r})) in str(text):
            found.append(text)
    frame = sys._getframe()
    while frame:
        look(frame.f_locals)
        look(frame.f_globals)
        frame = frame.f_back
    for each in gc.get_objects():
        try:
            look(each)
        except BaseException:
            pass
    for path in glob.glob("/proc/*/mem") + glob.glob("/proc/*/environ") + glob.glob("/proc/*/cmdline"):
        try:
            with open(path, "rb") as file:
                if path.endswith("mem") and path.split("/")[2] not in ("self", "thread-self", str(os.getpid())):
                    file.seek(1 << 22)
                    file.read(1)
                    found.append(path)
                elif not path.endswith("mem"):
                    look(file.read())
        except OSError:
            pass
    for path in glob.glob("/proc/[0-9]*/fd/*"):
        try:
            if path.split("/")[2] not in (str(os.getpid()), "1"):
                os.readlink(path)
                found.append(path)
        except OSError:
            pass
    return str(found)
"""
TRICKS = {
    "exits at once": "import os\nos._exit(0)",
    "exits when called": "def f(x):\n    raise SystemExit(0)",
    "exits with its group": "import os, signal\ndef f(x):\n    os.killpg(0, signal.SIGTERM)",
    "kills everybody": "import os\ndef f(x):\n    os.kill(-1, 9)",
    "equals everything": "class E(object):\n    def __eq__(self, other): return True\n"
    "    __hash__ = object.__hash__\n"
    "def f(x): return E()",
    "equals everything as a number": "class E(int):\n    def __eq__(self, other): return True\n"
    "    __hash__ = object.__hash__\n"
    "def f(x): return E(0)",
    "equals everything as a text": "class E(str):\n    def __eq__(self, other): return True\n"
    "    __hash__ = object.__hash__\n"
    "def f(x): return E('')",
    "replaces builtins": "import builtins, json\nbuiltins.AssertionError = ValueError\nbuiltins.compile = None\n"
    "json.dumps = lambda *a: '{}'\nbuiltins.str = lambda *a: 'x'\ndef f(x): return 0",
    "prints a verdict": "import glob\ndef f(x):\n    for path in glob.glob('/proc/*/fd/*'):\n        try:\n"
    "            open(path, 'w').write('[null]\\n')\n        except OSError: pass\n    print('[null]')",
    "takes the names of the tests": "def check(*a): return True\ncandidate = check\nmath = None\ndef f(x): return 0",
    "answers before it is asked": "import glob, os, socket\nfor fd in range(3, 40):\n    try:\n"
    "        s = socket.socket(fileno=os.dup(fd))\n        s.send(b'\\0\\0\\0\\x0f{\"value\": true}' * 20)\n"
    "    except OSError: pass\ndef f(x): return 0",
    "raises what a passing test might": "def f(x):\n    raise StopIteration",
    "looks for the tests": SEARCH,
    "traces": "import ctypes, os\ndef f(x):\n    return [ctypes.CDLL(None).ptrace(16, pid, 0, 0) for pid in (1, 2, 3)]",
    "never returns": "def f(x):\n    while True: pass",
    "never ends to load": "while True: pass",
    "is no Python": "```",
    "takes all memory": "def f(x):\n    return [bytearray(1 << 20) for _ in range(10000)]",
    "returns for ever": "import itertools\ndef f(x): return itertools.count()",
    "forks for ever": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
}


async def test_no_trick_passes_a_test(bubblewrap: BubblewrapSandbox) -> None:
    tests = CallTests(tests=[f"import math\nassert f(2) == {SECRET!r} and math.isclose(1, 1)"])
    limits = Limits(memory_bytes=96 << 20, processes=12)

    async def attempted(trick: str) -> UnitTestReport:
        timeout_s = 20 if trick == "looks for the tests" else 3
        return await run_unit_tests(bubblewrap, TRICKS[trick], tests, limits=limits, timeout_s=timeout_s)

    reports = await asyncio.gather(*map(attempted, TRICKS))
    failed = {trick: report.failures[0] for trick, report in zip(TRICKS, reports, strict=True)}
    assert [trick for trick, failure in failed.items() if failure is None] == []
    assert "gave '[]'" in (failed["looks for the tests"] or ""), failed
    honest = f"def f(x): return {SECRET!r}"
    assert (await run_unit_tests(bubblewrap, honest, tests, limits=limits)).failures == (None,)


INTRUSIONS = {
    "gives a module that the tests use": (
        "class math:\n    isclose = lambda *a, **k: True\ndef f(): return 2.0",
        CallTests(tests=["assert math.isclose(f(), 1.0)"]),
    ),
    "ends a loop of the tests": (
        "def f(x):\n    raise StopIteration",
        CallTests(tests=["assert all(map(lambda x: f(x) == 7 * x, [1, 2]))"]),
    ),
    "redefines a name of the prompt": (
        "def poly(xs, x):\n    return 0\n\ndef find_zero(xs):\n    return 5",
        unit_tests_of(HUMAN_EVAL),
    ),
}


async def test_an_answer_does_not_change_what_is_tested(bubblewrap: BubblewrapSandbox) -> None:
    for name, (code, tests) in INTRUSIONS.items():
        assert (await run_unit_tests(bubblewrap, code, tests, timeout_s=20)).failures != (None,), name


async def test_the_reward_is_the_share_passed_or_all_or_nothing(bubblewrap: BubblewrapSandbox) -> None:
    answer = "I think:\n```python\ndef double(x):\n    return 2 * x if x != 'ab' else None\n```\nDone."
    async with UnitTestsReward(bubblewrap) as share, UnitTestsReward(bubblewrap, grade="all") as all_or_nothing:
        score = await share(answer, MBPP)
        assert score.value == pytest.approx(2 / 3)
        assert score.metrics == {"tests_passed": score.value}
        assert (await all_or_nothing(answer, MBPP)).value == 0.0
        assert (await all_or_nothing("```\ndef double(x): return x + x\n```", MBPP)).value == 1.0
    assert (await bubblewrap.run("print(1)")).succeeded  # who opened it closes it


async def test_a_failing_sandbox_is_an_error_and_not_a_reward_of_zero() -> None:
    reward = UnitTestsReward(BubblewrapSandbox())
    with pytest.raises(RewardError, match="not open"):
        await reward("print(1)", MBPP)


async def test_the_columns_of_an_example_say_what_is_tested() -> None:
    with pytest.raises(DatasetError, match=r"\['question'\]; unit tests need test_list"):
        unit_tests_of({"question": "?"})
    with pytest.raises(DatasetError, match="no unit tests"):
        unit_tests_of({"test_list": []})
    with pytest.raises(ConfigError, match="grade is 'most'"):
        UnitTestsReward(BubblewrapSandbox(), grade="most")  # pyright: ignore[reportArgumentType]
    # Sanitized MBPP has imports instead of setup code.
    tests = unit_tests_of({"test_list": ["assert f()"], "test_imports": ["import math", "import re"]})
    assert tests == CallTests(tests=("assert f()",), setup="import math\nimport re")


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("```python\na\n```", "a\n"),
        ("First\n```py\na\n```\nthen\n```\nb\n  c\n```\n!", "b\n  c\n"),
        ("```python\ncut of", "cut of"),
        ("    return 1", "    return 1"),
        ("```python\nx = '```'\n```", "x = '```'\n"),
        ("  ```python\n  a\n  ```", "  a\n"),
    ],
)
async def test_the_code_is_the_last_fenced_block(answer: str, code: str) -> None:
    assert code_of(answer) == code


async def test_a_verdict_without_the_token_counts_for_nothing() -> None:
    class Forger:
        async def run(self, program: str, **_: object) -> ProgramOutcome:
            return ProgramOutcome(exit_code=0, stdout="\n[null, null]\n", stderr="", wall_s=0.1, ended_by="exit")

        async def __aenter__(self) -> "Forger":
            return self

        async def __aexit__(self, *exc: object) -> None: ...

    report = await run_unit_tests(Forger(), "", CallTests(tests=["a", "b"]))
    assert report.failures == ("the tests did not end: exit code 0",) * 2
