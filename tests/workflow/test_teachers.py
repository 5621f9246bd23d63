"""Teachers and reward models behind a URL: requests, answers that are refused, and failures that are retried."""

import asyncio
from collections import deque
from typing import Any

import pytest
from served import BREAK, Served, language_model, reward_model
from still_clock import still_clock

from arl.api.errors import ModelError, RequestTimeoutError, RewardError, RewardTimeoutError, ServerError
from arl.engine.tiny import tiny_tokenizer
from arl.runtime.http import client as web_client
from arl.workflow.teachers import RewardModelClient, TeacherClient

TOKENS = (7, 8, 9, 10)


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_client, "_FIRST_WAIT_S", 0.001)


def answering_in_turn(served: Served, *answers: Any) -> None:
    """/generate answers with these, and then as it did before."""
    usual, left = served.answers["/generate"], deque(answers)
    served.answers["/generate"] = lambda body: left.popleft() if left else usual(body)


async def test_every_token_but_the_first_has_the_teachers_logprob_from_a_start_on() -> None:
    async with language_model() as served, TeacherClient(served.url, api_key="secret") as teacher:
        for start, expected in ((1, (0.0, -0.08, -0.09, -0.1)), (3, (0.0, 0.0, 0.0, -0.1))):
            assert await teacher.logprobs(TOKENS, start=start) == expected
            _, body = served.asked[-1]
            assert body["sampling_params"] == {"max_new_tokens": 0, "temperature": 1.0}
            assert (body["return_logprob"], body["logprob_start_len"]) == (True, start - 1)
        assert await teacher.logprobs((7,)) == (0.0,)
        with pytest.raises(ValueError, match="at least 1"):
            await teacher.logprobs(TOKENS, start=0)
        assert (served.count("/generate"), set(served.keys)) == (2, {"Bearer secret"})


async def test_the_vocabularys_last_token_may_be_told_as_0_and_no_other_token() -> None:
    async with language_model() as served, TeacherClient(served.url) as teacher:
        entries = [[None, 7, None], [-1.0, 0, None], [-2.0, 8, None], [-3.0, 0, None]]
        answering_in_turn(served, *[{"meta_info": {"input_token_logprobs": entries}}] * 3)
        assert await teacher.logprobs((7, 499, 8, 499)) == (0.0, -1.0, -2.0, -3.0)
        for tokens, sent, told in (((7, 499, 9, 499), 9, 8), ((7, 5, 8, 499), 5, 0)):
            with pytest.raises(ServerError, match=f"was sent token {sent} and gave the logprob of token {told}"):
                await teacher.logprobs(tokens)


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        ({"meta_info": {}}, "without input_token_logprobs"),
        ({"meta_info": {"input_token_logprobs": [[None, 8, None]]}}, "logprobs of 1 tokens for 4"),
        (
            {"meta_info": {"input_token_logprobs": [[None, 7, None], [None, 8, None], [-1, 9, None], [-1, 10, None]]}},
            "not a finite number",
        ),
        (
            {"meta_info": {"input_token_logprobs": [[None, 7], [-(10**400), 8], [-1, 9], [-1, 10]]}},
            "not a finite number",
        ),
        ([1], "without input_token_logprobs"),
    ],
)
async def test_an_answer_that_is_not_about_these_tokens_is_an_error_with_the_url(answer: Any, sentence: str) -> None:
    async with language_model() as served, TeacherClient(served.url, retries=0) as teacher:
        answering_in_turn(served, answer)
        with pytest.raises(ServerError, match=sentence) as caught:
            await teacher.logprobs(TOKENS)
        assert served.url.rstrip("/") in str(caught.value)


