"""How many tokens a second an inference server gives over HTTP, at 1, 8, 32, 64 and 128 requests at once.

Any server that speaks SGLang's or OpenAI's protocol, already running:

    python benchmarks/inference.py --url mine=http://127.0.0.1:30000 --url other=http://127.0.0.1:8000

or started here, one at a time and in turns, on a reference model built on the spot (Qwen3, 4 layers, hidden size 256,
vocabulary 128, float32, random weights):

    python benchmarks/inference.py --serve arl --serve vllm=VENV --serve sglang=VENV --threads 2 --rounds 3

Each of C clients sends requests one after another over a connection of its own: a random prompt, sampling at
temperature 1, end-of-sequence ignored, so that every answer has exactly the tokens asked for (which is checked). The
clock runs from the first request to the last answer and the client's own work is in it. Of several rounds the best
counts; the table's last columns are ratios to the server named last.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

VOCAB_SIZE = 128
_START_TIMEOUT_S = 180.0
_STOP_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Workload:
    """What each client asks for."""

    prompt_tokens: int
    new_tokens: int
    min_requests: int
    logprobs: bool

    def requests_each(self, concurrency: int) -> int:
        """Requests per client: a few, so that finished ones are replaced while others run."""
        return max(2, self.min_requests // concurrency)


@dataclass(frozen=True)
class Server:
    """A server to measure. command and environment are None for one that runs already."""

    name: str
    url: str
    command: list[str] | None = None
    environment: dict[str, str] | None = None


def build_request(url: str, is_sglang: bool, model: str, work: Workload, rng: random.Random) -> bytes:
    """One HTTP request, complete."""
    prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(work.prompt_tokens)]
    if is_sglang:
        sampling = {"max_new_tokens": work.new_tokens, "temperature": 1.0, "ignore_eos": True}
        path, body = "/generate", {"input_ids": prompt, "sampling_params": sampling, "return_logprob": work.logprobs}
    else:
        path = "/v1/completions"
        body = {"model": model, "prompt": prompt, "max_tokens": work.new_tokens, "temperature": 1.0, "ignore_eos": True}
        if work.logprobs:
            body["logprobs"] = 0
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


async def read_response(reader: asyncio.StreamReader) -> bytes:
    """The body of one response; raises RuntimeError if it is not a 200."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if b"transfer-encoding: chunked" in head:
        body = b""
        while size := int(await reader.readuntil(b"\r\n"), 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readexactly(2)
    else:
        length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
        body = await reader.readexactly(length)
    if b" 200 " not in head.split(b"\r\n")[0]:
        raise RuntimeError(f"the server answered {head.splitlines()[0].decode()}: {body[:500].decode()}")
    return body


async def run_client(url: str, requests: list[bytes]) -> list[bytes]:
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=1 << 24)
    bodies: list[bytes] = []
    for request in requests:
        writer.write(request)
        bodies.append(await read_response(reader))
    writer.close()
    return bodies


def num_output_tokens(body: bytes) -> int:
    answer = json.loads(body)
    return answer["meta_info"]["completion_tokens"] if "meta_info" in answer else answer["usage"]["completion_tokens"]


def measure(url: str, concurrency: int, work: Workload, seed: int) -> float:
    """Output tokens per second with `concurrency` clients."""
    is_sglang, model = identify(url)
    rng = random.Random(seed)
    warm_up, timed = (
        [[build_request(url, is_sglang, model, work, rng) for _ in range(each)] for _ in range(concurrency)]
        for each in (1, work.requests_each(concurrency))
    )

    async def run(clients: list[list[bytes]]) -> list[bytes]:
        answers = await asyncio.gather(*(run_client(url, requests) for requests in clients))
        return [body for bodies in answers for body in bodies]

    async def run_both() -> tuple[float, list[bytes]]:
        await run(warm_up)
        started = time.perf_counter()
        bodies = await run(timed)
        return time.perf_counter() - started, bodies

    elapsed_s, bodies = asyncio.run(run_both())
    counts = [num_output_tokens(body) for body in bodies]
    if set(counts) != {work.new_tokens}:
        raise RuntimeError(f"{url} answered {sorted(set(counts))} tokens where {work.new_tokens} were asked for")
    return sum(counts) / elapsed_s


def identify(url: str) -> tuple[bool, str]:
    """Whether a server speaks SGLang's protocol, and its model's name."""
    try:
        with urllib.request.urlopen(f"{url}/model_info", timeout=10):
            return True, "default"
    except urllib.error.HTTPError:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as answer:
            return False, json.load(answer)["data"][0]["id"]


