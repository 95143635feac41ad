"""Calls and streams of bytes between two processes over a pair of pipes, in both directions.

    frame    [ length of the payload, uint32 | kind, uint8 | number of the call, uint32 | payload ]

A CALL holds JSON: the function and its arguments. It is answered by one RESULT (JSON), or by DATA
frames and END, or by FAILED (a sentence). Calls of the two sides have numbers of their own; each
call is answered by a thread of its own, so that answers do not wait for one another.
"""

from __future__ import annotations

import itertools
import json
import queue
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

from pipespec.errors import HostFailed, ModelError, PipespecError

CALL, RESULT, DATA, END, FAILED = range(5)
_HEAD = struct.Struct("!IBI")
# Of a payload: a call may hold the headers of all files of a checkpoint.
MOST_BYTES = 2**31
CHUNK_BYTES = 2**18
# Chunks of a stream that wait for their reader; the other side then waits too.
WAITING = 4
# Answers that are made at once.
NUM_THREADS = 16
# What a handler returns: a JSON value, or the bytes of a stream.
Handler = Callable[..., Any]


class ChannelClosed(HostFailed):
    """The other side has ended."""


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
        self._answers: dict[int, queue.Queue[tuple[int, bytes]]] = {}
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix=f"channel {name}")
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def call(self, function: str, **arguments: Any) -> Any:
        """The JSON value that the other side answers. Raises ModelError with the sentence of the
        other side, ChannelClosed."""
        with self._answered(function, arguments) as answers:
            kind, payload = self._next(answers)
            if kind == FAILED:
                raise ModelError(payload.decode(errors="replace"))
            assert kind == RESULT, "a call of a value"
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
                assert kind == DATA, "a call of a stream"
                yield payload

    def join(self) -> None:
        """Wait for the end of the other side."""
        self._listener.join()

    def _answered(self, function: str, arguments: Mapping[str, Any]) -> _Answers:
        number = next(self._numbers)
        found: queue.Queue[tuple[int, bytes]] = queue.Queue(WAITING)
        self._answers[number] = found
        self._write(CALL, number, json.dumps({"do": function, **arguments}).encode())
        return _Answers(self._answers, number, found)

    def _next(self, answers: queue.Queue[tuple[int, bytes]]) -> tuple[int, bytes]:
        while True:
            try:
                return answers.get(timeout=0.5)
            except queue.Empty:
                if self.closed.is_set() and answers.empty():
                    raise ChannelClosed(f"{self.name} has ended while it sent weights") from None

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
                payload = self._read(length)
                if length > MOST_BYTES or len(payload) < length:
                    break
                if kind == CALL:
                    self._pool.submit(self._answer, number, payload)
                elif (answers := self._answers.get(number)) is not None:
                    answers.put((kind, payload))
        except (OSError, ValueError):
            pass  # the other side is gone, or hung up on
        finally:
            self.closed.set()
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _read(self, count: int) -> bytes:
        return self._reader.read(count) or b""

    def _answer(self, number: int, payload: bytes) -> None:
        try:
            arguments = json.loads(payload)
            found = self._handlers[arguments.pop("do")](**arguments)
            if isinstance(found, Iterator):
                for chunk in found:
                    for start in range(0, len(chunk), CHUNK_BYTES):
                        self._write(DATA, number, chunk[start : start + CHUNK_BYTES])
                self._write(END, number, b"")
            else:
                self._write(RESULT, number, json.dumps(found).encode())
        except ChannelClosed:
            return  # nobody waits for the answer
        except PipespecError as error:
            self._fail(number, str(error))
        except Exception as error:  # noqa: BLE001 - the caller reports it
            self._fail(number, f"{type(error).__name__}: {error}")

    def _fail(self, number: int, sentence: str) -> None:
        try:
            self._write(FAILED, number, sentence.encode())
        except ChannelClosed:
            return


class _Answers:
    """The answers to one call, until it needs no more."""

    def __init__(
        self,
        waiting: dict[int, queue.Queue[tuple[int, bytes]]],
        number: int,
        found: queue.Queue[tuple[int, bytes]],
    ) -> None:
        self._waiting, self._number, self._found = waiting, number, found

    def __enter__(self) -> queue.Queue[tuple[int, bytes]]:
        return self._found

    def __exit__(self, *_: object) -> None:
        self._waiting.pop(self._number, None)
        while not self._found.empty():  # the listener may wait for room
            self._found.get_nowait()
