"""Chats with images: the model sees what transformers' processor makes of them, and takes nothing else for an image."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from chat_templates import tokenizer_of
from scripted_answers import response_of
from sighted_chats import FAMILIES, SMALL, TALL, WIDE, directory_of, seeing, their_tokens
from talk import CALL, RESULT, SPEC, THOUGHT, Talk, calling, model, result, user

from arl.api.errors import ImageError, ModelError
from arl.api.fakes import ScriptedEngine
from arl.api.images import Image, PlacedImage
from arl.api.types import SamplingParams, Trajectory
from arl.data.image_processor import ImageProcessor
from arl.engine.tiny import IMAGE_PAD, VisionFamily
from arl.workflow.compacting import CompactingConversation, Compaction
from arl.workflow.conversation import Conversation, trajectories
from arl.workflow.dialogue import Dialogue, Prompt, Turn
from arl.workflow.messages import images_in

SEES: VisionFamily = "qwen3_vl"
PAD = seeing(SEES).get_vocab()[IMAGE_PAD]


def seen(*parts: Image | str, role: str = "user") -> dict[str, Any]:
    """A message of texts and images."""
    content = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image", "image": p} for p in parts]
    return {"role": role, "content": content}


def placed(ids: Sequence[int], images: Sequence[Image]) -> tuple[PlacedImage, ...]:
    """Each run of placeholders is an image."""
    starts = [i for i, token in enumerate(ids) if token == PAD and (not i or ids[i - 1] != PAD)]
    stops = [i + 1 for i, token in enumerate(ids) if token == PAD and ids[i + 1] != PAD]
    runs = zip(images, starts, stops, strict=True)
    return tuple(PlacedImage(image=image, start=start, stop=stop) for image, start, stop in runs)


def check_sees(prompt: Prompt, family: VisionFamily, messages: Sequence[Any], **options: Any) -> None:
    ids, images = their_tokens(family, messages, **options)
    assert list(prompt.input_ids) == ids
    assert prompt.all_images == placed(ids, images)


ASKED = [seen(SMALL, "What is this? And this: ", WIDE)]
TWO_TURNS = [*ASKED, model("A cat."), seen("And ", TALL, SMALL, "?")]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", [{}, {"add_vision_id": True}])
@pytest.mark.parametrize("messages", [ASKED, TWO_TURNS, [{"role": "system", "content": "Look."}, *TWO_TURNS]])
def test_a_prompt_is_what_transformers_makes_of_the_messages(
    family: VisionFamily, options: dict[str, Any], messages: list[Any]
) -> None:
    check_sees(Talk(seeing(family), **options).dialogue.prompt(messages), family, messages, **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_prompt_of_a_long_chat_is_that_of_the_whole_history(family: VisionFamily) -> None:
    rng, talk, turn = random.Random(0), Talk(seeing(family), add_vision_id=True), None
    said: list[Any] = []
    for number in range(12):
        said.append(seen(*(rng.choice((SMALL, WIDE, TALL, "a", "b ")) for _ in range(rng.randrange(1, 4)))))
        prompt = talk.dialogue.prompt(said, after=turn if rng.random() < 0.5 else None)
        check_sees(prompt, family, said, add_vision_id=True)
        assert (prompt.parent is None) == (number == 0)
        turn = talk.answer(prompt, f"answer {number}.")
        said.append(turn.message)


@pytest.mark.parametrize("where", ["user", "tool", "assistant", "prefill", "tools"])
def test_a_placeholder_that_somebody_wrote_is_text(where: str) -> None:
    dialogue = Talk(seeing(SEES)).dialogue
    wrote = f"see {IMAGE_PAD}!"
    messages: list[Any] = [seen(wrote, SMALL) if where == "user" else seen(SMALL)]
    if where == "assistant":
        messages += [model(wrote), user("?")]
    elif where == "tool":
        messages += [calling(), result(wrote)]
    spec = {**SPEC, "function": {**SPEC["function"], "description": wrote}}
    prompt = dialogue.prompt(
        messages, [spec] if where == "tools" else [SPEC], prefill=wrote if where == "prefill" else ""
    )
    (only,) = prompt.all_images
    assert [i for i, token in enumerate(prompt.input_ids) if token == PAD] == [*range(only.start, only.stop)]
    assert wrote in seeing(SEES).decode(list(prompt.input_ids))


def test_a_placeholder_that_the_model_samples_stays_a_token_and_is_no_image() -> None:
    talk = Talk(seeing(SEES))
    turn = talk.say(ASKED, f"I see {IMAGE_PAD}")
    assert PAD in turn.output_ids
    prompt = talk.prompt([*ASKED, turn.message, seen(TALL)], after=turn)
    assert prompt.parent is turn
    first, second, third = prompt.all_images
    assert (first.image, second.image, third.image) == (SMALL, WIDE, TALL)
    assert third.start > len(turn.token_ids) > second.stop
    check_trajectories(talk.dialogue, [turn, talk.answer(prompt, "ok")])


def check_trajectories(dialogue: Dialogue, turns: Sequence[Turn]) -> list[Trajectory]:
    """Each has its images where the model saw them, and all sampled tokens are trained, in one of them."""
    made = [*trajectories(dialogue.turns, 1.0)]
    for one in made:
        ids = [token if not sampled else -1 for token, sampled in zip(one.token_ids, one.versions >= 0, strict=True)]
        ImageProcessor(directory_of(SEES)).check(ids, one.images)
    assert sum(one.num_trained_tokens for one in made) == sum(len(turn.output_ids) for turn in turns)
    return made


def test_a_branch_has_the_images_of_its_own_messages() -> None:
    talk = Talk(seeing(SEES))
    first = talk.say(ASKED, f"{THOUGHT}{CALL}", {**calling(thought="hm")})
    second = talk.say([*ASKED, first.message, seen(TALL, role="tool")], f"{THOUGHT}done")
    asked = [*second.messages, seen("again ", SMALL)]
    third = talk.say(asked, "ok", message=None)  # the thinking of both turns is gone
    assert third.parent is None
    check_sees(third.prompt, SEES, asked, tools=[SPEC])
    long, new = check_trajectories(talk.dialogue, [first, second, third])
    assert [one.image for one in long.images] == [SMALL, WIDE, TALL]
    assert [one.image for one in new.images] == [SMALL, WIDE, TALL, SMALL]


def test_where_sampled_tokens_are_kept_in_view_images_are_numbered_on() -> None:
    dialogue = Dialogue(Talk(seeing(SEES), add_vision_id=True).dialogue.template, rewriting="keep")
    messages, turn = list[Any](), None
    for number, image in enumerate((SMALL, WIDE, TALL), start=1):
        messages.append(seen(image, "?"))
        prompt = dialogue.prompt(messages, after=turn)
        assert f"Picture {number}: <|vision_start|>" in seeing(SEES).decode(list(prompt.given_ids))
        turn = dialogue.record(prompt, response_of(seeing(SEES).encode(f"{THOUGHT}a cat<|im_end|>")))
        messages.append(turn.message)
    assert [one.image for one in prompt.all_images] == [SMALL, WIDE, TALL]


def test_equal_images_in_other_forms_continue_a_turn_and_other_images_do_not(tmp_path: Path) -> None:
    talk = Talk(seeing(SEES))
    turn = talk.say([seen(SMALL, "?")], "a cat")
    file = tmp_path / "small.png"
    file.write_bytes(SMALL.data)

    def parent(image: dict[str, Any]) -> Turn | None:
        return talk.parent([{"role": "user", "content": [image, "?"]}, turn.message, RESULT])

    assert parent({"type": "image_url", "image_url": {"url": SMALL.data_url, "detail": "high"}}) is turn
    assert parent({"type": "image", "path": str(file)}) is turn
    file.write_bytes(WIDE.data)
    assert parent({"type": "image", "path": str(file)}) is None
    assert parent({"type": "image", "image": TALL}) is None
    assert talk.parent([user("?"), turn.message, RESULT]) is None


def saying_ok(tokenizer: Any, *texts: str) -> ScriptedEngine:
    return ScriptedEngine.saying(tokenizer, *(texts or ("ok",)))


async def test_a_conversation_reads_a_file_when_it_gets_it(tmp_path: Path) -> None:
    """Screenshots may be written to one file."""
    file, engine = tmp_path / "screen.png", saying_ok(seeing(SEES), "one", "two")
    file.write_bytes(SMALL.data)
    chat = Conversation(seeing(SEES), [{"role": "user", "content": [{"type": "image", "path": str(file)}]}])
    file.write_bytes(WIDE.data)
    await chat.agenerate(engine, SamplingParams())
    chat.add({"role": "user", "content": [{"type": "image", "path": str(file)}]})
    file.unlink()
    await chat.agenerate(engine, SamplingParams())
    assert [[one.image for one in request.images] for request in engine.requests] == [[SMALL], [SMALL, WIDE]]
    assert images_in(chat.messages) == [SMALL, WIDE]
    (made,) = chat.trajectories(1.0)
    assert made.images == engine.requests[1].images


async def test_a_fresh_context_has_the_images_of_the_task_alone() -> None:
    tokenizer, compaction = (
        seeing(SEES),
        Compaction(
            context_length=300, summary_tokens=40, compact_at=100, instruction="Sum up.", handover="So far: {summary}"
        ),
    )
    chat = CompactingConversation(tokenizer, [seen(SMALL, "What?")], compaction)
    engine = saying_ok(tokenizer, "a", "the summary", "b")
    await chat.agenerate(engine, SamplingParams(max_new_tokens=20))
    chat.add(seen("x" * 100, TALL))
    await chat.agenerate(engine, SamplingParams(max_new_tokens=20))
    assert [[one.image for one in request.images] for request in engine.requests] == [[SMALL], [SMALL, TALL], [SMALL]]
    fresh = [seen(SMALL, "What?", f"\n\n{compaction.handover.replace('{summary}', 'the summary')}")]
    assert list(engine.requests[2].input_ids) == their_tokens(SEES, fresh)[0]


LOST = tokenizer_of("chatml")
HIDING = seeing("qwen2_5_vl").__class__.from_pretrained(directory_of("qwen2_5_vl"))
SHOWS = "part['type'] == 'image' or 'image' in part or 'image_url' in part"
HIDING.chat_template = HIDING.chat_template.replace(SHOWS, "loop.last and 'image' in part")


@pytest.mark.parametrize(
    ("tokenizer", "said", "error", "reason"),
    [
        (
            LOST,
            seen(SMALL),
            ImageError,
            "role .user. has an image, and .* this model has no place .* of texts. Use",
        ),
        (HIDING, seen("?", TALL, SMALL), ModelError, "shows 1 images of messages with 2"),
        (seeing(SEES), seen(SMALL, role="assistant"), ModelError, "models say texts alone"),
        (seeing(SEES), seen(Image.of(SMALL.picture().resize((9000, 2)))), ImageError, "cannot see Image.9000x2"),
    ],
)
def test_what_cannot_be_seen_is_an_error(tokenizer: Any, said: Any, error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        Talk(tokenizer).dialogue.prompt([said])


def test_a_tokenizer_without_a_directory_cannot_place_images() -> None:
    tokenizer = seeing(SEES).__class__.from_pretrained(directory_of(SEES))
    tokenizer.name_or_path = ""
    with pytest.raises(ImageError, match=r"load it from the model's directory with arl\.load_tokenizer"):
        Talk(tokenizer).prompt(ASKED)