async def test_failures_of_the_server_are_borne_and_refusals_are_not() -> None:
    async with language_model() as served, TeacherClient(served.url, retries=2) as teacher:
        answering_in_turn(served, (503, {"error": {"message": "loading"}}), BREAK)
        assert len(await teacher.logprobs(TOKENS)) == 4
        assert served.count("/generate") == 3
        answering_in_turn(served, *[(500, {"error": {"message": "out of memory"}})] * 3)
        with pytest.raises(ServerError, match="HTTP 500: out of memory"):
            await teacher.logprobs(TOKENS)
        assert served.count("/generate") == 6
        answering_in_turn(served, (400, {"error": {"message": "too long"}}))
        with pytest.raises(ServerError, match="HTTP 400: too long"):
            await teacher.logprobs(TOKENS)
        assert served.count("/generate") == 7


async def test_a_server_that_is_away_or_has_another_model_or_key_is_noticed_before_the_first_episode() -> None:
    async with language_model() as served:
        url = served.url
        served.answers["/model_info"] = lambda _: (401, {"error": "Unauthorized"})
        with pytest.raises(ServerError, match="pass the api_key"):
            async with TeacherClient(url):
                pytest.fail("it was let in")
    with pytest.raises(
        ServerError, match=rf"{url.rstrip('/')}.* could not be reached: .*; is its server.*asked 2 times"
    ):
        async with TeacherClient(url, retries=1):
            pytest.fail("it was let in")
    async with reward_model() as served:
        with pytest.raises(ModelError, match="a teacher must be a language model"):
            async with TeacherClient(served.url):
                pytest.fail("it was let in")


@pytest.mark.parametrize("kind", [TeacherClient, RewardModelClient])
async def test_an_answer_that_takes_too_long_is_a_named_timeout(kind: Any) -> None:
    asked, never = asyncio.Event(), asyncio.Event()

    async def hang(body: Any) -> Any:
        asked.set()
        await never.wait()
        return {}

    is_teacher = kind is TeacherClient
    async with language_model() if is_teacher else reward_model() as served:
        served.answers["/generate" if is_teacher else "/classify"] = hang
        with still_clock() as passes:
            async with kind(served.url, timeout_s=0.2) as client:
                call = asyncio.create_task(client.logprobs(TOKENS) if is_teacher else client.score(TOKENS))
                await asked.wait()
                await passes(0.2)
                with pytest.raises(RequestTimeoutError if is_teacher else RewardTimeoutError, match=r"timeout_s=0\.2"):
                    await call
        never.set()


async def test_episodes_share_few_connections_and_one_greeting() -> None:
    async with language_model() as served, TeacherClient(served.url, max_concurrent=3) as teacher:
        usual, tasks = served.answers["/generate"], list[Any]()
        gate = asyncio.Event()

        async def wait_for_the_gate(body: Any) -> Any:
            if served.running == 3:
                gate.set()
            await gate.wait()
            return usual(body)

        served.answers["/generate"] = wait_for_the_gate
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(teacher.logprobs((1, 2, i))) for i in range(1, 200)]
        assert [task.result()[2] for task in tasks] == [-i / 100 for i in range(1, 200)]
        assert served.most_running == 3
        assert len(served.peers) <= 3
        assert served.count("/model_info") == 1


async def test_a_token_that_the_teacher_does_not_have_is_never_sent() -> None:
    async with language_model(vocab_size=100) as served, TeacherClient(served.url) as teacher:
        for tokens in ((1, 100), (1, -1)):
            with pytest.raises(ModelError, match="knows only 100 tokens"):
                await teacher.logprobs(tokens)
        assert served.count("/generate") == 0


async def test_a_teacher_that_does_not_tell_its_vocabulary_is_compared_by_a_tokenizer() -> None:
    tokenizer, other = tiny_tokenizer(), tiny_tokenizer(["a phrase"])
    async with language_model() as served:
        served.answers["/model_info"] = lambda _: {"is_generation": True}
        served.answers["/tokenize"] = lambda body: {
            "tokens": tokenizer.encode(body["prompt"], add_special_tokens=body["add_special_tokens"])
        }
        with pytest.raises(ModelError, match="pass the tokenizer"):
            async with TeacherClient(served.url):
                pytest.fail("it was let in")
        with pytest.raises(ModelError, match="another vocabulary than the given tokenizer"):
            async with TeacherClient(served.url, tokenizer=other):
                pytest.fail("it was let in")
        async with TeacherClient(served.url, tokenizer=tokenizer) as teacher:
            assert len(await teacher.logprobs(TOKENS)) == 4
            with pytest.raises(ModelError, match=f"knows only {len(tokenizer)} tokens"):
                await teacher.logprobs((1, len(tokenizer)))


