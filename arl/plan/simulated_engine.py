"""Simulated servers behind the contract of an InferenceEngine, in virtual time.

    agenerate --> controller's CPU --> latency --> Balance, or the line --> SimulatedServer --> response
                                                       ^                        |
                                                       +---- aborted by an update, to be continued

**Tokens are counted, not made.** A prompt is a `SimulatedPrompt`, which has a length. A response has one entry for each
span of tokens of one version: `output_ids` holds how many tokens it stands for. So work does not grow with tokens.

Updates follow arl/engine/client/upkeep.py and server_update.py: pause, load, resume, at once or rolling, in each of the
three modes. Not simulated: failures, fences, retries, slow requests that are moved, and membership.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from math import inf
from typing import overload

from arl.api.engine import UpdateStats, WeightUpdate
from arl.api.types import ModelRequest, ModelResponse
from arl.plan.balance import Balance
from arl.plan.batching import ServerRequest, SimulatedServer, Spans
from arl.plan.costs import Costs, Deployment
from arl.plan.machines import Cancellable, Machine, Processor


class SimulatedPrompt(Sequence[int]):
    """So many tokens. cached: how many the session's server has; common: how many any server has."""

    __slots__ = ("cached", "common", "length")

    def __init__(self, length: int, cached: int, common: int) -> None:
        self.length = length
        self.cached = cached
        self.common = common

    def __len__(self) -> int:
        return self.length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        return range(self.length)[index]


class _TimedServer:
    """A simulated server, and the timer of its next change."""

    def __init__(self, number: int, server: SimulatedServer, machine: Machine, cores: int) -> None:
        self.number = number
        self.server = server
        self.paused: asyncio.Future[None] | None = None
        self.stood_still_s = 0.0
        self._clock = asyncio.get_running_loop().time
        self._busy_s, self._busy_since = 0.0, inf
        self._machine = machine
        self._cores = cores
        self._computes = False
        self._armed_at = inf
        self._timer: Cancellable | None = None

    def arrive(self, request: ServerRequest) -> None:
        self.server.arrive(request, self._machine.now())
        self._arm()

    def leave(self, request: ServerRequest) -> None:
        """Its caller was cancelled. It may have ended at the same moment."""
        if not request.has_left:
            self.server.leave(request, self._machine.now())
            self._arm()

    async def pause(self) -> None:
        """Wait until the iteration that runs has ended."""
        paused = self.paused = asyncio.get_running_loop().create_future()
        self.server.pause(self._machine.now())
        self._arm()
        await paused

    def resume(self, version: int) -> None:
        self.server.resume(self._machine.now(), version)
        self._arm()

    def busy_s(self) -> float:
        """Seconds, by the loop's clock, in which it has computed."""
        return self._busy_s + max(self._clock() - self._busy_since, 0.0)

    def _arm(self) -> None:
        due = self.server.next_change
        computes = due != inf
        if computes is not self._computes:
            self._busy_s, self._busy_since = self.busy_s(), self._clock() if computes else inf
            self._computes = computes
            self._machine.use(self._cores if computes else -self._cores)
        if computes and due < self._armed_at:
            if self._timer is not None:
                self._timer.cancel()
            self._armed_at = due
            self._timer = self._machine.at(due, self._wake)
        if self.paused is not None and self.server.is_paused:
            self.paused.set_result(None)
            self.paused = None

    def _wake(self) -> None:
        """A request that joined may have made the change later than the timer."""
        due, self._armed_at, self._timer = self._armed_at, inf, None
        if self.server.next_change <= due:
            for request in self.server.advance():
                _give_back(request)
        self._arm()


def _give_back(request: ServerRequest) -> None:
    request.has_left = True
    if not request.owner.done():
        request.owner.set_result(None)


