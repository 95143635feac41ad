"""What a run needs to know, as checked dataclasses, which `compose` makes from `conf/`.

Whatever is out of range is one sentence in a ConfigError.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipespec.config.model import ModelConfig
from pipespec.engine.attention.choose import AUTO
from pipespec.errors import ConfigError
from pipespec.head.source.protocol import Cascading
from pipespec.limits import (
    A_DEVICE,
    DEVICE,
    LARGEST_PORT,
    MAX_COUNT,
    MAX_PRIORITY,
    MAX_SECONDS,
    MAX_STAGES,
    check_choice,
    check_number,
    check_whole,
)
from pipespec.system.reading import shown
from pipespec.system.waiting import WAITS

if TYPE_CHECKING:  # these import torch, which a wrong setting can do without
    from pipespec.emulation import Link, Pace
    from pipespec.head.feed.policy import FeedPolicy
    from pipespec.head.source.protocol import SourceSpec
    from pipespec.sampling.spec import VerifierSpec

SYNCS = ("lockstep", "free")
GLOO, NCCL = "gloo", "nccl"
BACKENDS = ("auto", GLOO, NCCL)
URL_SCHEMES = ("redis", "rediss", "unix")
MAX_CHUNK = 65536  # prompt tokens in a batch
MAX_SEQS = 4096  # requests that are open at once
RETAINED = 4  # ended ones whose text may stay in KV, for each that may be open
A_FREE_PORT = "; 0 is a free one"
NAMESPACE = re.compile(r"[A-Za-z0-9_.-]+")


@dataclass(frozen=True)
class ClusterConfig:
    """How many stages, how they are grouped, and the device of each rank.

    `groups` are PipeDec's G_i, consecutive stages that together form one pipeline step: their
    sizes, or one size for all, or None for every stage by itself.
    `sync` is "lockstep" (a rank sends when it knows the verdict of its step) or "free" (it does
    not wait for it).
    `devices` holds one entry for every rank, or one per rank with the head's first.
    `mid_device` is where the head's machine computes a mid-size model, None: on the head's device.
    `hosts` is a hosts file (`pipespec.config.hosts`), None: all ranks run on this machine.
    `tensor_parallel` workers of this machine compute the layers of each stage together, each with
    a part of every matrix; `devices` then names those of a stage one after another.
    `draft_tensor_parallel` workers compute the draft together, which the head leads.
    `split` are the layers of each stage, None: as even as can be, or as the hosts file says.
    `spares` workers of this machine hold no layers until one is needed.
    `patience_s`: how long a lost host, or a Redis that is not ours, is waited for.
    `stall_s`: how long a step may take before the ranks meet anew.
    """

    stages: int = 4
    groups: int | list[int] | None = None
    sync: str = "lockstep"
    devices: list[str] = field(default_factory=lambda: ["auto"])
    mid_device: str | None = None
    hosts: str | None = None
    tensor_parallel: int = 1
    draft_tensor_parallel: int = 1
    split: list[int] | None = None
    spares: int = 0
    patience_s: float = 30.0
    stall_s: float = 30.0

    def __post_init__(self) -> None:
        check_whole("cluster.stages", self.stages, 1, MAX_STAGES)
        check_whole("cluster.spares", self.spares, 0, MAX_STAGES)
        for name in ("tensor_parallel", "draft_tensor_parallel"):
            size = getattr(self, name)
            check_whole(f"cluster.{name}", size, 1, MAX_STAGES)
            if size > 1 and self.hosts is not None:
                raise ConfigError(
                    f"cluster.{name} is {size}, but a hosts file says itself what computes "
                    "together, as in `devices: [[cuda:0, cuda:1], cuda:2]`; leave one of them out."
                )
        for name in ("patience_s", "stall_s"):
            check_number(f"cluster.{name}", getattr(self, name), 0, MAX_SECONDS, above=True)
        if self.split is not None and (len(self.split) != self.stages or min(self.split) < 1):
            raise ConfigError(
                f"cluster.split is {self.split}, but must be a positive number of layers for each "
                f"of {self.stages} stages."
            )
        check_choice("cluster.sync", self.sync, SYNCS)
        sizes = self.group_sizes
        if sizes is not None and (min(sizes, default=0) < 1 or sum(sizes) != self.stages):
            raise ConfigError(
                f"cluster.groups is {self.groups}, but must be positive sizes that add up to "
                f"cluster.stages={self.stages}, or one size that divides it."
            )
        if self.mid_device is not None and (
            self.mid_device == "auto" or not DEVICE.fullmatch(self.mid_device)
        ):
            raise ConfigError(
                f"cluster.mid_device is {self.mid_device!r}, but must be cpu, cuda or cuda:N."
            )
        for device in self.devices:
            if not DEVICE.fullmatch(device):
                raise ConfigError(f"cluster.devices holds {device!r}, but {A_DEVICE}.")
        workers = self.draft_tensor_parallel + self.stages * self.tensor_parallel
        if len(self.devices) not in (1, workers):
            each = ""
            if workers > 1 + self.stages:
                each = f", of {self.draft_tensor_parallel} and {self.tensor_parallel} devices each"
            raise ConfigError(
                f"cluster.devices names {len(self.devices)} devices, but must name 1 (for every "
                f"rank) or {workers} (the head, then {self.stages} stages{each})."
            )

    @property
    def group_sizes(self) -> tuple[int, ...] | None:
        """How many stages each group has, in order; None: no groups."""
        if isinstance(self.groups, int):
            return (self.groups,) * (self.stages // max(self.groups, 1))
        return None if self.groups is None else tuple(self.groups)


@dataclass(frozen=True)
class DecodeConfig:
    """When the text ends, how the prompt is read, and who is served first.

    `priority`: of requests that wait, the least is served first; of equal ones, who came first.
    `json_schema`, a file, and `regex` say what the answer must fit; one of them at most.
    """

    max_new_tokens: int = 128
    stop: list[str] = field(default_factory=list)
    ignore_eos: bool = False
    prefill_chunk: int = 128
    chat: bool = False
    priority: int = 0
    json_schema: str | None = None
    regex: str | None = None

    def __post_init__(self) -> None:
        if self.json_schema is not None and self.regex is not None:
            raise ConfigError(
                "decode.json_schema and decode.regex are both set, but an answer fits one form; "
                "leave one out."
            )
        if self.ignore_eos and not (self.json_schema is None and self.regex is None):
            raise ConfigError(
                "decode.ignore_eos is set, but an answer that must fit a form ends where the form "
                "does; leave it out."
            )
        check_whole("decode.priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)
        check_whole("decode.max_new_tokens", self.max_new_tokens, 1, MAX_COUNT)
        check_whole("decode.prefill_chunk", self.prefill_chunk, 1, MAX_CHUNK)
        if "" in self.stop:
            raise ConfigError("decode.stop holds an empty string, which would end every text.")


@dataclass(frozen=True)
class SchedulingConfig:
    """How many requests are decoded at once, how many rows one batch of them has, and whether they
    share KV.

    `max_num_batched_tokens`: roots, guesses and pieces of prompts of all requests; None: as many
    as a single request feeds, and at least `decode.prefill_chunk`. `prefix_cache`: requests that
    begin with the same tokens share their KV, also with those that have ended.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    prefix_cache: bool = True

    @property
    def max_retained(self) -> int:
        """Of how many requests that have ended the text may stay in KV; 0: of none."""
        return RETAINED * self.max_num_seqs if self.prefix_cache else 0

    def __post_init__(self) -> None:
        check_whole("scheduler.max_num_seqs", self.max_num_seqs, 1, MAX_SEQS)
        if self.max_num_batched_tokens is not None:
            check_whole(
                "scheduler.max_num_batched_tokens", self.max_num_batched_tokens, 1, MAX_CHUNK
            )