def test_a_client_serves_one_event_loop_after_another() -> None:
    async def once(teacher: TeacherClient) -> None:
        async with language_model() as served:
            teacher._base = served.url.rstrip("/")
            assert len(await teacher.logprobs(TOKENS)) == 4
            await teacher.aclose()
            await teacher.aclose()

    teacher = TeacherClient("http://nowhere")
    asyncio.run(once(teacher))
    asyncio.run(once(teacher))


@pytest.mark.parametrize(
    ("info", "error"),
    [((500, {"error": {"message": "starting"}}), ServerError), ({"is_generation": False}, ModelError)],
)
async def test_calls_that_wait_for_the_greeting_share_its_failure(info: Any, error: type[Exception]) -> None:
    async with language_model() as served:
        teacher = TeacherClient(served.url, retries=0)
        served.answers["/model_info"] = lambda _: info
        answers = await asyncio.gather(*(teacher.logprobs(TOKENS) for _ in range(5)), return_exceptions=True)
        assert [isinstance(answer, error) for answer in answers] == [True] * 5
        assert served.count("/model_info") == 1
        await teacher.aclose()


# Reward models --------------------------------------------------------------------------------------------------------


async def test_a_sequence_has_the_score_that_the_model_gives_it() -> None:
    async with reward_model() as served, RewardModelClient(served.url, api_key="k") as judge:
        assert [await judge.score((1, 2, 3)), await judge.score([4])] == [6.0, 4.0]
        assert served.asked == [("/model_info", None), *(("/classify", {"input_ids": ids}) for ids in ([1, 2, 3], [4]))]
        assert set(served.keys) == {"Bearer k"}


@pytest.mark.parametrize(
    "answer",
    [
        {"embedding": [0.1, 0.9]},
        {"embedding": [None]},
        {"embedding": 1.0},
        {"score": 1},
        [1.0],
        {"embedding": []},
        {"embedding": [10**400]},
    ],
)
async def test_only_one_finite_number_is_a_reward(answer: Any) -> None:
    async with reward_model() as served, RewardModelClient(served.url) as judge:
        served.answers["/classify"] = lambda _: answer
        with pytest.raises(RewardError, match="a reward is one finite number") as caught:
            await judge.score((1, 2))
        assert served.url.rstrip("/") in str(caught.value)


async def test_refusals_failures_and_absence_are_reward_errors_that_say_why() -> None:
    async with reward_model() as served, RewardModelClient(served.url, retries=1) as judge:
        served.answers["/classify"] = lambda _: (400, {"error": {"message": "longer than the context"}})
        with pytest.raises(RewardError, match="HTTP 400: longer than the context"):
            await judge.score((1, 2))
        assert served.count("/classify") == 1
        served.answers["/classify"] = lambda _: (500, {"error": {"message": "broken"}})
        with pytest.raises(RewardError, match="HTTP 500: broken"):
            await judge.score((1, 2))
        assert served.count("/classify") == 3
        with pytest.raises(RewardError, match="knows only 500 tokens"):
            await judge.score((1, 500))
        with pytest.raises(RewardError, match="nothing to score"):
            await judge.score(())
        served.answers["/classify"] = lambda _: BREAK
        with pytest.raises(RewardError, match="could not be reached"):
            await judge.score((1, 2))


async def test_a_language_model_is_no_judge() -> None:
    async with language_model() as served:
        with pytest.raises(ModelError, match="--is-embedding"):
            async with RewardModelClient(served.url):
                pytest.fail("it was let in")
        judge = RewardModelClient(served.url)
        with pytest.raises(RewardError, match="--is-embedding"):
            await judge.score((1, 2))
        await judge.aclose()
