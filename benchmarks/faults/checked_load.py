"""Requests whose answers are checked while faults happen: `benchmarks.faults.chaos`.

Half of the requests are read from the request log, which has every token and its position, and
half over HTTP from `pipespec serve`; of each a third is greedy, a third sampled, a third
constrained by a JSON schema. A fault happens after a random number of events, or while no request
is in flight. Before the next fault the cluster must be complete again and every request must have
made progress.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from benchmarks.faults.fault_injector import ENDING, POLL_S, Fault, FaultInjector
from pipespec.client import registry
from pipespec.client.async_client import AsyncClient, attach
from pipespec.controller.cluster_status import read_status
from pipespec.controller.log_records import Accepted, Finished, failure_of
from pipespec.core import SamplingParams
from pipespec.engine.llguidance_backend import grammar_from_json_schema
from pipespec.errors import PipespecError, Unreachable
from tools.rig.http_server import NAME, ServerAddress, ServerFailed
from tools.rig.http_streams import Stream, open_stream
from tools.rig.schemas import SCHEMAS

PROMPTS = ("Once upon a time there was a king who", "The little girl ran out of the house and")
FORMS = ("greedy", "sampled", "schema")
LOG, HTTP = "log", "http"
SCHEMA = "of objects"
TEMPERATURE = 0.9
# Seconds before a refused request is sent again.
RETRY_S = 0.2
# So many failures are listed.
SHOWN = 20


@dataclass(frozen=True)
class LoadRequest:
    """A request by its interface (log or http), form, prompt and seed."""

    interface: str
    form: str
    prompt: str
    seed: int

    @property
    def temperature(self) -> float:
        return 0.0 if self.form == "greedy" else TEMPERATURE

    def body(self, tokens: int) -> dict[str, Any]:
        """The body of the HTTP request."""
        body = {"prompt": self.prompt, "seed": self.seed, "temperature": self.temperature}
        body |= {"max_tokens": tokens, "stream": True}
        if self.form != "schema":
            return body | {"ignore_eos": True}
        schema = {"name": "answer", "schema": SCHEMAS[SCHEMA]}
        return body | {"response_format": {"type": "json_schema", "json_schema": schema}}

    @property
    def sampling(self) -> SamplingParams:
        """The sampling parameters in the request log."""
        grammar = grammar_from_json_schema(SCHEMAS[SCHEMA]) if self.form == "schema" else ""
        return SamplingParams(temperature=self.temperature, seed=self.seed, grammar=grammar)


def load_requests() -> list[LoadRequest]:
    """Every prompt in every form over both interfaces."""
    return [
        LoadRequest(interface, form, prompt, seed)
        for seed, prompt in enumerate(PROMPTS)
        for form in FORMS
        for interface in (LOG, HTTP)
    ]


@dataclass
class RecoveryResult:
    """The effect of a fault.

    Attributes:
        hit: whether its target existed.
        recovery_s: from the fault (a cut: from its repair) until the cluster was complete and every
            request had made progress.
        epochs: how many began.
        reason: why the last epoch ended, if one did.
    """

    hit: bool
    recovery_s: float
    epochs: int
    reason: str


@dataclass
class RequestCounts:
    """Counts over all requests.

    Attributes:
        finished: requests by interface and form.
        differ: answers that are not the undisturbed ones.
        lost_tokens, doubled_tokens: of requests read from the log.
        failures: of each request without an answer, what was received instead.
        refused: how often a request was answered 503 before it began, and sent again.
    """

    finished: dict[str, int] = field(default_factory=dict)
    differ: int = 0
    lost_tokens: int = 0
    doubled_tokens: int = 0
    failures: list[str] = field(default_factory=list)
    refused: int = 0


class Slot:
    """A place for one request in flight; each request is followed by the next."""

    def __init__(self) -> None:
        self.events = 0  # of all its requests, except the stream that is open now
        self.stream: Stream | None = None

    @property
    def num_events(self) -> int:
        """Events of all its requests."""
        return self.events + (self.stream.num_events if self.stream else 0)


class CheckedLoad:
    """Keeps requests in flight and compares every answer with the undisturbed one.

    Args:
        tokens: the most tokens of an answer.
        patience_s: how long an answer may take, seconds.
    """

    def __init__(self, address: ServerAddress, client: AsyncClient, tokens: int, patience_s: float):
        self._address, self._client = address, client
        self._tokens, self._patience_s = tokens, patience_s
        self._requests = load_requests()
        self._expected: list[Any] = []
        self._next = 0
        self._running = asyncio.Event()
        self._idle = 0
        self.slots: list[Slot] = []
        self.counts = RequestCounts()

    @property
    def num_events(self) -> int:
        return sum(slot.num_events for slot in self.slots)

    async def record_expected(self) -> None:
        """Run each request alone, undisturbed."""
        self._expected = [await self._answer(request, Slot()) for request in self._requests]

    @asynccontextmanager
    async def in_flight_requests(self, count: int) -> AsyncIterator[None]:
        """Keep `count` requests in flight during the block, then wait for their ends."""
        self.slots = [Slot() for _ in range(count)]
        self._running.set()
        over = asyncio.Event()
        tasks = [asyncio.create_task(self._run_slot(slot, over)) for slot in self.slots]
        try:
            yield
            over.set()
            self._running.set()
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def drain(self) -> None:
        """Start no further request, and wait until none is in flight."""
        self._running.clear()
        await self._until(lambda: self._idle == len(self.slots), "end")

    def resume(self) -> None:
        self._running.set()

    async def wait_for_progress(self, events: int = 0) -> None:
        """Wait until every request has made progress, or for `events` further events of all."""
        if events:
            until = self.num_events + events
            await self._until(lambda: self.num_events >= until, "make progress")
            return
        before = [slot.num_events for slot in self.slots]
        await self._until(
            lambda: all(s.num_events > n for s, n in zip(self.slots, before, strict=True)),
            "make progress",
        )

    async def _until(self, done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + self._patience_s
        while not done():
            if time.monotonic() > deadline:
                raise ServerFailed(f"The requests did not {what} within {self._patience_s:g} s.")
            await asyncio.sleep(POLL_S)

    async def _run_slot(self, slot: Slot, over: asyncio.Event) -> None:
        while not over.is_set():
            self._idle += 1
            await self._running.wait()
            self._idle -= 1
            number = self._next % len(self._requests)
            self._next += 1
            request = self._requests[number]
            try:
                async with asyncio.timeout(self._patience_s):
                    answer = await self._answer(request, slot)
            except (PipespecError, OSError, ServerFailed, TimeoutError) as error:
                self.counts.failures.append(
                    f"{request.interface} {request.form}: {type(error).__name__} {error}"
                )
                slot.stream = None
                await asyncio.sleep(RETRY_S)
                continue
            kind = f"{request.interface} {request.form}"
            self.counts.finished[kind] = self.counts.finished.get(kind, 0) + 1
            self.counts.differ += answer != self._expected[number]

    async def _answer(self, request: LoadRequest, slot: Slot) -> Any:
        """The token ids of an answer from the log, or its text over HTTP.

        Raises ServerFailed, PipespecError, OSError.
        """
        return await (
            self._read(request, slot) if request.interface == LOG else self._stream(request, slot)
        )

    async def _read(self, request: LoadRequest, slot: Slot) -> list[int]:
        served = self._client.served
        prompt = served.encode(request.prompt)
        # As over HTTP: a text that must match a schema ends with it.
        eos = served.eos if request.form == "schema" else ()
        tokens: list[int] = []
        async with self._client.follow() as followed:
            await followed.submit(
                prompt, request.sampling, max_new_tokens=self._tokens, stop=(), eos=eos
            )
            while len(followed):
                for _, event in await followed.next():
                    slot.events += 1
                    if isinstance(event, Accepted):
                        gap = event.base - len(prompt) - len(tokens)
                        self.counts.lost_tokens += max(0, gap)
                        self.counts.doubled_tokens += max(0, -gap)
                        tokens += event.tokens
                    elif isinstance(event, Finished) and (failure := failure_of(event.reason)):
                        raise failure
        return tokens

    async def _stream(self, request: LoadRequest, slot: Slot) -> str:
        while True:
            slot.stream = await open_stream(
                self._address.connect, "/v1/completions", request.body(self._tokens)
            )
            await slot.stream.ended
            stream, slot.stream = slot.stream, None
            slot.events += stream.num_events
            if stream.status != HTTPStatus.SERVICE_UNAVAILABLE:
                break
            self.counts.refused += 1
            await asyncio.sleep(RETRY_S)
        if not stream.complete:
            raise ServerFailed(f"{stream.status}: {stream.body[-200:]!r}")
        return stream.text


async def inject_all(
    address: ServerAddress,
    injector: FaultInjector,
    faults: Sequence[Fault],
    on_start: Callable[[CheckedLoad], None],
    *,
    in_flight: int,
    tokens: int,
    patience_s: float,
    deadline: float,
    on_result: Callable[[Fault, RecoveryResult], None],
) -> None:
    """Cause the faults one after another. Raises ServerFailed.

    Args:
        on_start: called with the load once its undisturbed answers are known.
        deadline: on the monotonic clock; no fault begins later.
        on_result: called after each fault.
    """
    now = await asyncio.to_thread(injector.settle, 0)
    async with attach(registry.find(NAME), patience_s) as client:
        load = CheckedLoad(address, client, tokens, patience_s)
        await load.record_expected()
        on_start(load)
        problem: ServerFailed | None = None
        try:
            async with load.in_flight_requests(in_flight):
                for number, fault in enumerate(faults):
                    if time.monotonic() > deadline:
                        raise ServerFailed(f"Time ran out after {number} of {len(faults)} faults.")
                    result = await inject_one(load, injector, fault, now)
                    now += result.epochs
                    on_result(fault, result)
        except ServerFailed as error:
            problem = error  # which the client's tasks would wrap
    if problem is not None:
        raise problem


async def inject_one(
    load: CheckedLoad, injector: FaultInjector, fault: Fault, before: int
) -> RecoveryResult:
    """Cause one fault, and wait until all requests have recovered. Raises ServerFailed."""
    if fault.at:
        await load.wait_for_progress(fault.at)
    else:
        await load.drain()
    since = time.monotonic()
    hit = await asyncio.to_thread(injector.inject, fault)
    if fault.kind == "cut":
        await asyncio.sleep(fault.cut_s)
        injector.mend(fault)
        since = time.monotonic()
    ends = hit and fault.kind in ENDING
    try:
        await asyncio.to_thread(injector.settle, before if ends else before - 1)
    except ServerFailed as error:
        raise ServerFailed(f"After {fault.kind} {fault.target}: {error}") from error
    load.resume()
    await load.wait_for_progress()
    recovery_s = time.monotonic() - since
    now = await asyncio.to_thread(injector.settle, before - 1)
    reason = await asyncio.to_thread(last_fault) if now > before else ""
    return RecoveryResult(hit, recovery_s, now - before, reason)


def last_fault() -> str:
    """Why the last epoch ended."""
    with suppress(Unreachable):
        running = registry.find(NAME)
        if overview := read_status(running.url, running.namespace):
            # Without the details that a library adds, such as its own source files.
            return (overview.last_fault or "").partition(": [")[0]
    return ""
