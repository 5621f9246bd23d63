"""The search engine: BM25 ranks, the server's protocol, and what agents hear when it is away."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import search_server
from aiohttp import ClientSession
from search_server import Document, Index, SearchEngine, serve

from arl.api.errors import ArlError

DOCUMENTS = [
    Document("Amber Harp", "a novel by Mira Tovel"),
    Document("Mira Tovel", "a painter born in Kelmora"),
    Document("Jon Tovel", "a writer taught by Mira Tovel"),
    Document("Kelmora", "a town on the river Sarn"),
]


@pytest.fixture(scope="module")
def index() -> Index:
    return Index(DOCUMENTS)


def test_a_document_about_a_name_comes_before_those_that_mention_it(index: Index) -> None:
    titles = [document.title for document in index.best("who is Mira Tovel", 3)]
    assert titles[0] == "Mira Tovel"
    assert set(titles) == {"Mira Tovel", "Jon Tovel", "Amber Harp"}


@pytest.mark.parametrize(
    ("query", "titles"), [("Sarn", ["Kelmora"]), ("xylophone", []), ("", []), ("the of a", []), ("?!", [])]
)
def test_only_documents_with_a_word_of_the_query_are_found(index: Index, query: str, titles: list[str]) -> None:
    assert [document.title for document in index.best(query, 50)] == titles


async def test_the_server_answers_in_search_r1s_form(index: Index) -> None:
    async with serve(index) as url, ClientSession() as session:
        asked: dict[str, Any] = {"queries": ["Sarn", "Kelmora"], "topk": 1}
        async with session.post(f"{url}/retrieve", json=asked) as response:
            found = {"id": "3", "contents": '"Kelmora"\na town on the river Sarn'}
            assert (await response.json()) == {"result": [[found], [found]]}
        async with session.post(f"{url}/retrieve", json=asked | {"return_scores": True}) as response:
            hit = (await response.json())["result"][0][0]
            assert hit["document"] == found
            assert hit["score"] > 0


MANY = json.dumps({"queries": ["Sarn"] * 65})
TOPKS = [f'{{"queries": ["Sarn"], "topk": {topk}}}' for topk in ("0", '"2"', "101")]


@pytest.mark.parametrize(
    "body", ["no json", "[]", '{"queries": []}', '{"queries": [1]}', '{"queries": "Sarn"}', MANY, *TOPKS]
)
async def test_a_request_that_makes_no_sense_is_refused_with_the_reason(index: Index, body: str) -> None:
    async with serve(index) as url, ClientSession() as session, session.post(f"{url}/retrieve", data=body) as response:
        assert response.status == 400
        assert (await response.json())["error"]


async def test_an_engine_over_an_index_has_a_server_of_its_own_while_it_is_open(index: Index) -> None:
    engine = SearchEngine(index=index)
    for _ in range(2):
        async with engine:
            assert await engine.search("Sarn", 2) == [DOCUMENTS[3]]
            with pytest.raises(ArlError, match=r"answered 400: .*topk from 1 to 100"):
                await engine.search("Sarn", 1000)
    with pytest.raises(ArlError, match="not open"):
        await engine.search("Sarn", 2)


@pytest.mark.parametrize("ending", ["", "/", "/retrieve"])
async def test_an_engine_searches_a_server_and_names_the_flag_when_it_is_away(index: Index, ending: str) -> None:
    async with serve(index) as url, SearchEngine(url=url + ending) as engine:
        assert await engine.search("Amber Harp", 1) == [DOCUMENTS[0]]
    async with engine:
        with pytest.raises(ArlError, match="--search_url"):
            await engine.search("Sarn", 1)


async def test_the_server_runs_as_a_program_of_its_own(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"title": d.title, "text": d.text}) + "\n" for d in DOCUMENTS))
    command = [sys.executable, search_server.__file__, "--corpus", str(corpus), "--port", "0"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        assert line.startswith("searching 4 documents at http://127.0.0.1:")
        async with SearchEngine(url=line.split()[-1]) as engine:
            assert await engine.search("Sarn", 1) == [DOCUMENTS[3]]
    finally:
        process.terminate()
        await process.wait()
