"""`arl try`: what it prints of episodes, and what it says of scripts that it cannot run."""

import asyncio
import logging
import re
import tempfile
from pathlib import Path

import pytest
from records import trajectory
from saved_run import SMALL, contents, write_run
from script_commands import TOKENIZER, Commands, commands

from arl.api.types import ModelRequest
from arl.cli.episodes import EngineCall
from arl.cli.trial import Origin, Passage, passage_of, passages_of, rendered, visible
from arl.engine.tiny import write_tiny_model

script = pytest.fixture(commands)


def decode(token_ids: object) -> str:
    return str(TOKENIZER.decode(list(token_ids)))  # pyright: ignore[reportArgumentType]


# What is printed ---------------------------------------------------------------------------------------------------


def test_episodes_that_end_in_another_order_are_printed_in_that_of_their_examples(script: Commands) -> None:
    last_has_answered = asyncio.Event()

    async def answer(request: ModelRequest) -> str:
        if "Add: 2 + 1" in decode(request.input_ids):
            last_has_answered.set()
        else:
            await last_has_answered.wait()
            await asyncio.sleep(0)
        return "done<|im_end|>"

    code, out, _ = script.run("try", "--n", "3", answers=answer)
    assert code == 0
    assert re.findall(r"Add: (\d) \+", out) == ["0", "1", "2"]
    assert re.findall(r"episode (\d) of 3: held-out example (\d)", out) == [("1", "0"), ("2", "1"), ("3", "2")]


def test_rewards_metrics_and_times_are_told_and_markup_and_control_characters_shown_as_they_are(
    script: Commands,
) -> None:
    _, out, _ = script.run("try", "--n", "1", "--num_turns", "2", answers=("[red]\x1b[31m:smile:", "1<|im_end|>"))
    assert "reward    1 (right 1, short 0.5)" in out
    assert "metrics   turns 2" in out
    (first, second) = re.findall(r"turn \d +(\d+) tokens given, (\d+) sampled in [\d.]+ s.*, ended by (\w+)", out)
    assert (first[1:], second[1:]) == ((str(len(TOKENIZER.encode("[red]\x1b[31m:smile:"))), "stop"), ("2", "stop"))
    assert int(second[0]) > int(first[0])
    assert re.search(r"episode +[\d.]+ s, of which the model had [\d.]+ s in 2 turns", out)
    assert re.search(r"1 episode in [\d.]+ s: mean reward 1.000, 0 failed, 0 rejected", out)
    assert "⟦[red]␛[31m:smile:⟧" in out
    assert "[bold]Sure?[/bold]" in out
    assert "\x1b" not in out


def test_a_rejected_episode_shows_what_it_had_been_through(script: Commands) -> None:
    code, out, _ = script.run("try", "--n", "1", "--num_turns", "2", answers=("1", "reject<|im_end|>"))
    assert code == 0
    assert "assistant\n⟦1⟧<|im_end|>\n<|im_start|>user\n[bold]Sure?[/bold]<|im_end|>\n" in out
    assert "⟦reject<|im_end|>⟧" in out
    assert "rejected: arun_episode returned None" in out
    assert "0 failed, 1 rejected" in out


def test_an_error_has_the_traceback_of_the_scripts_code_and_is_told_once(
    script: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])  # as in a process that has set up no log: warnings go to stderr
    code, out, err = script.run("try", "--n", "1", answers=("raise",))
    assert code == 1
    assert "⟦raise⟧" in out
    assert 'raise RuntimeError("the tool broke")' in out
    assert str(script.script) in out
    assert "arl/rollout/episode.py" not in out
    assert "Traceback" not in err
    assert (out + err).count("RuntimeError: the tool broke") == 1


def test_the_examples_are_the_first_ones_of_the_split_and_no_more_than_there_are_and_not_all_have_to_succeed(
    script: Commands,
) -> None:
    _, out, _ = script.run("try", "--n", "1", "--split", "train")
    assert "Add: 50 + 1 = ?" in out
    assert "train example 0" in out
    code, out, _ = script.run("try", "--n", "7", answers=("raise", "2", "raise"))
    assert code == 0
    assert "2 failed" in out
    assert "episode 3 of 3" in out
    assert "there are no more held-out examples" in out