class SimulatedEngine:
    """An InferenceEngine. machine: where its servers compute."""

    def __init__(self, costs: Costs, deployment: Deployment, machine: Machine, controller: Processor) -> None:
        self._costs = costs
        self._deployment = deployment
        self._machine = machine
        self._controller = controller
        self._cores = costs.shared.server if costs.shared else 0
        self._servers = [
            _TimedServer(number, SimulatedServer(costs.decode, costs.prefill), machine, self._cores)
            for number in range(deployment.num_servers)
        ]
        self._balance = Balance(deployment.num_servers)
        self._line: deque[tuple[str | None, asyncio.Future[tuple[int, bool]]]] = deque()
        self._version = 0
        self.newest_sent = 0
        """The newest version that any server may hold."""
        self._clock = asyncio.get_running_loop().time
        # For statistics.
        self.num_requests = 0
        self.num_answered = 0
        self.tokens_answered = 0
        self.request_s = 0.0
        """Seconds from asking to answer, over all answered requests."""
        self.queued_s = 0.0
        """Of these, in the line."""
        self._in_flight_s, self._changed_at = 0.0, self._clock()

    @property
    def version(self) -> int:
        return self._version

    @property
    def servers(self) -> Sequence[SimulatedServer]:
        return [one.server for one in self._servers]

    def busy_s(self) -> float:
        """Seconds in which servers computed, summed over them."""
        return sum(one.busy_s() for one in self._servers)

    def stood_still_s(self) -> float:
        """Seconds in which servers were paused for updates, summed over them."""
        return sum(one.stood_still_s for one in self._servers)

    def in_flight_s(self) -> float:
        """The integral of the number of requests that have been asked and not answered."""
        self._note_in_flight(0)
        return self._in_flight_s

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        began = self._clock()
        self._note_in_flight(1)
        try:
            await self._controller.work(self._costs.controller.per_request_s)
            if self._costs.controller.latency_s:
                await asyncio.sleep(self._costs.controller.latency_s)
            spans = await self._generate(request)
        finally:
            self._note_in_flight(-1)
        self.num_answered += 1
        self.request_s += self._clock() - began
        self.tokens_answered += request.sampling.max_new_tokens
        return ModelResponse(
            output_ids=tuple([n for _, n in spans]),
            output_logprobs=(0.0,) * len(spans),
            output_versions=tuple([version for version, _ in spans]),
            stop_reason="stop",
        )

    async def _generate(self, request: ModelRequest) -> Spans:
        """Send it, and send it on from the tokens that it has after an update that aborts."""
        prompt, session = request.input_ids, request.session_id
        assert isinstance(prompt, SimulatedPrompt)
        asked, wanted = prompt.length, request.sampling.max_new_tokens
        spans: Spans = []
        while wanted:
            number, has_prefix = await self._find(session)
            cached = prompt.cached if has_prefix else prompt.common
            sent = ServerRequest(asked, cached, wanted, asyncio.get_running_loop().create_future())
            await self._attempt(self._servers[number], sent)
            for version, tokens in sent.spans:
                before = spans.pop()[1] if spans and spans[-1][0] == version else 0
                spans.append((version, before + tokens))
                asked, wanted = asked + tokens, wanted - tokens
        return spans

    async def _find(self, session: str | None) -> tuple[int, bool]:
        """See Balance.choose. The balance counts the request there from now on."""
        found = None if self._line else self._balance.choose(session)
        if found is not None:
            self._balance.begin(found[0])
            return found
        asked = self._clock()
        place: asyncio.Future[tuple[int, bool]] = asyncio.get_running_loop().create_future()
        self._line.append((session, place))
        try:
            return await place
        except asyncio.CancelledError:
            if not place.cancelled():
                self._leave(place.result()[0])
            raise
        finally:
            self.queued_s += self._clock() - asked

    async def _attempt(self, server: _TimedServer, request: ServerRequest) -> None:
        server.arrive(request)
        try:
            await request.owner
        except asyncio.CancelledError:
            server.leave(request)
            raise
        finally:
            self._leave(server.number)

    def _leave(self, number: int) -> None:
        self._balance.end(number)
        self._move()

    def _move(self) -> None:
        """Let requests leave the line, in the order of their arrival."""
        while self._line:
            session, place = self._line[0]
            if not place.cancelled():  # if so, its caller has given up
                found = self._balance.choose(session, len(self._line))
                if found is None:
                    return
                self._balance.begin(found[0])
                place.set_result(found)
            self._line.popleft()

    # Updates

    async def update_weights(self, update: WeightUpdate) -> UpdateStats:
        self.newest_sent = max(self.newest_sent, update.version)
        if self._deployment.update_order == "rolling":
            pauses_s = [await self._update(server, update.version, together=False) for server in self._servers]
        else:
            for server in self._servers:
                self._balance.pause(server.number, together=True)
            async with asyncio.TaskGroup() as tasks:
                updates = [tasks.create_task(self._update(s, update.version, together=True)) for s in self._servers]
            pauses_s = [update.result() for update in updates]
        self._version = update.version
        return UpdateStats(pause_s=max(pauses_s), load_s=self._costs.publish.load_s)

    async def _update(self, server: _TimedServer, version: int, *, together: bool) -> float:
        """Returns how long the server stood still."""
        if not together:
            self._balance.pause(server.number, together=False)
        await server.pause()
        began = self._clock()
        if self._deployment.pause_mode == "retract":
            server.server.retract()
        elif self._deployment.pause_mode == "abort":
            for request in server.server.evict():
                _give_back(request)
        await self._load()
        self._balance.resume(server.number, has_new_weights=True)
        server.resume(version)
        server.stood_still_s += self._clock() - began
        self._move()
        return self._clock() - began

    async def _load(self) -> None:
        """A server's load is work of its process."""
        if not self._costs.publish.load_s:
            return
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._machine.use(self._cores)
        try:
            self._machine.at(self._machine.now() + self._costs.publish.load_s, lambda: done.set_result(None))
            await done
        finally:
            self._machine.use(-self._cores)

    async def pause(self) -> None:
        raise NotImplementedError("nobody pauses a simulated engine but its updates")

    async def resume(self) -> None:
        raise NotImplementedError("nobody pauses a simulated engine but its updates")

    def counters(self) -> dict[str, float]:
        return {}

    async def aclose(self) -> None:
        pass

    def _note_in_flight(self, change: int) -> None:
        now = self._clock()
        self._in_flight_s += self.num_requests * (now - self._changed_at)
        self.num_requests, self._changed_at = self.num_requests + change, now
