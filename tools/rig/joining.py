"""A cluster of one host that another one joins, in a test bed, and requests meanwhile.

    with Testbed(hosts=2, with_ssh=False) as bed, JoinableCluster(bed, models) as cluster:
        host = cluster.join(cluster.token())
        host.await_line("It gets the weights")
        with cluster.asking(LENGTHS) as asking:
            host.await_line("It computes")
        print(asking.answers)

Host b does not see the models, and each host has a cache of its own.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self
from unittest import mock

from pipespec.client import registry
from pipespec.client.sync_client import attach
from pipespec.config.compose import compose
from pipespec.controller.cluster_status import ClusterStatus, read_status
from pipespec.controller.log_records import Accepted
from pipespec.engine.checkpoint.parts.parts_file import PartsFile, ranges_of
from tools.rig import relay
from tools.rig.requests import RequestClient
from tools.rig.testbed import Testbed

ROOT = Path(__file__).parents[2]
PIPESPEC = (sys.executable, "-m", "pipespec")
PROMPT = "Once upon a time there was a king who had three sons and"
# A busy machine takes its time to import torch.
PATIENCE_S = 180.0
LOOK_S = 0.02


class CommandFailed(Exception):
    """A command ended, or was silent for too long; the message holds what it said."""


class Command:
    """`pipespec ...` on a host, whose lines are kept; `beside` may hold the reason of a failure."""

    def __init__(
        self,
        bed: Testbed,
        host: str,
        *arguments: str,
        before: Sequence[str] = (),
        beside: Command | None = None,
    ):
        self.lines: list[str] = []
        self._beside = beside
        home = bed.folder / f"home-{host}"
        python_path = filter(None, [os.environ.get("PYTHONPATH")])
        self.process = bed.popen(
            host,
            [*before, *PIPESPEC, *arguments],
            env={
                **os.environ,
                "HF_HUB_OFFLINE": "1",
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join((*python_path, str(ROOT))),
                **{f"XDG_{kind}_HOME": str(home / kind) for kind in ("STATE", "CACHE")},
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    def await_line(self, words: str) -> str:
        """The first line that has these words. Raises CommandFailed."""
        end = time.monotonic() + PATIENCE_S
        while True:
            ended = self.process.poll() is not None
            for line in list(self.lines):
                if words in line:
                    return line
            if ended or time.monotonic() > end:
                beside = "" if self._beside is None else f"; beside it: {self._beside.lines[-6:]}"
                raise CommandFailed(f"no line has {words!r}: {self.lines}{beside}")
            time.sleep(LOOK_S)

    def wait(self) -> int:
        """Its exit code, once it has ended and all lines are there."""
        code = self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        return code

    def interrupt(self) -> None:
        """As Ctrl-C does."""
        self.process.send_signal(signal.SIGINT)


@dataclass
class Answer:
    """An answer of so many tokens."""

    length: int
    tokens: list[int] = field(default_factory=list)


class JoinableCluster:
    """A cluster of host a with two stages, within the block. `models` has target and draft."""

    def __init__(self, bed: Testbed, models: Path, *settings: str) -> None:
        self.bed, self.models = bed, models
        where = (f"model.target={models / 'target'}", f"model.draft={models / 'draft'}")
        size = ("cluster.stages=2", "cluster.devices=[cpu]", "model.context=256")
        command = ("up", "--invite", "--at", bed.address("a"))
        self.up = Command(bed, "a", *command, *where, *size, *settings)

    def __enter__(self) -> Self:
        try:
            self.up.await_line("pipespec join p")
        except BaseException:
            self.__exit__()
            raise
        return self

    @functools.cached_property
    def running(self) -> registry.RunningCluster:
        """How host a reaches it, once it is ready."""
        self.up.await_line("is ready")
        with mock.patch.dict(os.environ, XDG_STATE_HOME=str(self._home("a") / "STATE")):
            return registry.find("default")

    def __exit__(self, *_: object) -> None:
        self.up.interrupt()
        self.up.wait()

    def token(self) -> str:
        """A new token."""
        command = Command(self.bed, "a", "invite", "--json")
        if command.wait() != 0:
            raise CommandFailed(str(command.lines))
        return str(json.loads(command.lines[0])["token"])

    def join(self, token: str) -> Command:
        """Host b joins; the models are hidden from it."""
        hidden = ("unshare", "-m", "sh", "-c", f'mount -t tmpfs none {self.models} && exec "$@"')
        arguments = ("join", token, "--name", "b", "--devices", "cpu")
        return Command(self.bed, "b", *arguments, before=(*hidden, "sh"), beside=self.up)

    def fetched(self) -> set[str]:
        """The tensors of the target that host b has got."""
        found: set[str] = set()
        for file in (self._home("b") / "CACHE").glob("pipespec/weights/*/*/*.safetensors"):
            own, ranges = PartsFile(file), ranges_of(file)
            found |= {name for name, place in ranges.items() if not own.absent([place])}
        return found

    def status(self) -> ClusterStatus:
        """The state of the cluster."""
        with relay.entered(self.bed.namespaces["a"]):
            status = read_status(self.running.url, self.running.namespace)
        assert status is not None
        return status

    @contextmanager
    def asking(self, lengths: Sequence[int]) -> Iterator[list[Answer]]:
        """The answers to greedy requests of these lengths, each of which is sent again and again
        until the block ends, and once more, so that some are always in their middles."""
        answers: list[Answer] = []
        over = threading.Event()

        def ask(length: int) -> None:
            with attach(self.running, PATIENCE_S) as attached:
                client = RequestClient(attached.thread)
                prompt = client.served.encode(PROMPT)
                last = False
                while not last:
                    last = over.is_set()
                    request = client.submit(prompt, greedy, max_new_tokens=length)
                    answer = Answer(length)
                    for event in client.events(request):
                        if isinstance(event, Accepted):
                            assert event.base == len(prompt) + len(answer.tokens)
                            answer.tokens += event.tokens
                    answers.append(answer)

        greedy = compose(["sampling.temperature=0"]).sampling.params(0)
        with ThreadPoolExecutor(len(lengths)) as threads:
            # They are in the namespace in which they begin.
            with relay.entered(self.bed.namespaces["a"]):
                asking = [threads.submit(ask, length) for length in lengths]
            try:
                yield answers
            finally:
                over.set()
            for each in asking:
                each.result()

    def _home(self, host: str) -> Path:
        return self.bed.folder / f"home-{host}"