def test_requests_have_seeds_and_are_greedy_where_the_flags_say_so(script: Commands) -> None:
    for flags in (["--rollout.seed_requests"], ["--rollout.seed_requests"], [], ["--greedy"]):
        script.run("try", "--n", "2", *flags)
    seeds = [request.sampling.seed for request in script.requests]
    assert len({None, *seeds[:2]}) == 3
    assert seeds == [*seeds[:2], *seeds[:2], *[None] * 4]
    assert [request.sampling.temperature for request in script.requests] == [0.7] * 6 + [0.0] * 2


def test_nothing_of_a_training_run_in_the_same_directory_is_touched(script: Commands) -> None:
    run_dir = script.directory / "run"
    kept = run_dir / "checkpoints" / "version-3" / "state.json"
    kept.parent.mkdir(parents=True)
    kept.write_text("{}")
    (run_dir / "metrics.jsonl").write_text('{"version": 9}\n')
    script.run("try", "--n", "1")
    files = {str(path.relative_to(run_dir)): path.read_text() for path in run_dir.rglob("*") if path.is_file()}
    assert files == {"checkpoints/version-3/state.json": "{}", "metrics.jsonl": '{"version": 9}\n'}


# Weights -----------------------------------------------------------------------------------------------------------


def test_the_trained_model_is_served_with_all_else_as_it_was(script: Commands) -> None:
    for place, flags in (("run/trained", ["--trained"]), ("other", ["--trained", str(script.directory / "other")])):
        TOKENIZER.save_pretrained(script.directory / place)
        (script.directory / place / "config.json").write_text("{}")
        code, _, err = script.run("try", "--n", "1", *flags)
        assert code == 0
        assert f"serving {script.directory / place} with" in err


