"""What the servers of a run cost: from the times of their iterations, or from turns and the time to compute them in.

Embedded servers tell the times (iteration_fit.py). Of others, turns say how long some iterations took together, and the
log how many requests ran meanwhile.
"""

from __future__ import annotations

import numpy as np

from arl.api.errors import RunFileError
from arl.api.events import TurnEnded
from arl.plan.costs import DecodeCosts, PrefillCosts
from arl.plan.iteration_fit import IterationFit
from arl.plan.least_squares import robust
from arl.plan.run_life import RunLife
from arl.plan.server_load import AnsweredRequests, CpuTimes, Measurements, ServerLoad

_ROUNDS, _EXACT = 30, 0.002
"""The costs say when the iterations of a request were, and from that the costs follow, and so on: so many rounds at
most, until they change by less than this share."""
_LATENCY_ROUNDS = 2
"""In each, requests are taken to come later to the server by the latency that was found."""
_SHARES = (0.03,)
"""Of the servers' time, that reading prompts may take: where the rounds may begin."""
_MOST_ROWS = 20_000
"""Turns that a fit looks at; of more, every Nth."""
_EMBEDDED_CHUNK = {"cpu": 512}
_CHUNK = 2048
"""The most prompt tokens that an iteration of the embedded server reads, elsewhere than on a CPU."""
_SGLANG_CHUNK, _SGLANG_RUNNING = 8192, 256
_SHORT_WAY = 0.1
"""Requests on whose way nobody else was: so many have a shorter one."""
NARROW = 0.15
"""Where a number varies by less than this share, what it costs cannot be told from what it does not cost."""


