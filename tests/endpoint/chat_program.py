"""A program as people have them: it knows of OpenAI's package and its environment, and of nothing else."""

import json
import os
import sys

from openai import OpenAI

example = json.load(sys.stdin)
with OpenAI() as client:
    messages = [{"role": "user", "content": example["question"]}]
    answer = client.chat.completions.create(model=os.environ.get("MODEL", "gpt"), messages=messages)
    messages += [answer.choices[0].message, {"role": "user", "content": "Sure?"}]
    with client.chat.completions.create(model="gpt", messages=messages, stream=True) as stream:
        sys.stdout.write("".join(chunk.choices[0].delta.content or "" for chunk in stream))
