"""Simulated servers behind the contract of an InferenceEngine, in virtual time.

    agenerate --> controller's CPU --> latency --> Balance, or the line --> SimulatedServer --> response
                                                       ^                        |
                                                       +---- aborted by an update, to be continued

Only `agenerate` is a coroutine of the caller's task. All that happens in between are callbacks, so a task wakes up once
for each request.

**Tokens are counted, not made.** A prompt is a `SimulatedPrompt`, which has a length. A response has one entry for each
span of tokens of one version: `output_ids` holds how many tokens it stands for. So work does not grow with tokens.

Updates follow arl/engine/client/upkeep.py and server_update.py: pause, load, resume, at once or rolling, in each of the
three modes. Not simulated: failures, fences, retries, slow requests that are moved, and membership.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import overload

from arl.api.engine import UpdateStats, WeightUpdate
from arl.api.types import ModelRequest, ModelResponse
from arl.plan.balance import Balance
from arl.plan.batching import ServerRequest, SimulatedServer
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
    """A simulated server, and the timer of its next change. ended: gets the requests that have ended."""

    def __init__(
        self,
        number: int,
        server: SimulatedServer,
        machine: Machine,
        cores: int,
        ended: Callable[[ServerRequest], None],
    ) -> None:
        self.number = number
        self.server = server
        self.paused: asyncio.Future[None] | None = None
        self.stood_still_s = 0.0
        self._clock = asyncio.get_running_loop().time
        self._busy_s, self._busy_since = 0.0, inf
        self._machine = machine
        self._cores = cores
        self._ended = ended
        self._computes = False
        self._armed_at = inf
        self._timer: Cancellable | None = None

    def arrive(self, request: ServerRequest) -> None:
        self.server.arrive(request, self._machine.now())
        self._arm()

    def leave(self, request: ServerRequest) -> None:
        """Its caller was cancelled."""
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
                self._ended(request)
        self._arm()


class _OpenRequest(ServerRequest):
    """A request, from asking to answer."""

    __slots__ = ("answered", "prompt", "queued_at", "server", "session")

    def __init__(self, request: ModelRequest) -> None:
        prompt = request.input_ids
        assert isinstance(prompt, SimulatedPrompt)
        super().__init__(prompt.length, 0, request.sampling.max_new_tokens)
        self.prompt = prompt
        self.session = request.session_id
        self.answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done, too, once the caller was cancelled."""
        self.queued_at: float | None = None
        """While it is in the line."""
        self.server: _TimedServer | None = None
        """That has it."""


class SimulatedEngine:
    """An InferenceEngine. machine: where its servers compute."""

    def __init__(self, costs: Costs, deployment: Deployment, machine: Machine, controller: Processor) -> None:
        self._costs = costs
        self._deployment = deployment
        self._machine = machine
        self._controller = controller
        self._cores = costs.shared.server if costs.shared else 0
        self._servers = [
            _TimedServer(number, SimulatedServer(costs.decode, costs.prefill), machine, self._cores, self._end)
            for number in range(deployment.num_servers)
        ]
        self._balance = Balance(deployment.num_servers)
        self._line: deque[_OpenRequest] = deque()
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
        began, costs = self._clock(), self._costs.controller
        self._note_in_flight(1)
        call = _OpenRequest(request)
        self._controller.do(costs.per_request_s, partial(self._place, call), costs.latency_s)
        try:
            await call.answered
        except asyncio.CancelledError:
            self._withdraw(call)
            raise
        finally:
            self._note_in_flight(-1)
        self.num_answered += 1
        self.request_s += self._clock() - began
        self.tokens_answered += request.sampling.max_new_tokens
        spans = call.spans
        return ModelResponse(
            output_ids=tuple([n for _, n in spans]),
            output_logprobs=(0.0,) * len(spans),
            output_versions=tuple([version for version, _ in spans]),
            stop_reason="stop",
        )

    def _place(self, call: _OpenRequest) -> None:
        """Send it to a server, or let it wait in line."""
        if call.answered.done():
            return
        found = None if self._line else self._balance.choose(call.session)
        if found is None:
            call.queued_at = self._clock()
            self._line.append(call)
        else:
            self._send(call, *found)

    def _send(self, call: _OpenRequest, number: int, has_prefix: bool) -> None:
        """See Balance.choose. The balance counts the request there from now on."""
        self._balance.begin(number)
        call.server = self._servers[number]
        call.find(call.prompt.cached if has_prefix else call.prompt.common)
        call.server.arrive(call)

    def _end(self, request: ServerRequest) -> None:
        assert isinstance(request, _OpenRequest)
        self._leave(request)
        if not request.answered.done():
            request.answered.set_result(None)

    def _withdraw(self, call: _OpenRequest) -> None:
        """Its caller was cancelled. If it is in line, it is skipped there."""
        if call.queued_at is not None:
            self.queued_s += self._clock() - call.queued_at
        if call.server is not None:
            call.server.leave(call)
            self._leave(call)

    def _leave(self, call: _OpenRequest) -> None:
        assert call.server is not None
        self._balance.end(call.server.number)
        call.server = None
        self._move()

    def _move(self) -> None:
        """Let requests leave the line, in the order of their arrival."""
        while self._line:
            call = self._line[0]
            if call.answered.done():
                self._line.popleft()
                continue
            found = self._balance.choose(call.session, len(self._line))
            if found is None:
                return
            self._line.popleft()
            assert call.queued_at is not None
            self.queued_s += self._clock() - call.queued_at
            call.queued_at = None
            self._send(call, *found)

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
            for request in server.server.evict():  # to go on elsewhere, or here, from the tokens that it has
                assert isinstance(request, _OpenRequest)
                self._leave(request)
                self._place(request)
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
