"""Calls and streams of bytes between two processes over a pair of pipes, in both directions.

    frame    [ length of the payload, uint32 | kind, uint8 | number of the call, uint32 | payload ]

A CALL holds JSON: the function and its arguments. It is answered by one RESULT (JSON), or by DATA
frames and END, or by FAILED (a sentence). Calls of the two sides have numbers of their own; each
call is answered by a thread of its own, so that answers do not wait for one another. For the same
reason a stream never has more than WAITING frames on their way: the caller acknowledges each by
TAKEN, or ends the stream by STOP.

Each side sends ALIVE every few seconds. One that has sent nothing for SILENCE_S, such as a process
that was stopped or whose machine has lost its power, counts as ended.
"""

from __future__ import annotations

import itertools
import json
import queue
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, BinaryIO

from pipespec.errors import HostFailed, ModelError, PipespecError

CALL, RESULT, DATA, END, FAILED, TAKEN, STOP, ALIVE = range(8)
_HEAD = struct.Struct("!IBI")
# Of a payload: a call may hold the headers of all files of a checkpoint.
MOST_BYTES = 2**31
CHUNK_BYTES = 2**18
# Chunks of a stream that wait for their reader; the other side then waits too.
WAITING = 8
# Answers that are made at once; some may wait for others.
NUM_THREADS = 256
# Seconds between two signs of life, and without any frame after which the other side has ended.
ALIVE_S, SILENCE_S = 5.0, 40.0
LOOK_S = 0.5
# What a handler returns: a JSON value, or the bytes of a stream.
Handler = Callable[..., Any]


class ChannelClosed(HostFailed):
    """The other side has ended."""


class _Stopped(Exception):
    """The other side needs no more of a stream."""


class _Credit:
    """How many more frames of a stream may be sent."""

    def __init__(self) -> None:
        self.stopped = False
        self._free = threading.Semaphore(WAITING)

    def take(self) -> None:
        """Wait until one may be sent. Raises _Stopped."""
        self._free.acquire()
        if self.stopped:
            self._free.release()
            raise _Stopped

    def add(self, *, last: bool = False) -> None:
        """One more may be sent; `last`: none at all."""
        self.stopped = self.stopped or last
        self._free.release()