@dataclass(frozen=True)
class ControllerConfig:
    """Which Redis; no `url` means a private server for this cluster.

    Of a private server: the TCP port where other hosts reach it (0: a free one), the folder in
    which it keeps its data beyond its end, and the folder with cert.pem, key.pem and ca.pem if
    TCP is to be TLS.
    """

    url: str | None = field(default=None, repr=False)  # it may hold a password
    namespace: str = "pipespec"
    port: int = 0
    data: str | None = None
    tls: str | None = None

    def __post_init__(self) -> None:
        check_whole("controller.port", self.port, 0, LARGEST_PORT, A_FREE_PORT)
        for name in ("data", "tls"):
            if getattr(self, name) == "":
                raise ConfigError(f"controller.{name} is empty, but must name a folder or be null.")
        if self.url is not None:
            for name in ("port", "data", "tls"):
                if getattr(self, name):
                    raise ConfigError(
                        f"controller.{name} is for the private server, but controller.url names "
                        "another: leave one of them out."
                    )
            scheme, separator, _ = self.url.partition("://")
            # The URL itself may hold a password, so no message repeats it.
            if not separator or scheme not in URL_SCHEMES:
                raise ConfigError(
                    "controller.url must begin with redis://, rediss:// or unix://, "
                    "as in redis://user:password@host:6379/0."
                )
        if not NAMESPACE.fullmatch(self.namespace):
            raise ConfigError(
                f"controller.namespace is {self.namespace!r}, but must be letters, digits, "
                "'_', '-' and '.'."
            )