def test_the_weights_of_a_checkpoint_are_served_and_gone_afterwards(
    script: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ended somehow, without `trained`."""
    run_dir, model = script.directory / "stopped", write_tiny_model(script.directory / "tiny", shape=SMALL)
    write_run(run_dir, model)
    monkeypatch.setattr(tempfile, "tempdir", str(script.directory))
    served = list[dict[str, bytes]]()

    def answer(_: ModelRequest) -> str:
        served.append(contents(next(script.directory.glob("arl-weights-*/model"))))
        return "1<|im_end|>"

    for named, version in ((f"{run_dir}:1", 1), (str(run_dir), 2)):
        code, _, err = script.run("try", "--n", "1", "--checkpoint", named, answers=answer)
        assert code == 0
        assert f"serving version {version} of {run_dir} with" in err
        assert served[-1] == contents(run_dir / f"written {version}")
    assert list(script.directory.glob("arl-weights-*")) == []


# What cannot be run ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "code", "complaint"),
    [
        (["--trained"], 1, r"no trained model in .*/run/trained; train it first: python .*agent_\d+\.py"),
        (["--trained", "nowhere"], 1, "no trained model in nowhere; name the directory of a model"),
        (["--checkpoint", "nowhere"], 1, "nowhere is not a directory; name the run_dir of a run that has saved"),
        (["--checkpoint", "a:1", "--trained"], 2, "argument --trained: not allowed with argument --checkpoint"),
        (
            ["--checkpoint", ".", "--engine.kind", "sglang", "--engine.addresses", "http://a:9"],
            1,
            "--checkpoint starts servers for the trained weights",
        ),
        (["--num_held_out", "0"], 1, r"has no held-out examples \(Setup.eval_dataset\); take --split train"),
        (["--num_turnz", "2"], 2, "error: --num_turnz is not a setting; did you mean --num_turns"),
        (["--n", "0"], 2, r"^usage: arl try FILE \[options\] \[FILE's settings\]"),
    ],
)
def test_a_flag_that_cannot_be_honoured_is_told(
    script: Commands, flags: list[str], code: int, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(script.directory)
    Path("config.json").write_text("{}")  # of a model in this directory
    ended, _, err = script.run("try", "--n", "1", *flags)
    assert ended == code
    assert re.search(complaint, err)


TRAINS = "__import__('arl').train(model='m', dataset=[{'prompt': 'a'}], reward=lambda answer, data: 1.0)"


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("", "x = 1", "has no `experiment`; write at the top level of it: experiment = Experiment("),
        ("", "experiment = 3", "has a int for its `experiment`"),
        ("", TRAINS, "cannot be imported: ConfigError: it trains when it is loaded; put the line that trains under"),
        ("", "import nothing_here", "cannot be imported: ModuleNotFoundError: No module named 'nothing_here'"),
        ("", "raise SystemExit(3)", "SystemExit: 3; put the code that runs the script under `if __name__"),
        ("types.py", "", "the name of a loaded module"),
        ("readme.md", "", "this is not a Python file"),
        ("nowhere.py", None, "there is no file"),
    ],
)
def test_a_file_without_an_experiment_is_told_why(
    script: Commands, name: str, text: str | None, complaint: str
) -> None:
    file = script.directory / name if name else script.script
    if text is not None:
        file.write_text(text + "\n")
    code, _, err = script.command("try", str(file))
    assert code == 2
    assert complaint in err.splitlines()[-1]
    assert file.name in err.splitlines()[-1]
    assert not re.search("frozen importlib|arl/cli", err)
    assert (f'{file}", line 1' in err) is ("Error: " in complaint or "SystemExit" in complaint)


# Transcripts --------------------------------------------------------------------------------------------------------


def shown(passage: Passage) -> str:
    return rendered(passage, decode, brackets=True).plain


def passage(given: list[int], trained: list[int]) -> Passage:
    origins = (Origin.GIVEN,) * len(given) + (Origin.TRAINED,) * len(trained)
    return Passage(token_ids=(*given, *trained), origins=origins)


def test_a_character_whose_bytes_were_half_given_is_shown_whole() -> None:
    first, *rest = TOKENIZER.encode("é")
    assert shown(passage([*TOKENIZER.encode("caf"), first], [*rest, *TOKENIZER.encode("!")])) == "caf⟦é!⟧"


def test_spaces_between_words_are_those_of_the_whole_text() -> None:
    """Some tokenizers show a token's leading space only where it is not the first."""
    words = ["two", "three", "four"]
    text = rendered(
        Passage(token_ids=(0, 1, 2), origins=(Origin.GIVEN, Origin.TRAINED, Origin.SAMPLED)),
        lambda ids: " ".join(words[i] for i in ids),
        brackets=True,
    )
    assert text.plain == "two⟦ three⟧⟪ four⟫"


def test_tokens_that_another_trajectory_trains_are_marked() -> None:
    abc = trajectory((4, 4), token_ids=tuple(TOKENIZER.encode("abc")), loss_mask=(0, 0, 1))
    assert shown(passage_of(abc)) == "a⟪b⟫⟦c⟧"


def call(given: str, sampled: str) -> EngineCall:
    ids = tuple(TOKENIZER.encode(given)), tuple(TOKENIZER.encode(sampled))
    return EngineCall(input_ids=ids[0], output_ids=ids[1], elapsed_s=0.1, ended_by="stop")


def test_calls_that_continue_one_another_are_one_passage_and_others_are_their_own() -> None:
    calls = [call("q", "a"), call("other", "b"), call("qa next", "c"), call("qa next", "d")]
    assert [shown(found) for found in passages_of(calls)] == ["other⟦b⟧", "q⟦a⟧ next⟦c⟧", "q⟦a⟧ next⟦d⟧"]
    failed = call("qa next", "")
    assert [shown(found) for found in passages_of([calls[0], failed])] == ["q⟦a⟧ next"]


def test_lines_and_tabs_stay_and_other_control_characters_are_seen() -> None:
    assert visible("a\n\tb\r\x00\x7f\x9b") == "a\n\tb␍␀␡\N{REPLACEMENT CHARACTER}"
