"""`python -m pipespec.cluster.weight_host`: fetches the weights that a host computes, on that host.

The launcher starts it over SSH and talks to it through its standard input and output
(`byte_channel`). It calls:

    hello()                                            the version of pipespec
    holds(path, shared, parts)                         whether the host has all that it needs
    offer(kind, path, blueprint, parts)                what it has and lacks of a model
    fetch(kind, sources)                               fetch what is lacking; wrong tensors, by file
    read(kind, file, start, stop)                      a stream of bytes, for another host

and answers, to this process:

    locate(kind, file, fresh)                          where the hub has a file, as a signed URL
    read(kind, source, file, start, stop)              a stream of bytes, of `source`
    progress(done, total)

The process ends with its standard input. The token of the hub stays with the launcher.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipespec.cluster.byte_channel import CHUNK_BYTES, ByteChannel
from pipespec.cluster.host_weights import own_path
from pipespec.engine.formats.gguf import is_gguf
from pipespec.engine.partial_checkpoint import missing, tensors_by_file
from pipespec.engine.parts.blueprint import Blueprint, holdings
from pipespec.engine.parts.fetching import check_whole, fetch
from pipespec.engine.parts.hub_client import HubClient, Location, Unavailable
from pipespec.engine.parts.parts_file import PartsFile, is_partial, reported
from pipespec.engine.parts.ranges import Range, RangeSet
from pipespec.engine.parts.repository import SharedName, parts_cache, ranges_of
from pipespec.errors import ModelError
from pipespec.system.versions import own_version

# Names of sources; any other one is a host.
HUB, LAUNCHER = "hub", "launcher"
LAUNCHER_NAME = "the launcher"
# Seconds between two reports of progress.
PROGRESS_S = 0.2


def read_file(path: Path, part: Range) -> Iterator[bytes]:
    """The bytes of a part of a file here. Raises ModelError."""
    at, stop = part
    with reported(path), path.open("rb") as stream:
        stream.seek(at)
        while at < stop:
            chunk = stream.read(min(CHUNK_BYTES, stop - at))
            if not chunk:
                raise ModelError(f"{path} ends at byte {at}; fetch it again")
            at += len(chunk)
            yield chunk


def is_here(path: Path, part: Range) -> bool:
    """Whether a part of a file can be read here."""
    return path.is_file() and (not is_partial(path) or part in PartsFile(path).here)


@dataclass
class _Model:
    """A model of which this host fetches its parts."""

    path: Path
    blueprint: Blueprint
    parts: list[str]

    @property
    def folder(self) -> Path:
        return self.path.parent if is_gguf(self.path) else self.path


@dataclass
class WeightHost:
    """What the launcher may ask of a host."""

    channel: ByteChannel | None = None
    _models: dict[str, _Model] = field(default_factory=dict)
    _before: int = 0  # bytes of the fetches that are done
    _reported_at: float = 0.0

    def handlers(self) -> dict[str, Any]:
        return {
            "hello": own_version,
            "holds": self.holds,
            "offer": self.offer,
            "fetch": self.fetch,
            "read": self.read,
        }

    def holds(self, path: str, shared: Mapping[str, Any], parts: Sequence[str]) -> bool:
        """Whether parts of a model are here, which the launcher has at `path`."""
        own = own_path(Path(path), None, SharedName(**shared), parts)
        return own is not None and not missing(own, parts)

    def offer(
        self, kind: str, path: str, blueprint: Mapping[str, Any], parts: Sequence[str]
    ) -> dict[str, Any] | None:
        """What of a model is here in the parts cache: hashes by file and tensor, and the tensors
        that are lacking. Makes its folder there; None: the host has another that lacks nothing."""
        plan = Blueprint.from_json(blueprint)
        name = SharedName(plan.name, plan.file, plan.repository.on_hub)
        own = own_path(Path(path), None, name, parts)
        if own is not None and not missing(own, parts) and not own.is_relative_to(parts_cache()):
            return None
        model = self._models[kind] = _Model(plan.build(), plan, list(parts))
        lacking = {}
        for file, names in tensors_by_file(model.path, parts).items():
            if is_partial(file):
                found, ranges = PartsFile(file), ranges_of(file)
                found.verify(ranges)
                wanted = dict.fromkeys(names.values())
                lacking[file.name] = [stored for stored in wanted if stored not in found.hashes]
        return {"has": holdings(model.path), "lacks": {k: v for k, v in lacking.items() if v}}

    def fetch(self, kind: str, sources: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
        """Fetch tensors, each from its source; those whose bytes are not the expected ones, by
        file. They were dropped.

        Args:
            sources: in order, of each "from", "wanted" (tensors by file) and "expected" (hashes by
                file and tensor).
        """
        model = self._models[kind]
        wrong: dict[str, list[str]] = {}
        for each in sources:
            source = _ChannelSource(self._channel, kind, each["from"], model.blueprint)
            self._before += fetch(model.folder, each["wanted"], source, self._moved)
            for file, hashes in each["expected"].items():
                if bad := _drop_others(model.folder / file, hashes):
                    wrong.setdefault(file, []).extend(bad)
        if not wrong:
            check_whole(model.folder, model.blueprint.repository)
        return wrong

    def read(self, kind: str, file: str, start: int, stop: int) -> Iterator[bytes]:
        """The bytes of a part of a file of this host."""
        return read_file(self._models[kind].folder / os.path.basename(file), (start, stop))

    @property
    def _channel(self) -> ByteChannel:
        assert self.channel is not None
        return self.channel

    def _moved(self, done: int, total: int) -> None:
        now = time.monotonic()
        if done == total or now - self._reported_at > PROGRESS_S:
            self._reported_at = now
            self._channel.call("progress", done=self._before + done, total=self._before + total)


def _drop_others(path: Path, hashes: Mapping[str, str]) -> list[str]:
    """Forget the pieces of tensors whose hash is not the expected one; the names of all tensors
    that are then lacking."""
    if not is_partial(path):
        return []
    file = PartsFile(path)
    wrong = [name for name, sha in hashes.items() if file.hashes.get(name, sha) != sha]
    if wrong:
        ranges = ranges_of(path)
        with reported(path):
            file.forget(RangeSet(ranges[name] for name in wrong), ranges)
        wrong = [name for name in hashes if ranges[name] not in file.here]
    return wrong


class _ChannelSource:
    """Bytes of one source: the hub, at the URLs that the launcher names, or what the launcher
    passes on. If the hub cannot be reached from here, the launcher passes that on too."""

    def __init__(self, channel: ByteChannel, kind: str, source: str, blueprint: Blueprint):
        self._channel, self._kind, self._source = channel, kind, source
        self._repository = blueprint.repository
        self._client = _LocatedClient(channel, kind, self._repository.repo)
        self._direct = source == HUB

    def read(self, file: str, part: Range) -> Iterator[bytes]:
        at, stop = part
        if self._direct:
            try:
                size = self._repository.weights[file].size
                for chunk in self._client.read(self._repository.commit, file, part, size):
                    at += len(chunk)
                    yield chunk
                return
            except Unavailable:
                if self._client.stopped.is_set():
                    raise
                self._direct = False
        yield from self._channel.stream(
            "read", kind=self._kind, source=self._source, file=file, start=at, stop=stop
        )

    def stop(self) -> None:
        self._client.stopped.set()


class _LocatedClient(HubClient):
    """A client of the hub that has no token: the launcher says where files are."""

    def __init__(self, channel: ByteChannel, kind: str, repo: str):
        super().__init__(repo)
        self._channel, self._kind = channel, kind
        self._known: dict[str, Location] = {}
        self._asking = threading.Lock()

    def locate(self, commit: str, name: str) -> Location:
        with self._asking:
            if name not in self._known:
                self._known[name] = self._ask(name, fresh=False)
            return self._known[name]

    def forget_location(self, commit: str, name: str) -> None:
        with self._asking:
            if name in self._known:
                self._known[name] = self._ask(name, fresh=True)

    def _ask(self, name: str, *, fresh: bool) -> Location:
        found = self._channel.call("locate", kind=self._kind, file=name, fresh=fresh)
        if found is None:
            raise Unavailable("the hub sends this file to holders of the token alone")
        return Location(found["url"], found["headers"])


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