class ByteChannel:
    """One end of such a pair. `name` is the other side, for messages.

    Args:
        handlers: the functions that the other side may call, by name.
    """

    def __init__(
        self, name: str, reader: BinaryIO, writer: BinaryIO, handlers: Mapping[str, Handler]
    ) -> None:
        self.name = name
        self.closed = threading.Event()
        self._reader, self._writer = reader, writer
        self._handlers = handlers
        self._writing, self._numbers = threading.Lock(), itertools.count(1)
        self._answers: dict[int, queue.SimpleQueue[tuple[int, bytes]]] = {}
        self._credits: dict[int, _Credit] = {}
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix=f"channel {name}")
        self._read_at = time.monotonic()  # when the other side last sent anything
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        threading.Thread(target=self._show_life, daemon=True).start()

    def call(self, function: str, **arguments: Any) -> Any:
        """The JSON value that the other side answers. Raises ModelError with the sentence of the
        other side, ChannelClosed."""
        with self._answered(function, arguments) as answers:
            kind, payload = self._next(answers)
            if kind == FAILED:
                raise ModelError(payload.decode(errors="replace"))
            if kind != RESULT:
                raise ModelError(f"{self.name} answers {function!r} with bytes, not a value")
            return json.loads(payload)

    def stream(self, function: str, **arguments: Any) -> Iterator[bytes]:
        """The bytes that the other side answers, as they come. Raises as `call`."""
        with self._answered(function, arguments) as answers:
            while True:
                kind, payload = self._next(answers)
                if kind == END:
                    return
                if kind == FAILED:
                    raise ModelError(payload.decode(errors="replace"))
                if kind != DATA:
                    raise ModelError(f"{self.name} answers {function!r} with a value, not bytes")
                yield payload
                self._write(TAKEN, answers.number, b"")

    def join(self) -> None:
        """Wait for the end of the other side."""
        while self._listener.is_alive() and not self._silent:
            self._listener.join(LOOK_S)

    @property
    def _silent(self) -> bool:
        """Whether the other side has given no sign of life for too long."""
        return time.monotonic() - self._read_at > SILENCE_S

    def _show_life(self) -> None:
        with suppress(ChannelClosed):
            while not self.closed.wait(ALIVE_S):
                self._write(ALIVE, 0, b"")

    def _answered(self, function: str, arguments: Mapping[str, Any]) -> _Answers:
        number = next(self._numbers)
        self._answers[number] = queue.SimpleQueue()
        self._write(CALL, number, json.dumps({"do": function, **arguments}).encode())
        return _Answers(self, number, self._answers[number])

    def _next(self, answers: _Answers) -> tuple[int, bytes]:
        while True:
            try:
                kind, payload = answers.frames.get(timeout=LOOK_S)
            except queue.Empty:
                if self._silent:
                    raise ChannelClosed(
                        f"{self.name} gave no sign of life for {SILENCE_S:g} s"
                    ) from None
                if self.closed.is_set() and answers.frames.empty():
                    raise ChannelClosed(f"{self.name} has ended while it sent weights") from None
            else:
                answers.ended = kind != DATA
                return kind, payload

    def end_answers(self, answers: _Answers) -> None:
        """Take no more of them."""
        self._answers.pop(answers.number, None)
        if not answers.ended:
            with suppress(ChannelClosed):
                self._write(STOP, answers.number, b"")

    def _write(self, kind: int, number: int, payload: bytes) -> None:
        try:
            with self._writing:
                self._writer.write(_HEAD.pack(len(payload), kind, number) + payload)
                self._writer.flush()
        except (OSError, ValueError) as error:
            raise ChannelClosed(f"{self.name} has ended while weights were sent to it") from error

    def _listen(self) -> None:
        try:
            while head := self._read(_HEAD.size):
                length, kind, number = _HEAD.unpack(head)
                if length > MOST_BYTES:
                    break
                payload = self._read(length)
                if len(payload) < length:
                    break
                if kind == CALL:
                    self._credits[number] = _Credit()
                    self._pool.submit(self._answer, number, payload)
                elif kind in (TAKEN, STOP):
                    if (credit := self._credits.get(number)) is not None:
                        credit.add(last=kind == STOP)
                elif (answers := self._answers.get(number)) is not None:
                    answers.put((kind, payload))
        except (OSError, ValueError):
            pass  # the other side is gone, or hung up on
        finally:
            self.closed.set()
            for credit in list(self._credits.values()):
                credit.add(last=True)
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _read(self, count: int) -> bytes:
        parts: list[bytes] = []
        while count and (part := self._reader.read(min(count, CHUNK_BYTES))):
            self._read_at = time.monotonic()
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def _answer(self, number: int, payload: bytes) -> None:
        credit = self._credits[number]
        try:
            arguments = json.loads(payload)
            found = self._handlers[arguments.pop("do")](**arguments)
            if isinstance(found, Iterator):
                for chunk in found:
                    for start in range(0, len(chunk), CHUNK_BYTES):
                        credit.take()
                        self._write(DATA, number, chunk[start : start + CHUNK_BYTES])
                self._write(END, number, b"")
            else:
                self._write(RESULT, number, json.dumps(found).encode())
        except (ChannelClosed, _Stopped):
            return  # the answer is not waited for
        except PipespecError as error:
            self._fail(number, str(error))
        except Exception as error:  # noqa: BLE001 - the caller reports it
            self._fail(number, f"{type(error).__name__}: {error}")
        finally:
            self._credits.pop(number, None)

    def _fail(self, number: int, sentence: str) -> None:
        try:
            self._write(FAILED, number, sentence.encode())
        except ChannelClosed:
            return


class LocalChannel:
    """The same calls within this process."""

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        self.closed = threading.Event()  # never set
        self._handlers = handlers

    def call(self, function: str, **arguments: Any) -> Any:
        """What a handler returns. Raises what it raises."""
        return self._handlers[function](**arguments)

    def stream(self, function: str, **arguments: Any) -> Iterator[bytes]:
        """The bytes that a handler returns, as they come. Raises what it raises."""
        found: Iterator[bytes] = self._handlers[function](**arguments)
        return found


class _Answers:
    """The frames that answer one call, until it needs no more."""

    def __init__(
        self, channel: ByteChannel, number: int, frames: queue.SimpleQueue[tuple[int, bytes]]
    ) -> None:
        self._channel, self.number, self.frames = channel, number, frames
        self.ended = False

    def __enter__(self) -> _Answers:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.end_answers(self)