class ServerFit:
    """Fits the costs of all servers together: they are alike."""

    def __init__(self, seen: RunLife) -> None:
        self.seen = seen
        self.notes: list[str] = []
        self.running = np.array([])
        """Requests that one server ran at once, in parts of the run."""
        self.most_context = 0.0
        """Tokens that all of these held at once."""
        self._loads: list[Measurements] = []
        """By the costs that were found."""
        self._narrow = ""

    def costs(self) -> tuple[DecodeCosts, PrefillCosts, float]:
        """And the seconds of a request in which no server computes. Raises RunFileError without a whole answer."""
        told = IterationFit(self.seen)
        return self._told(told) if told.tells else self._guessed()

    def _told(self, told: IterationFit) -> tuple[DecodeCosts, PrefillCosts, float]:
        """From the times of iterations, which embedded servers tell."""
        decode = told.decode(self._most_running())
        self.running, self.most_context = told.running, told.most_context
        ways_s = self._ways_s()
        return decode, told.prefill(decode, self._chunk()), float(np.quantile(ways_s, _SHORT_WAY)) if ways_s else 0.0

    def _guessed(self) -> tuple[DecodeCosts, PrefillCosts, float]:
        """From the times of turns, and how many requests ran meanwhile."""
        is_cpu_time = self.seen.serves_on_cpu and self._used(self.seen.servers[0]) is not None
        ways_s = self._ways_s()
        is_told = is_cpu_time or bool(ways_s)
        found, error = self._settled(0.0, is_told)
        latency_s = float(np.quantile(ways_s, _SHORT_WAY)) if ways_s else float(found[6])
        for _ in range(0 if is_told else _LATENCY_ROUNDS):
            found, error = self._settled(latency_s, is_told)
            latency_s += float(found[6])
        self.notes += [self._narrow] * bool(self._narrow)
        loads = self._loads
        self.running = np.concatenate([load.running for load in loads])
        self.most_context = max(load.most_context for load in loads)
        seconds, done = (np.concatenate([load.slices[i] for load in loads]) for i in (0, 1))
        self.notes.append(
            f"turns, and all that servers did in parts of the run, took {100 * error:.0f} % more or less than the "
            f"servers' costs say (mean); these explain {100 * (done @ found[:6]).sum() / seconds.sum():.0f} % of "
            "their work"
        )
        per_iteration, per_sample, per_context, per_prompt, per_read, per_request, _ = map(float, found)
        most = self._most_running()
        points = tuple((n, per_iteration + n * per_sample) for n in sorted({1, most}))
        if not per_prompt and not per_read and not per_request:
            self.notes.append(
                "what reading prompts costs could not be told: a token read is taken to cost as one sampled"
            )
            per_prompt = per_sample or points[-1][1] / most
        return (
            DecodeCosts(points=points, per_context_token_s=per_context, max_running_requests=most),
            PrefillCosts(
                base_s=per_read,
                per_token_s=per_prompt,
                per_request_s=per_request,
                chunk_tokens=self._chunk(),
                stops_decoding=not self.seen.is_local,
            ),
            latency_s,
        )

    def _ways_s(self) -> list[float]:
        return [_way_s(turn) for turn in self.seen.calls if isinstance(turn, TurnEnded) and turn.server_s]

    def _load(self, server: str, latency_s: float) -> ServerLoad:
        """latency_s: of a request, before it comes to the server or after it has left it."""
        return ServerLoad(
            self._requests(server, latency_s),
            self.seen.pauses(server),
            self._used(server),
            self._most_running(),
            self._chunk(),
        )

    def _used(self, server: str) -> CpuTimes | None:
        """None unless it computes on the CPU with one thread, and only when it has to: SGLang's asks all the time."""
        is_told = self.seen.is_local and self.seen.serves_on_cpu and self.seen.num_threads("engine") == 1
        return self.seen.cpu(server) if is_told else None

    def _requests(self, server: str, latency_s: float) -> AnsweredRequests:
        """Those that were cut, whose server the log does not know, are shared out where there is but one server."""
        turns = [call for call in self.seen.calls if isinstance(call, TurnEnded)]
        own = [turn for turn in turns if turn.server == server or (not turn.server and len(self.seen.servers) == 1)]
        own.sort(key=_sent)
        return AnsweredRequests(
            begun=np.array([min(_sent(turn) + latency_s, turn.t) + _way_s(turn) / 2 for turn in own]),
            ended=np.array([turn.t - _way_s(turn) / 2 for turn in own]),
            prompt=np.array([turn.prompt for turn in own], float),
            computed=np.array([max(turn.prompt - turn.cached, 1) for turn in own], float),
            output=np.array([turn.output for turn in own], float),
            is_whole=np.array(
                [turn.sends == 1 and turn.output > 0 and turn.stop in ("stop", "length") for turn in own]
            ),
        )

    def _settled(self, latency_s: float, is_told: bool) -> tuple[np.ndarray, float]:
        """What `_found` gives where the costs that place the iterations of a request are those that follow from it."""
        loads = [self._load(server, latency_s) for server in self.seen.servers]
        self._loads = [load.measured() for load in loads]
        found, error = self._found(is_told)
        guess = found[:6]
        for _ in range(_ROUNDS):
            self._loads = [load.measured(guess) for load in loads]
            found, error = self._found(is_told)
            if np.allclose(guess, found[:6], rtol=_EXACT):
                break
            guess = (guess + found[:6]) / 2
        return found, error

    def _found(self, is_told: bool) -> tuple[np.ndarray, float]:
        """Seconds for each of server_load.COLUMNS, and for a turn whatever it does; the mean relative residual."""
        loads = self._loads
        stride = max(sum(len(load.turns[0]) for load in loads) // _MOST_ROWS, 1)
        seconds, columns = (np.concatenate([load.turns[i] for load in loads])[::stride] for i in (0, 1))
        sliced_s, sliced = (np.concatenate([load.slices[i] for load in loads]) for i in (0, 1))
        if not len(seconds):
            raise RunFileError("no turn of this run was answered whole, to learn the servers' costs from")
        # A turn also takes time in which no server computes, unless its process's time, or the server, told.
        waits = np.r_[np.full(len(seconds), 0.0 if is_told else 1.0), np.zeros(len(sliced))]
        rows = np.column_stack([np.concatenate([columns, sliced]), waits])
        self._tell_apart(rows, np.concatenate([load.running for load in loads]))
        weights = np.r_[_importance(columns), _importance(sliced)]
        # A CPU needs time for an iteration and for each request in it; a GPU may compute several as fast as one.
        num_needed = 2 if self.seen.serves_on_cpu else 1
        return robust(rows, np.r_[seconds, sliced_s], self._order(), weights, num_needed)

    def _order(self) -> tuple[int, ...]:
        """The columns by importance: a CPU computes for each token, a GPU mostly reads the weights for all."""
        return (1, 0, 5, 3, 2, 4) if self.seen.serves_on_cpu else (0, 1, 6, 3, 2, 4, 5)

    def _tell_apart(self, rows: np.ndarray, running: np.ndarray) -> None:
        """Leave out what cannot be told apart, of iterations and samples."""
        spread = float(running.std() / running.mean())
        if spread < NARROW:
            kept, other = ("request", 0) if self.seen.serves_on_cpu else ("iteration", 1)
            rows[:, other] = 0.0
            self._narrow = (
                f"always about {running.mean():.0f} requests ran at once (+- {100 * spread:.0f} %): what an iteration "
                f"costs, and what a request in it costs, could not be told apart; all of it is taken for the {kept}'s"
            )

    def _most_running(self) -> int:
        return int(self.seen.setting("engine", "max_running_requests", default=_SGLANG_RUNNING))

    def _chunk(self) -> int:
        if not self.seen.is_local:
            return _SGLANG_CHUNK
        return _EMBEDDED_CHUNK.get(str(self.seen.setting("engine", "device", default="cpu")), _CHUNK)


def _importance(columns: np.ndarray) -> np.ndarray:
    """[N] Rows of which there are few, by the requests that ran at once, count for more: else the usual number of
    requests decides, and other numbers are guessed. The sum is 1."""
    running = columns[:, 1] / np.maximum(columns[:, 0], 1e-9)
    kinds = np.log2(np.clip(running, 1.0, 2.0**20)).astype(int)
    importance = 1.0 / np.sqrt(np.bincount(kinds)[kinds])
    return importance / importance.sum()


def _sent(turn: TurnEnded) -> float:
    return turn.t - turn.seconds + turn.queued_s


def _way_s(turn: TurnEnded) -> float:
    """Seconds that a request and its answer were on their way, or waited for the controller; 0 if nothing tells."""
    return max(turn.seconds - turn.queued_s - turn.server_s, 0.0) if turn.server_s and turn.sends == 1 else 0.0