@dataclass(frozen=True)
class TransportConfig:
    """What carries batches between ranks, the port where they meet (0: a free one), and how ranks
    wait for one another."""

    backend: str = "auto"
    port: int = 0
    wait: str = AUTO

    def __post_init__(self) -> None:
        check_choice("transport.backend", self.backend, BACKENDS)
        check_choice("transport.wait", self.wait, WAITS)
        check_whole("transport.port", self.port, 0, LARGEST_PORT, A_FREE_PORT)


@dataclass(frozen=True)
class Config:
    """Everything a run needs to know, checked.

    `ways` are further policies by name, which a request may name instead of `feed`
    (`Request.feed`): the cluster is made for the most that any of them needs.
    """

    model: ModelConfig
    cluster: ClusterConfig
    feed: FeedPolicy
    source: SourceSpec
    verify: VerifierSpec
    decode: DecodeConfig
    scheduler: SchedulingConfig
    controller: ControllerConfig
    transport: TransportConfig
    pace: Pace
    link: Link
    trace: str | None = None
    ways: Mapping[str, FeedPolicy] = field(default_factory=dict)

    @property
    def policies(self) -> tuple[FeedPolicy, ...]:
        """All that requests may be decoded by, the cluster's own first."""
        return self.feed, *self.ways.values()

    @property
    def capacity(self) -> int:
        """Nodes that the tree of a request may hold."""
        return max(each.capacity for each in self.policies)

    @property
    def max_rows(self) -> int:
        """Rows of one batch at most."""
        least = max(self._most_rows, self.decode.prefill_chunk)
        return self.scheduler.max_num_batched_tokens or least

    @property
    def fed_rows(self) -> int:
        """Rows of one batch that are no prompt's, at most."""
        requests = self.scheduler.max_num_seqs
        most = max(each.max_rows * (1 if each.shared else requests) for each in self.policies)
        return min(most, self.max_rows)

    @property
    def needs_mid(self) -> bool:
        """Whether the head loads `model.mid`."""
        return isinstance(self.source, Cascading) and self.source.needs_mid

    @property
    def mid_rows(self) -> int:
        """Nodes that one pass of a mid-size model scores; 0: there is no such model."""
        return self.source.mid_rows if isinstance(self.source, Cascading) else 0

    @property
    def _most_rows(self) -> int:
        """Rows of one request that a batch has at most, prompts left out."""
        return max(each.max_rows for each in self.policies)

    def __post_init__(self) -> None:
        if self.source.needs_draft and self.model.draft is None:
            raise ConfigError(
                "model.draft is null, but this source guesses with a draft model; name its folder "
                "or choose source=suffix, which needs none."
            )
        if self.needs_mid and self.model.mid is None:
            raise ConfigError(
                "model.mid is null, but in a cascade a mid-size model scores the tree; name its "
                "folder, or choose source=draft_model."
            )
        self.pace.check(self.cluster.stages)
        given = self.scheduler.max_num_batched_tokens
        if given is not None and given < self._most_rows:
            raise ConfigError(
                f"scheduler.max_num_batched_tokens is {given}, but this policy feeds up to "
                f"{self._most_rows} rows of one request; raise it, or lower feed.width."
            )
        if self.trace is None:
            return
        check_new_file("trace", self.trace)


def masked(text: str) -> str:
    """A setting as messages and results may show it: without the password of a URL."""
    text = re.sub(r"://\S*@", "://***@", text)
    return re.sub(r"password=[^&\s]*", "password=***", text)


def check_new_file(name: str, file: str) -> None:
    """Refuse now what could not be written after the run. Raises ConfigError."""
    if not file or "\0" in file or os.path.isdir(file):
        raise ConfigError(f"{name} is {shown(file)}, but must name a file.")
    if not os.path.isdir(os.path.dirname(os.path.realpath(file))):
        raise ConfigError(f"{name} is {shown(file)}, but the folder of that file is missing.")


# Sections that are plain values; the others name their class in `_target_`.
SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "cluster": ClusterConfig,
    "decode": DecodeConfig,
    "scheduler": SchedulingConfig,
    "controller": ControllerConfig,
    "transport": TransportConfig,
}
