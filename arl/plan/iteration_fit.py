"""Costs of the embedded server, from the times of iterations that it told itself (arl.api.events.ServerWorked).

iterations that only decode --> seconds by the number of requests --> DecodeCosts
iterations that read, less what they decode ------------------------> PrefillCosts
CPU seconds of the server's process, less all iterations -----------> PrefillCosts.per_request_s
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from arl.api.events import IterationSums, ServerWorked
from arl.plan.costs import DecodeCosts, PrefillCosts
from arl.plan.least_squares import robust
from arl.plan.run_life import RunLife

_NUMBER, _DECODED, _CONTEXT, _PROMPT, _BEGUN, _SECONDS = range(6)
_FEW = 4
"""Fewer iterations say nothing of how long one takes."""
_SURE = 10.0
"""The square of a coefficient by that of its standard error, from which on it is taken for real."""
_MUCH = 0.5
"""The share of the squared error that it has to take away, too: where it rises with the requests, both say the same."""
_UPPER = 4
"""Beyond the most requests that were measured, an iteration grows as it did from a quarter of these on."""


class IterationFit:
    """What the servers of a run told: rows of sums over the iterations between two tellings, [N, 6]."""

    def __init__(self, seen: RunLife) -> None:
        decoding, reading, self._overhead_s, self._begun = list[np.ndarray](), list[np.ndarray](), 0.0, 0.0
        for server in seen.servers:
            told = [record for record in seen.of_kind(ServerWorked) if record.server == server]
            for before, after in pairwise(told):
                rows = _between(before.iterations, after.iterations)
                decoding += [row for reads, row in rows if not reads]
                reading += [row for reads, row in rows if reads]
            self._note_overhead(seen, server, told)
        self._decoding, self._reading = np.array(decoding), np.array(reading)

    @property
    def tells(self) -> bool:
        return len(self._decoding) > 0 and len(self._reading) > 0

    @property
    def running(self) -> np.ndarray:
        """Requests of an iteration."""
        return self._decoding[:, _DECODED] / self._decoding[:, _NUMBER]

    @property
    def most_context(self) -> float:
        """Tokens that all running requests held at once."""
        return float((self._decoding[:, _CONTEXT] / self._decoding[:, _NUMBER]).max())

    def decode(self, most: int) -> DecodeCosts:
        """Up to `most` requests."""
        rows, running = self._decoding, self.running
        kinds = np.log2(running).astype(int)
        totals = np.array([rows[kinds == kind].sum(0) for kind in np.unique(kinds)])
        often = totals[totals[:, _NUMBER] >= min(_FEW, totals[:, _NUMBER].max())]
        places = often[:, _DECODED] / often[:, _NUMBER]
        # The curve between the places is straight: a row is a mean of two of them, and of its tokens of context.
        hats = np.array([np.interp(running, places, one) for one in np.eye(len(places))])
        columns = np.column_stack([hats.T, rows[:, _CONTEXT] / rows[:, _NUMBER]])
        seconds, per_context = _with_context(columns, rows[:, _SECONDS] / rows[:, _NUMBER], rows[:, _NUMBER])
        means = often[:, _SECONDS] / often[:, _NUMBER]  # in place of what few rows make absurd
        risen = _rising(np.where(seconds > 0, seconds, means), often[:, _NUMBER])
        slope = _slope(places, risen)
        first = max(risen[0] - slope * (places[0] - 1), risen[0] / places[0])
        points = {1: float(first)} | {max(round(n), 1): float(s) for n, s in zip(places.tolist(), risen, strict=True)}
        if most > max(points):
            points[most] = float(risen[-1] + slope * (most - places[-1]))
        return DecodeCosts(
            points=tuple(sorted(points.items())), per_context_token_s=per_context, max_running_requests=most
        )

    def prefill(self, decode: DecodeCosts, chunk_tokens: int) -> PrefillCosts:
        rows = self._reading
        decoded = rows[:, _DECODED] / rows[:, _NUMBER]
        base_s = np.where(decoded > 0, np.interp(decoded, *np.array(decode.points).T), 0.0)
        decode_s = rows[:, _NUMBER] * base_s + decode.per_context_token_s * rows[:, _CONTEXT]
        columns = np.column_stack([decode_s, rows[:, [_BEGUN, _PROMPT, _NUMBER]]])
        found, _ = robust(columns, rows[:, _SECONDS], (0, 1, 2, 3), _weights(rows), 1)
        _, per_request, per_token, base = map(float, found)
        per_request += self._overhead_s / self._begun if self._begun else 0.0
        if per_request + per_token + base <= 0:  # reading was never slower than decoding alone
            per_token = decode.points[-1][1] / decode.points[-1][0]
        return PrefillCosts(
            base_s=base,
            per_token_s=per_token,
            per_request_s=per_request,
            chunk_tokens=chunk_tokens,
            stops_decoding=False,
        )

    def _note_overhead(self, seen: RunLife, server: str, told: list[ServerWorked]) -> None:
        """What the server's process computed beside its iterations: HTTP, and the way of an answer."""
        used = seen.cpu(server)
        if used is None or len(told) < 2 or not all(record.is_cpu_time for record in told):
            return
        rows = [row for _, row in _between(told[0].iterations, told[-1].iterations)]
        total = np.sum(rows, axis=0) if rows else np.zeros(6)
        loads_s = sum(end - begin for begin, end in seen.pauses(server) if told[0].t <= begin < told[-1].t)
        spent_s = float(np.diff(np.interp([told[0].t, told[-1].t], *used))[0])
        self._overhead_s += max(spent_s - float(total[_SECONDS]) - loads_s, 0.0)
        self._begun += float(total[_BEGUN])