def build_reference_model(directory: Path) -> Path:
    """Qwen3 with about 3.2 million random parameters, and a tokenizer of the words t0 .. t127."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        eos_token_id=1,
        bos_token_id=None,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCAB_SIZE)}, unk_token="t2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="t0", eos_token="t1", unk_token="t2")
    fast.save_pretrained(directory)
    return directory


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def server_to_start(spec: str, model: Path, threads: int) -> Server:
    """`arl`, `sglang=VENV` or `vllm=VENV` as a command."""
    kind, _, venv = spec.partition("=")
    port = free_port()
    threads_only = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    python = f"{venv}/bin/python"
    if kind == "arl":
        command = [sys.executable, "-m", "arl.engine.local", "--model", str(model), "--port", str(port)]
        return Server(kind, f"http://127.0.0.1:{port}", [*command, "--num-threads", str(threads)], threads_only)
    if kind == "sglang" and venv:
        command = [python, "-m", "sglang.launch_server", "--model-path", str(model), "--port", str(port)]
        on_cpu = (
            "--device cpu --dtype float32 --attention-backend torch_native --sampling-backend pytorch "
            "--grammar-backend none --disable-overlap-schedule --cuda-graph-backend-decode disabled "
            "--cuda-graph-backend-prefill disabled --mem-fraction-static 0.1 --max-total-tokens 65536 "
            "--max-running-requests 128"
        )
        return Server(kind, f"http://127.0.0.1:{port}", [*command, *on_cpu.split()], threads_only)
    if kind == "vllm" and venv:
        command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
        options = ["--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "128", "--disable-log-stats"]
        on_cpu = {**threads_only, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        return Server(kind, f"http://127.0.0.1:{port}", [*command, *options], on_cpu)
    raise SystemExit(f"--serve is {spec!r}; it must be arl, sglang=VENV or vllm=VENV")


@contextlib.contextmanager
def running(server: Server, logs: Path) -> Iterator[None]:
    """Start a server if it is to be started, wait until it is healthy, and stop it and all it started."""
    if server.command is None:
        yield
        return
    log = logs / f"{server.name}.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            server.command,
            stdout=output,
            stderr=output,
            env={**os.environ, **(server.environment or {})},
            start_new_session=True,
        )
    try:
        _wait_until_healthy(server, process, log)
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_TIMEOUT_S)


def _wait_until_healthy(server: Server, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"{server.name} ended with code {process.returncode}:\n{log.read_text()[-2000:]}")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{server.url}/health", timeout=5):
            return
        time.sleep(0.25)
    raise SystemExit(f"{server.name} was not healthy within {_START_TIMEOUT_S} s:\n{log.read_text()[-2000:]}")


def print_table(best: dict[str, dict[int, float]], concurrencies: list[int]) -> None:
    names = list(best)
    base = names[-1]
    ratios = [f"{name} / {base}" for name in names[:-1]]
    print(f"\n{'concurrent requests':>20}", *(f"{title:>18}" for title in [*names, *ratios]))
    for concurrency in concurrencies:
        row = [best[name][concurrency] for name in names]
        cells = [f"{value:>18,.0f}" for value in row] + [f"{value / row[-1]:>18.2f}" for value in row[:-1]]
        print(f"{concurrency:>20}", *cells)
    print("output tokens per second, best of all rounds")


def main() -> None:
    parser = argparse.ArgumentParser(description="Output tokens per second of inference servers, over HTTP.")
    add = parser.add_argument
    add("--url", action="append", default=[], metavar="NAME=URL", help="a server that runs already; may be repeated")
    add("--serve", action="append", default=[], metavar="WHAT", help="arl, sglang=VENV or vllm=VENV; may be repeated")
    add("--model", type=Path, help="what to serve; a reference model built on the spot when not given")
    add("--threads", type=int, default=os.cpu_count() or 1, help="CPU threads of the servers that are started")
    add("--concurrency", type=int, nargs="+", default=[1, 8, 32, 64, 128])
    add("--rounds", type=int, default=3, help="how often each server is measured, in turns")
    add("--prompt-tokens", type=int, default=16)
    add("--new-tokens", type=int, default=64)
    add("--min-requests", type=int, default=16, help="requests per measurement, at least; never below two per client")
    add("--logprobs", action="store_true", help="ask for the log-probability of each token, as training does")
    args = parser.parse_args()
    if not args.url and not args.serve:
        parser.error("nothing to measure; give --url NAME=URL or --serve WHAT")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a server that was started is stopped
    work = Workload(args.prompt_tokens, args.new_tokens, args.min_requests, args.logprobs)
    with tempfile.TemporaryDirectory() as scratch:
        model = args.model or (build_reference_model(Path(scratch, "model")) if args.serve else Path())
        servers = [Server(name, url) for name, _, url in (spec.partition("=") for spec in args.url)]
        servers += [server_to_start(spec, model.absolute(), args.threads) for spec in args.serve]
        best: dict[str, dict[int, float]] = {server.name: {} for server in servers}
        for number in range(args.rounds):
            for server in servers:
                with running(server, Path(scratch)):
                    for concurrency in args.concurrency:
                        speed = measure(server.url, concurrency, work, seed=number)
                        best[server.name][concurrency] = max(speed, best[server.name].get(concurrency, 0.0))
                        print(f"round {number} {server.name:>12} {concurrency:>4}: {speed:>8,.0f} tokens/s", flush=True)
    print_table(best, args.concurrency)


if __name__ == "__main__":
    main()
