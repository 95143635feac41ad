"""A probe (`probe`) on a host, as this machine sees it."""

from __future__ import annotations

import itertools
import json
import queue
import subprocess
import tempfile
import threading
from typing import Any

from pipespec.cluster.host_link import programs
from pipespec.config.hosts import Host
from pipespec.errors import HostFailed
from pipespec.system.validation import Unreadable, parse_json

MODULE = "pipespec.cluster.diagnostics.probe"
ANSWER_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 3.0


class ProbeProcess:
    """A probe on a host: requests go to its standard input, answers come from its output."""

    def __init__(self, host: Host):
        """Raises HostFailed if the probe cannot even be started."""
        self._host = host
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - it ends with the probe
        self._process = programs.start_module(host, MODULE, stderr=self._stderr)
        self._numbers = itertools.count(1)
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read_answers, daemon=True)
        self._reader.start()

    def ask(self, request: str, timeout: float = ANSWER_TIMEOUT_S, /, **fields: Any) -> Any:
        """The answer to a request. Raises HostFailed when none comes."""
        number = next(self._numbers)
        line = json.dumps({"id": number, "do": request, **fields})
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
            answer = self._answers.get(timeout=timeout)
        except queue.Empty:
            self._process.kill()
            raise HostFailed(
                f"{self._host.name}: the probe did not answer within {timeout:g} s; check the load "
                "of the host and the link to it"
            ) from None
        except OSError:
            answer = None  # it has ended
        if answer is None:
            raise self._failure()
        assert answer["id"] == number, "one request at a time"
        return answer["value"]

    def close_input(self) -> None:
        """Close the probe's standard input, which ends it."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except OSError:
            return  # it has ended already

    def close(self) -> None:
        """Wait for the probe's end, which must not take long."""
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(STOP_TIMEOUT_S)

    def _read_answers(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                answer = _object(line)
                if answer is not None:  # a login script may have printed something
                    self._answers.put(answer)
        self._answers.put(None)

    def _failure(self) -> HostFailed:
        self.close_input()
        self.close()
        self._stderr.seek(0)
        return programs.failure(self._host, MODULE, self._process.wait(), self._stderr.read())


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        answer = parse_json(line)
    except Unreadable:
        return None
    return answer if isinstance(answer, dict) and answer.keys() == {"id", "value"} else None