def _between(before: Sequence[IterationSums], after: Sequence[IterationSums]) -> list[tuple[bool, np.ndarray]]:
    """(reads, sums) of the iterations since. Nothing if the server began anew."""
    earlier = {_kind(sums): _values(sums) for sums in before}
    rows = [(sums.reads, _values(sums) - earlier.get(_kind(sums), 0.0)) for sums in after]
    if any((row < -1e-9).any() for _, row in rows):
        return []
    return [(reads, row) for reads, row in rows if row[_NUMBER] > 0 and row[_SECONDS] > 0]


def _kind(sums: IterationSums) -> tuple[bool, int]:
    return sums.reads, int(sums.decoded / sums.number).bit_length()


def _values(sums: IterationSums) -> np.ndarray:
    return np.array([sums.number, sums.decoded, sums.context, sums.prompt, sums.begun, sums.seconds])


def _weights(rows: np.ndarray) -> np.ndarray:
    """Rows of many iterations count more, but not as much more as they have."""
    return np.sqrt(rows[:, _NUMBER]) / np.sqrt(rows[:, _NUMBER]).sum()


def _rising(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The nearest values that never fall: neighbours that do are replaced by their mean."""
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        pools.append((value, weight, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, wa, na), (b, wb, nb) = pools[-2:]
            pools[-2:] = [((a * wa + b * wb) / (wa + wb), wa + wb, na + nb)]
    return np.array([value for value, _, count in pools for _ in range(count)])


def _with_context(columns: np.ndarray, seconds: np.ndarray, number: np.ndarray) -> tuple[np.ndarray, float]:
    """Coefficients of all columns but the last, and of the last, the context; 0 unless it explains much that the others
    do not. Relative errors are minimised."""
    scale = np.sqrt(number) / seconds
    scaled, wanted = columns * scale[:, None], seconds * scale
    plain, full = (np.linalg.lstsq(some, wanted, rcond=None)[0] for some in (scaled[:, :-1], scaled))
    error, less = (
        float(((some @ found - wanted) ** 2).sum()) for some, found in ((scaled[:, :-1], plain), (scaled, full))
    )
    spare = len(seconds) - columns.shape[1]
    if spare > 0 and full[-1] > 0 and error - less > max(_SURE * less / spare, _MUCH * error):
        return full[:-1], float(full[-1])
    return plain, 0.0


def _slope(numbers: np.ndarray, seconds: np.ndarray) -> float:
    """Seconds that an iteration takes longer for each further request."""
    upper = numbers >= numbers[-1] / _UPPER
    if upper.sum() < 2:
        return float(seconds[-1] / numbers[-1])
    return max(float(np.polyfit(numbers[upper], seconds[upper], 1)[0]), 0.0)
