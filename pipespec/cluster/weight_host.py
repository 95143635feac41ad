"""`python -m pipespec.cluster.weight_host`: fetches the weights that a host computes, on that host.

The launcher starts it over SSH and talks to it through its standard input and output
(`byte_channel`); the launcher's own host is a `WeightHost` of its process. It calls:

    hello()                                            the version of pipespec
    describe(path)                                     the blueprint of a checkpoint, if it is here
    holds(path, shared, parts)                         whether the host has all that it needs
    prepare(kind, path, blueprint, parts)              finds the folder of a model
    lock(kind, run, host)                              the host that fetches into that folder
    unlock()                                           lets other runs fetch into its folders
    offer(kind)                                        what it has and lacks of the model
    listen(address, interface, cert, key)              lets other hosts read; the address and port
    expect(wanted)                                     what `fetch` will be called for
    fetch(kind, sources)                               fetch what is lacking; the tensors' hashes
    forget(kind, wrong, fetched)                       drop tensors; all that are then lacking
    check(kind)                                        compare whole files with the hub's hashes
    read(kind, file, start, stop)                      a stream of bytes, for another host

and answers, to this process:

    locate(kind, file, fresh)                          where the hub has a file, as a signed URL
    read(kind, source, file, start, stop)              a stream of bytes, of `source`
    progress(done, total)
    unreachable(source, why, reached)                  it reads from that host no more

The process ends with its standard input. The token of the hub stays with the launcher.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipespec.cluster.byte_channel import CHUNK_BYTES, ByteChannel
from pipespec.cluster.host_weights import own_path
from pipespec.cluster.weight_arrivals import Arrivals
from pipespec.cluster.weight_links import WeightLink, WeightServer, own_address
from pipespec.cluster.weight_plan import HUB
from pipespec.cluster.weight_sources import Channel, Direct, DirectHost, DirectHub, RelayedSource
from pipespec.controller.certificate import Certificate
from pipespec.engine.checkpoint.formats.gguf import is_gguf
from pipespec.engine.checkpoint.partial_checkpoint import missing, tensors_by_file
from pipespec.engine.checkpoint_parts.blueprint import (
    Blueprint,
    folder_name,
    folder_of_checkpoint,
    holdings,
    repository_of,
)
from pipespec.engine.checkpoint_parts.fetching import check_whole, fetch
from pipespec.engine.checkpoint_parts.folder_lock import RunLock
from pipespec.engine.checkpoint_parts.parts_file import PartsFile, is_partial, reported
from pipespec.engine.checkpoint_parts.ranges import RangeSet
from pipespec.engine.checkpoint_parts.repository import SharedName, parts_cache, ranges_of
from pipespec.errors import ModelError
from pipespec.system.validation import home_expanded
from pipespec.system.versions import own_version

LAUNCHER_NAME = "the launcher"
# Seconds between two reports of progress, and between two signs of life to a host that waits.
PROGRESS_S, WAIT_S = 0.2, 5.0


@dataclass(frozen=True)
class _Model:
    """A model of which this host has, or fetches, parts."""

    path: Path
    blueprint: Blueprint
    parts: Sequence[str] | None = None  # None: of another folder than the parts cache's

    @property
    def folder(self) -> Path:
        return folder_of_checkpoint(self.path)

    def file(self, name: str) -> Path:
        """The weight file of that name. Raises ModelError for any other name."""
        if name not in self.blueprint.headers:
            raise ModelError(f"{name!r} is no weight file of {self.path}")
        return self.folder / name


class WeightHost:
    """What the launcher may ask of a host."""

    def __init__(self, channel: Channel | None = None) -> None:
        self.channel = channel
        self._models: dict[str, _Model] = {}
        self._arrivals = Arrivals()
        self._server: WeightServer | None = None
        self._certificate: Certificate | None = None
        self._sources: list[RelayedSource] = []
        self._locks: list[RunLock] = []
        self._guest_of: dict[str, str] = {}  # by model, the host that fetches into its folder
        self._before = 0  # bytes of the fetches that are done
        self._reported_at = 0.0

    def handlers(self) -> dict[str, Any]:
        """The functions that the launcher calls."""
        functions = (
            self.hello,
            self.describe,
            self.holds,
            self.prepare,
            self.lock,
            self.unlock,
            self.offer,
            self.listen,
            self.expect,
            self.fetch,
            self.forget,
            self.check,
            self.read,
        )
        return {each.__name__: each for each in functions}

    def hello(self) -> str:
        """The version of pipespec."""
        return own_version()

    def describe(self, path: str) -> dict[str, Any] | None:
        """The blueprint of a checkpoint that this host has whole at `path`, as a folder of this
        host's, wherever it came from. Raises ModelError."""
        found = home_expanded(path)
        if not (found.is_dir() or (is_gguf(found) and found.is_file())):
            return None
        return Blueprint.of(found, as_folder=True).as_json()

    def holds(self, path: str, shared: Mapping[str, Any], parts: Sequence[str]) -> bool:
        """Whether parts of a model are here, which the launcher has at `path`."""
        own = own_path(Path(path), None, SharedName(**shared), parts)
        return own is not None and not missing(own, parts)

    def prepare(
        self, kind: str, path: str, blueprint: Mapping[str, Any], parts: Sequence[str]
    ) -> None:
        """Find the folder of a model: in the parts cache, unless the host has another that lacks
        none of these parts. Raises ModelError."""
        plan = Blueprint.from_json(blueprint)
        own = own_path(Path(path), None, plan.shared, parts)
        if own is not None and not missing(own, parts) and not own.is_relative_to(parts_cache()):
            self._models[kind] = _Model(own, plan)
        else:
            self._models[kind] = _Model(plan.path, plan, tuple(parts))

    def lock(self, kind: str, run: str, host: str) -> dict[str, Any]:
        """The "owner" that fetches into the folder of a model in this `run`: this `host`, or
        another that shares the file system; None: a process of another run does, which "holder"
        says. Raises ModelError."""
        model = self._model(kind)
        if model.parts is None:
            return {"owner": host}
        lock = RunLock(model.folder, run, host)
        self._locks.append(lock)
        if lock.owner is None:
            return {"owner": None, "holder": f"{lock.holder} fetches into {model.folder}"}
        if lock.owner != host:
            self._guest_of[kind] = lock.owner
        return {"owner": lock.owner}

    def unlock(self) -> None:
        """Let other runs fetch into the folders of this host."""
        self._guest_of.clear()
        while self._locks:
            self._locks.pop().release()

    def offer(self, kind: str) -> dict[str, Any]:
        """What of a model is here: hashes by file and tensor, and the tensors that are lacking.
        What is in the folder of another host is for that host to offer, and before this one is
        asked. Raises ModelError."""
        model = self._model(kind)
        plan = model.blueprint
        if model.parts is None:
            same = plan.repository.on_hub or _name_of(model.path) == plan.name
            return {"has": holdings(model.folder, plan.headers) if same else {}, "lacks": {}}
        if kind in self._guest_of:
            return {"has": {}, "lacks": self._lacks(model)}
        plan.build()
        if self._verify(model):
            plan.build()  # again, as a header may have been wrong
        for name in plan.headers:
            if is_partial(model.file(name)):
                self._arrivals.set(model.file(name), PartsFile(model.file(name)).here)
        return {"has": holdings(model.folder, plan.headers), "lacks": self._lacks(model)}

    def listen(
        self, address: str | None, interface: str | None, cert: str, key: str
    ) -> Sequence[Any] | None:
        """Let the other hosts of this run read what is here, at an address if it has one, and read
        from them. Raises ModelError."""
        self._certificate = Certificate(cert, key)
        if address is None:
            return None
        try:
            ip = own_address(address, interface)
            self._server = WeightServer(ip, self._certificate, self.read)
        except OSError as error:
            raise ModelError(error.strerror or str(error)) from error
        return self._server.address

    def expect(self, wanted: Mapping[str, Mapping[str, Collection[str]]]) -> None:
        """Have hosts that read these tensors (by model and file) wait until they are here. Raises
        ModelError."""
        expected: defaultdict[Path, RangeSet] = defaultdict(RangeSet)
        for kind, files in wanted.items():
            for name, tensors in files.items():
                path = self._model(kind).file(name)  # of two models it may be the same
                ranges = ranges_of(path)
                for tensor in tensors:
                    expected[path].add(ranges[tensor])
        self._arrivals.expect(expected)

    def fetch(self, kind: str, sources: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, str]]:
        """Fetch tensors, from all sources at once; their hashes, by file.

        Args:
            sources: of each "from", its address in "at" (or null), and "wanted" (tensors by file).
        """
        model = self._model(kind)
        asked = []
        for each in sources:
            direct = self._direct(kind, model, each["from"], each["at"])
            asked.append(
                (RelayedSource(self._launcher, kind, each["from"], direct), each["wanted"])
            )
        self._sources += [source for source, _ in asked]
        try:
            self._before += fetch(
                model.folder,
                asked,
                self._moved,
                lambda file, part: self._arrivals.came(model.folder / file, part),
                locked=True,
            )
        finally:
            for source, _ in asked:
                source.stop()
                self._sources.remove(source)
        found: dict[str, dict[str, str]] = {}
        for _, wanted in asked:
            for file, names in wanted.items():
                hashes = PartsFile(model.folder / file).hashes
                found.setdefault(file, {}).update({name: hashes[name] for name in names})
        return found

    def forget(
        self, kind: str, wrong: Mapping[str, Collection[str]], fetched: Mapping[str, Sequence[str]]
    ) -> dict[str, list[str]]:
        """Drop the pieces in which tensors are, whose bytes are wrong; all tensors of this host's
        parts, or that it has `fetched`, that are then lacking, by file."""
        model = self._model(kind)
        for name, tensors in wrong.items():
            path = model.folder / name
            file, ranges = PartsFile(path), ranges_of(path)
            with reported(path):
                file.forget([ranges[tensor] for tensor in tensors], ranges)
            self._arrivals.set(path, file.here)
        lacks = self._lacks(model)
        for name, tensors in fetched.items():  # some for hosts that share the folder
            known = PartsFile(model.folder / name).hashes
            gone = [tensor for tensor in tensors if tensor not in known]
            lacks[name] = list(dict.fromkeys([*lacks.get(name, ()), *gone]))
        return lacks

    def check(self, kind: str) -> None:
        """Raise ModelError if a whole file has another hash than the hub states."""
        model = self._model(kind)
        hub = RelayedSource(self._launcher, kind, HUB, self._direct(kind, model, HUB, None))
        check_whole(model.folder, model.blueprint.repository, hub)

    def read(self, kind: str, file: str, start: int, stop: int) -> Iterator[bytes]:
        """The bytes of a part of a file of this host, which waits for those that it fetches itself
        and then yields empty chunks. Raises ModelError, also for bytes that do not come."""
        path = self._model(kind).file(file)
        partial = is_partial(path)
        # Without a buffer, which might hold bytes from before they came.
        with reported(path), path.open("rb", buffering=0) as stream:
            stream.seek(start)
            while start < stop:
                part = start, min(start + CHUNK_BYTES, stop)
                while partial and not self._arrivals.wait_for(path, part, WAIT_S):
                    yield b""
                chunk = stream.read(part[1] - start)
                if not chunk:
                    raise ModelError(f"{path} ends at byte {start}; fetch it again")
                start += len(chunk)
                yield chunk

    def stop(self) -> None:
        """End all reading soon, and listen no more. The locks stay, as threads may still write."""
        for source in list(self._sources):
            source.stop()
        if self._server is not None:
            self._server.close()

    @property
    def _launcher(self) -> Channel:
        assert self.channel is not None
        return self.channel

    def _model(self, kind: str) -> _Model:
        if kind not in self._models:
            raise ModelError(f"{kind!r} is no model of this start")
        return self._models[kind]

    def _verify(self, model: _Model) -> int:
        """Forget bytes that differ from what was recorded; how many."""
        files = [model.file(name) for name in model.blueprint.headers]
        return sum(PartsFile(file).verify(ranges_of(file)) for file in files if is_partial(file))

    def _direct(
        self, kind: str, model: _Model, source: str, at: tuple[str, int] | None
    ) -> Direct | None:
        if source == HUB:
            # The launcher's own host has nothing to gain from a URL.
            far = isinstance(self.channel, ByteChannel)
            return DirectHub(self._launcher, kind, model.blueprint) if far else None
        if at is None:
            return None
        assert self._certificate is not None, "`listen` comes before `fetch`"
        return DirectHost(WeightLink((at[0], at[1]), self._certificate), kind)

    def _lacks(self, model: _Model) -> dict[str, list[str]]:
        """The tensors of its parts that are not here, by file."""
        found = {}
        for file, names in tensors_by_file(model.path, model.parts or ()).items():
            if is_partial(file):
                known = PartsFile(file).hashes
                lacking = [each for each in dict.fromkeys(names.values()) if each not in known]
                if lacking:
                    found[file.name] = lacking
        return found

    def _moved(self, done: int, total: int) -> None:
        now = time.monotonic()
        if done == total or now - self._reported_at > PROGRESS_S:
            self._reported_at = now
            self._launcher.call("progress", done=self._before + done, total=self._before + total)


def _name_of(path: Path) -> str | None:
    """The name of a folder of this host in the parts cache of others."""
    with suppress(ModelError):
        return folder_name(repository_of(path, as_folder=True))
    return None


def main() -> None:
    """Do what the launcher asks; anything that is printed goes to standard error."""
    writer = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    host = WeightHost()
    ready = threading.Event()

    def when_ready(function: Any) -> Any:
        def run(**arguments: Any) -> Any:
            ready.wait()
            return function(**arguments)

        return run

    handlers = {name: when_ready(each) for name, each in host.handlers().items()}
    host.channel = ByteChannel(LAUNCHER_NAME, sys.stdin.buffer, writer, handlers)
    ready.set()
    host.channel.join()
    os._exit(0)  # threads may still fetch


if __name__ == "__main__":
    main()
