"""A program that plays episodes of `arl serve`, from any machine. It needs only Python's standard library: copy it.

    export ARL_ENDPOINT_KEY=...  # the key that `arl serve` has
    python served_program.py http://HOST:8000

It asks the model the example's question, and gives 1 for the example's answer. Put your own agent and reward into
`play`: any client of OpenAI's or Anthropic's API works with the episode's `base_url` and `api_key`. Start as many as
you like.
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.error
import urllib.request
from http import HTTPStatus
from typing import Any

KEY = os.environ.get("ARL_ENDPOINT_KEY", "")
PATIENCE_S = 300.0
"""How long to wait for arl to start."""


def play(episode: dict[str, Any]) -> dict[str, Any]:
    """One episode; returns what to post as its end."""
    question = {"role": "user", "content": str(episode["example"]["question"])}
    said = post(f"{episode['base_url']}/chat/completions", {"messages": [question]}, episode["api_key"])
    answer = said["choices"][0]["message"]["content"] or ""
    return {"reward": float(answer.strip() == str(episode["example"]["answer"]))}


def main(url: str) -> None:
    began, num_played = time.monotonic(), 0
    while True:
        try:
            episode = post(f"{url}/episodes", {}, KEY)
        except HTTPError as refused:
            if refused.status == HTTPStatus.SERVICE_UNAVAILABLE:  # none is free now; arl has waited already
                continue
            if refused.status == HTTPStatus.GONE:
                break
            raise
        except OSError as error:  # arl has not begun to listen, or has ended
            if num_played:
                break
            if time.monotonic() - began > PATIENCE_S:
                raise SystemExit(f"{url} cannot be reached: {error}") from None
            time.sleep(0.2)
            continue
        end_with(f"{url}/episodes/{episode['id']}/end", episode)
        num_played += 1
    print(f"the run is over; this program played {num_played} episodes")


def end_with(url: str, episode: dict[str, Any]) -> None:
    """Play the episode and post its end, whatever happens."""
    try:
        end = play(episode)
    except Exception as error:  # noqa: BLE001 - arl counts it, and offers the episode to another program
        end = {"error": repr(error)}
    try:
        post(url, end, KEY)
    except HTTPError as refused:  # 410: the run took the episode back; 409: there was no call to train on
        print(f"{episode['id']}: {refused}", file=sys.stderr)
    except OSError as error:
        print(f"{episode['id']}: {error}", file=sys.stderr)


class HTTPError(Exception):
    """An answer that is no success."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text}")
        self.status = status


def post(url: str, body: dict[str, Any], key: str) -> Any:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=600) as response:
            return json.load(response)
    except urllib.error.HTTPError as refused:
        raise HTTPError(refused.code, refused.read().decode(errors="replace")) from None


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/"))
