"""The slow, obvious twin of SimulatedServer: it computes one iteration at a time, and each token of it."""

from math import inf

from arl.plan.batching import ServerRequest
from arl.plan.costs import DecodeCosts, PrefillCosts


class Held:
    """A request, and the version of each token that it has got."""

    def __init__(self, request: ServerRequest) -> None:
        self.request = request
        self.unread = request.unread
        self.prompt = request.prompt_tokens
        self.wanted = request.new_tokens
        self.versions: list[int] = []
        self.is_going = False

    @property
    def context(self) -> int:
        return self.prompt + len(self.versions)

    @property
    def size(self) -> int:
        return self.prompt + self.wanted


class TokenServer:
    def __init__(self, decode: DecodeCosts, prefill: PrefillCosts, version: int = 0) -> None:
        self.decode, self.prefill, self.version = decode, prefill, version
        self.waiting: list[Held] = []
        self.running: list[Held] = []
        self.is_pausing = self.is_paused = False
        self.next_change = inf
        self.plan: list[tuple[Held, int]] = []

    def arrive(self, request: ServerRequest, now: float) -> None:
        self.waiting.append(Held(request))
        if self.next_change == inf and not self.is_paused:
            self.begin(now)

    def leave(self, request: ServerRequest, now: float) -> None:
        for held in self.waiting + self.running:
            held.is_going |= held.request is request
        if self.next_change == inf:
            self.drop()

    def pause(self, now: float) -> None:
        self.is_pausing = True
        if self.next_change == inf:
            self.is_paused = True

    def resume(self, now: float, version: int) -> None:
        self.version, self.is_pausing, self.is_paused = version, False, False
        self.begin(now)

    def retract(self) -> None:
        self.waiting = self.running + self.waiting
        self.running = []
        for held in self.waiting:
            held.unread = held.context

    def evict(self) -> list[tuple[ServerRequest, list[int]]]:
        sent_back = [(held.request, held.versions) for held in self.running + self.waiting]
        self.waiting, self.running = [], []
        return sent_back

    def advance(self) -> list[tuple[ServerRequest, list[int]]]:
        now = self.next_change
        decoding = [held for held in self.running if not held.unread]
        for held, num_read in self.plan:
            held.unread -= num_read
        first = [held for held, _ in self.plan if not held.unread]
        for held in first if self.plan and self.prefill.stops_decoding else decoding + first:
            held.versions.append(self.version)
        done = [held for held in self.running if len(held.versions) == held.wanted and not held.is_going]
        self.running = [held for held in self.running if held not in done]
        self.begin(now)
        return [(held.request, held.versions) for held in done]

    def drop(self) -> None:
        self.waiting = [held for held in self.waiting if not held.is_going]
        self.running = [held for held in self.running if not held.is_going]

    def begin(self, now: float) -> None:
        self.drop()
        self.plan, self.next_change = [], inf
        if self.is_pausing:
            self.is_paused = True
            return
        while self.waiting and self.has_room(self.waiting[0]):
            self.running.append(self.waiting.pop(0))
        room = self.prefill.chunk_tokens
        for held in self.running:
            if held.unread and room:
                self.plan.append((held, min(held.unread, room)))
                room -= self.plan[-1][1]
        seconds = 0.0
        decoding = [held for held in self.running if not held.unread]
        if self.plan:
            seconds = self.prefill.base_s + self.prefill.per_token_s * sum(n for _, n in self.plan)
            seconds += self.prefill.per_request_s * sum(held.unread == n for held, n in self.plan)
        if decoding and not (self.plan and self.prefill.stops_decoding):
            seconds += self.decode.iteration_s(len(decoding), sum(held.context for held in decoding))
        if self.running:
            self.next_change = now + seconds

    def has_room(self, held: Held) -> bool:
        reserved = sum(other.size for other in self.running)
        is_too_large = self.decode.kv_tokens is not None and reserved + held.size > self.decode.kv_tokens
        return len(self.running) < self.decode.max_running_requests and (not is_too_large or not self.running)
