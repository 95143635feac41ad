"""The models of `conf/auto.yaml`, which are proposed where none in the caches fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipespec.engine.checkpoint.inspection import inspect
from pipespec.engine.checkpoint_parts.hub_client import HubClient, Unavailable
from pipespec.errors import ConfigError, ModelError
from pipespec.instruments.model_choice.candidates import Candidate
from pipespec.instruments.model_choice.fitting import usable_bytes
from pipespec.instruments.model_choice.host_memory import Memory
from pipespec.system.folders import resource_dir
from pipespec.system.validation import Unreadable, read_text, typed

TABLE = "auto.yaml"
# Weights take at least this share of files of 16 bits: nf4, of which the embedding has none.
LEAST_SHARE = 0.28
WEIGHTS = (".safetensors", ".gguf")


@dataclass(frozen=True)
class OfferedPair:
    """Hub ids of a target and its draft."""

    target: str
    draft: str


@dataclass(frozen=True)
class Table:
    """The context for which KV memory is reserved, in tokens, and the pairs, the largest first."""

    context: int
    offered: tuple[OfferedPair, ...]


def read_table() -> Table:
    """Raises ConfigError."""
    from yaml import YAMLError, safe_load  # type: ignore[import-untyped]

    file = resource_dir("conf") / TABLE
    try:
        values = safe_load(read_text(file))
        pairs = typed("offered", values["offered"], tuple[OfferedPair, ...])
        return Table(typed("context", values["context"], int), pairs)
    except (Unreadable, YAMLError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} cannot be read ({error}); install pipespec again.") from error


def offered(table: Table, usable: Memory) -> Iterator[tuple[Candidate, Candidate, int]]:
    """Pairs whose files the hub has and which are not far too large, with the bytes of their
    weights; small files and headers are fetched. Raises Unavailable if the hub cannot be
    reached."""
    room = sum(usable_bytes(free) for devices in usable.values() for free in devices.values())
    for pair in table.offered:
        try:
            sizes = [_weight_bytes(name) for name in (pair.target, pair.draft)]
            if LEAST_SHARE * sum(sizes) > room:
                continue
            target, draft = (Candidate(n, inspect(n)) for n in (pair.target, pair.draft))
        except Unavailable:
            raise
        except ModelError:  # it is private, or this hub lacks it
            continue
        yield target, draft, sum(sizes)


def _weight_bytes(repo: str) -> int:
    """Of the files of a repository on the hub. Raises ModelError."""
    files = HubClient(repo).revision(max_tries=1).files
    return sum(file.size for name, file in files.items() if name.endswith(WEIGHTS))
