"""Processes that prepare requests, so that the event loop does not have to.

    workers = PreparationWorkers(most=4, limit_s=10.0)
    prepared = await workers.prepare(context, "/v1/chat/completions", body)
    workers.close()

Each process runs `python -m pipespec.server.preparation_workers FD BYTES`. It reads from a socket
that it inherits, a `PreparationContext` whenever that has changed and jobs one after the other, and
ends when the server closes the other end. A job that takes too long ends the process by a signal of
the kernel, whatever code is running; a job that needs more memory than `BYTES` fails. The next
request gets a new process.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from multiprocessing.connection import Connection

import psutil

from pipespec.server.api_errors import ApiError, ServerShuttingDown, api_error_of
from pipespec.server.preparation import PreparationContext, Prepared, Preparer

# The memory that one request may take beside the model's tokenizer.
MEMORY_BYTES = 2 * 2**30
# Several processes with one thread each prepare several requests.
ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
TOO_COMPLEX = "request_too_complex"

# A route, and the seconds within which to prepare the body and the conversation that follow.
Job = tuple[str, float]
Result = Prepared | ApiError


class PreparationWorkers:
    """Up to `most` processes, each of which prepares one request at a time within `limit_s` s.

    They start when they are needed, or before by `start_one`.
    """

    def __init__(self, most: int, limit_s: float):
        self._limit_s = limit_s
        self._threads = ThreadPoolExecutor(most, thread_name_prefix="workers")
        self._lock = threading.Lock()
        self._idle: list[_PreparationProcess] = []
        self._busy: set[_PreparationProcess] = set()
        self._closed = False

    def start_one(self, context: PreparationContext | None = None) -> None:
        """Start a process in the background, with the context if it is known."""
        self._threads.submit(self._start_one, context)

    async def prepare(
        self, context: PreparationContext, path: str, body: bytes, conversation: bytes = b""
    ) -> Prepared:
        """Prepare a body in a worker, as `Preparer.prepare` does. Raises ApiError."""
        loop = asyncio.get_running_loop()
        parts = body, conversation
        return await loop.run_in_executor(self._threads, self._prepare, context, path, parts)

    @property
    def processes(self) -> list[subprocess.Popen[bytes]]:
        """The running processes."""
        with self._lock:
            return [worker.process for worker in (*self._idle, *self._busy)]

    def close(self) -> None:
        """End the processes, also those that are at work; their requests fail."""
        with self._lock:
            self._closed = True
            for worker in (*self._idle, *self._busy):
                worker.process.kill()
        self._threads.shutdown(cancel_futures=True)
        for worker in self._idle:
            worker.end()

    def _start_one(self, context: PreparationContext | None) -> None:
        worker = self._acquire()
        if worker is None:
            return
        if context is None or worker.set_context(context):
            self._release(worker)
        else:
            self._drop(worker)

    def _prepare(
        self, context: PreparationContext, path: str, parts: tuple[bytes, bytes]
    ) -> Prepared:
        worker = self._acquire()
        if worker is None:
            raise api_error_of(ServerShuttingDown())
        try:
            result = (
                worker.prepare((path, self._limit_s), parts)
                if worker.set_context(context)
                else None
            )
        except BaseException:  # what it says cannot be read
            worker.process.kill()
            self._drop(worker)
            raise
        if result is None:
            raise _error_of_exit(self._drop(worker), self._limit_s)
        self._release(worker)
        if isinstance(result, ApiError):
            raise result
        return result

    def _acquire(self) -> _PreparationProcess | None:
        """An idle process, or a new one; None: the workers are closed."""
        with self._lock:
            if self._closed:
                return None
            while self._idle and self._idle[-1].process.poll() is not None:
                self._idle.pop().end()  # something else has ended it
            worker = self._idle.pop() if self._idle else _PreparationProcess()
            self._busy.add(worker)
            return worker

    def _drop(self, worker: _PreparationProcess) -> int:
        """Let a process end that is of no more use; its exit code."""
        with self._lock:
            self._busy.discard(worker)
        return worker.end()

    def _release(self, worker: _PreparationProcess) -> None:
        with self._lock:
            self._busy.discard(worker)
            self._idle.append(worker)


class _PreparationProcess:
    """The server's end of one process."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "pipespec.server.preparation_workers"]
            self.process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(MEMORY_BYTES)],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=os.environ | ENVIRONMENT,
            )
        self._connection = Connection(ours.detach())
        self._context: PreparationContext | None = None

    def set_context(self, context: PreparationContext) -> bool:
        """Use this context for the next jobs; False: the process has ended."""
        if context is self._context:
            return True
        try:
            self._connection.send(context.without_built_tokenizer())
        except ConnectionError:
            return False
        self._context = context
        return True

    def prepare(self, job: Job, parts: tuple[bytes, bytes]) -> Result | None:
        """The result of a job; None: the process has ended."""
        try:
            self._connection.send(job)
            for part in parts:
                self._connection.send_bytes(part)
            result: Result = self._connection.recv()
        except (EOFError, ConnectionError):
            return None
        return result

    def end(self) -> int:
        """Let the process end; its exit code."""
        self._connection.close()
        return self.process.wait()


def _error_of_exit(code: int, limit_s: float) -> ApiError:
    """The error of a request whose worker has ended with this exit code."""
    if code == -signal.SIGALRM:
        return ApiError(
            HTTPStatus.BAD_REQUEST,
            f"The request takes more than {limit_s:g} s to prepare; shorten it, or simplify the "
            "structured output.",
            code=TOO_COMPLEX,
        )
    if code < 0:  # an allocation failed in a library, or the stack was full
        return _out_of_memory()
    return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, "The server failed; see its log.")


def _out_of_memory() -> ApiError:
    return ApiError(
        HTTPStatus.BAD_REQUEST,
        f"The request takes more than {MEMORY_BYTES >> 30} GiB of memory to prepare; shorten it, "
        "or simplify the structured output.",
        code=TOO_COMPLEX,
    )


# --- in the process -----------------------------------------------------------------------------


def work(descriptor: int, memory: int) -> None:
    """Do the jobs that arrive at a socket until the server closes it."""
    # Signals for the server reach the whole group; the server ends its workers when it has ended.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    preparer: Preparer | None = None
    with Connection(descriptor) as server:
        try:
            while True:
                message: PreparationContext | Job = server.recv()
                if isinstance(message, PreparationContext):
                    preparer = Preparer(message)
                    _limit_memory(memory)
                    continue
                assert preparer is not None, "the context comes first"
                path, limit_s = message
                body, conversation = server.recv_bytes(), server.recv_bytes()
                signal.setitimer(signal.ITIMER_REAL, limit_s)
                result = _result(preparer, path, body, conversation)
                signal.setitimer(signal.ITIMER_REAL, 0)
                server.send(result)
        except (EOFError, ConnectionError):  # the server has ended
            return


def _result(preparer: Preparer, path: str, body: bytes, conversation: bytes) -> Result:
    try:
        return preparer.prepare(path, body, conversation)
    except ApiError as error:
        return error
    except MemoryError:
        return _out_of_memory()


def _limit_memory(more: int) -> None:
    """Let this process take so many bytes beside what it has."""
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = int(psutil.Process().memory_info().data) + more
    soft = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, most))


if __name__ == "__main__":
    work(int(sys.argv[1]), int(sys.argv[2]))
