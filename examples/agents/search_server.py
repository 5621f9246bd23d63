"""A search engine: BM25 over a corpus, its HTTP server, and a client for agents.

    python examples/agents/search_server.py --corpus corpus.jsonl --port 8100

serves a corpus of one document a line, {"title": ..., "text": ...}. The API is that of Search-R1's retrieval server, so
either can replace the other:

    POST /retrieve   {"queries": ["Mira Tovel"], "topk": 2, "return_scores": true}
    200              {"result": [[{"document": {"id": "7", "contents": "\\"Mira Tovel\\"\\na painter"}, "score": 7.1}]]}
    400              {"error": "what is wrong with the request"}

A query's documents come best first. topk is 3 if it is not given. A query returns fewer documents if fewer share a word
with it.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self

import bm25s
from aiohttp import ClientError, ClientSession, ClientTimeout, web

from arl import ArlError, load_dataset

MAX_QUERIES, MAX_TOPK = 64, 100


@dataclass(frozen=True, slots=True)
class Document:
    title: str
    text: str

    @property
    def contents(self) -> str:
        return f'"{self.title}"\n{self.text}'

    @classmethod
    def from_contents(cls, contents: str) -> Document:
        title, _, text = contents.partition("\n")
        return cls(title.strip('"'), text)


class Index:
    """BM25 over titles and texts. A title counts twice, so that a document about a thing precedes mentions of it."""

    def __init__(self, documents: Sequence[Document]) -> None:
        """Raises ArlError if there are no documents, or if none has a word."""
        self.documents = documents
        texts = [_words(f"{document.title}\n{document.title}\n{document.text}") for document in documents]
        if not any(texts):
            raise ArlError(f"the corpus has {len(documents)} documents and no words; there is nothing to search")
        self._bm25 = bm25s.BM25()
        self._bm25.index(texts, show_progress=False)

    def search(self, query: str, topk: int) -> list[tuple[int, float]]:
        """(number of the document, score), best first, for at most `topk` documents that share a word with the
        query."""
        words = _words(query)
        numbers, scores = self._bm25.retrieve([words], k=min(topk, len(self.documents)), show_progress=False)
        return [(int(number), float(score)) for number, score in zip(numbers[0], scores[0], strict=True) if score > 0]

    def best(self, query: str, topk: int) -> list[Document]:
        return [self.documents[number] for number, _ in self.search(query, topk)]


def _words(text: str) -> list[str]:
    tokens = bm25s.tokenize([text], stopwords="en", return_ids=False, show_progress=False)
    return [str(word) for word in tokens[0]]


@asynccontextmanager
async def serve(index: Index, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """Serve the index in this event loop, with searches on threads, and yield the server's URL. port 0: any free port.

    Raises ArlError if the port is taken.
    """

    async def retrieve(request: web.Request) -> web.Response:
        try:
            queries, topk, with_scores = _asked(await request.json())
        except ValueError as error:
            return web.json_response({"error": str(error)}, status=400)
        found = await asyncio.to_thread(lambda: [index.search(query, topk) for query in queries])
        answers = [[_document(index, number, score, with_scores) for number, score in hits] for hits in found]
        return web.json_response({"result": answers})

    app = web.Application()
    app.router.add_post("/retrieve", retrieve)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise ArlError(f"no search server can listen on {host}:{port}: {error}; choose another port") from error
        yield f"http://{host}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def _asked(body: Any) -> tuple[list[str], int, bool]:
    """Raises ValueError, whose message goes to the client."""
    match body:
        case {"queries": [*queries]} if queries and all(isinstance(query, str) for query in queries):
            pass
        case _:
            raise ValueError('the body must be an object with "queries", a list of one or more strings')
    topk = body.get("topk")
    topk = 3 if topk is None else topk
    if len(queries) > MAX_QUERIES or not isinstance(topk, int) or not 1 <= topk <= MAX_TOPK:
        raise ValueError(f"at most {MAX_QUERIES} queries at once, and topk from 1 to {MAX_TOPK}")
    return queries, topk, bool(body.get("return_scores"))


def _document(index: Index, number: int, score: float, with_scores: bool) -> dict[str, Any]:
    document = {"id": str(number), "contents": index.documents[number].contents}
    return {"document": document, "score": score} if with_scores else document


class SearchEngine:
    """Searches over HTTP within `async with`: asks the server at `url`, or starts a server for `index`."""

    def __init__(self, *, url: str | None = None, index: Index | None = None, timeout_s: float = 30.0) -> None:
        if (url is None) == (index is None):
            raise ValueError("give the url of a running search server, or an index to serve")
        self._url, self._index = url, index
        self._timeout = ClientTimeout(total=timeout_s)
        self._session: ClientSession | None = None
        self._opened = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as opening:
            url = self._url or await opening.enter_async_context(serve(self._index))  # pyright: ignore[reportArgumentType]
            self._session = await opening.enter_async_context(
                ClientSession(url.removesuffix("/retrieve").rstrip("/") + "/", timeout=self._timeout)
            )
            self._opened = opening.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._session = None
        await self._opened.aclose()

    async def search(self, query: str, topk: int) -> list[Document]:
        """The best documents, best first. Raises ArlError if the server is gone or its answer is malformed."""
        if self._session is None:
            raise ArlError("the search engine is not open; search within `async with`")
        asked = {"queries": [query], "topk": topk, "return_scores": True}
        try:
            async with self._session.post("retrieve", json=asked) as response:
                if response.status != 200:
                    raise ArlError(f"{response.url} answered {response.status}: {(await response.text())[:500]}")
                (hits,) = (await response.json())["result"]
                return [Document.from_contents(hit["document"]["contents"]) for hit in hits]
        except (ClientError, TimeoutError) as error:
            raise ArlError(f"the search server cannot be reached: {error!r}; is --search_url right?") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ArlError(f"the search server's answer is not that of /retrieve: {error!r}") from error


async def main(args: argparse.Namespace) -> None:
    rows = load_dataset(args.corpus, columns=("title", "text"))
    index = await asyncio.to_thread(Index, [Document(str(row["title"]), str(row["text"])) for row in rows])
    async with serve(index, args.host, args.port) as url:
        print(f"searching {len(rows)} documents at {url}/retrieve", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", required=True, help="a .jsonl, .json or .parquet file with columns title and text")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8100)
    try:
        asyncio.run(main(parser.parse_args()))
    except ArlError as error:
        parser.exit(1, f"error: {error}\n")
    except KeyboardInterrupt:
        parser.exit(130)
