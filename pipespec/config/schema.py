"""What a run needs to know, as checked dataclasses; a value out of range is a ConfigError."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipespec.controller.controller_settings import ControllerConfig
from pipespec.engine.model_settings import ModelConfig
from pipespec.errors import ConfigError
from pipespec.head.policies.policy import SpeculationPolicy
from pipespec.head.proposer import ProposerConfig
from pipespec.limits import (
    A_DEVICE,
    DEVICE,
    MAX_COUNT,
    MAX_PRIORITY,
    MAX_SECONDS,
    MAX_STAGES,
    check_whole,
)
from pipespec.sampling.params import SamplingConfig
from pipespec.settings import check_settings, setting
from pipespec.system.validation import shown
from pipespec.timing.clock import StepClock
from pipespec.transport.transport import LinkDelay
from pipespec.transport.transport_settings import TransportConfig

MAX_CHUNK = 65536  # prompt tokens in a batch
MAX_SEQS = 4096  # requests that are open at once
# Running states (linear attention, Mamba) that a stage keeps of texts, and the tokens of a prompt
# behind which one is kept.
KEPT_STATES, STATE_INTERVAL = 32, 1024
AUTO = "auto"
MAX_THREADS = 4096
RETAINED = 4  # ended ones whose text may stay in KV, for each that may be open


@dataclass(frozen=True)
class ClusterConfig:
    """How many stages there are, where they run, and how long a lost host is waited for."""

    stages: int = setting(
        4,
        "Pipeline stages into which the target's layers are divided, beside the head; unless it is "
        "set, a model.target has one for each GPU of this machine, and without GPUs one.",
        "stages",
        limits=(1, MAX_STAGES),
    )
    devices: list[str] = setting(
        ["auto"],
        "One device for all ranks, or one for each rank with the head's first: auto, cpu, cuda or "
        "cuda:N.",
    )
    hosts: str | None = setting(
        None, "Hosts file of a cluster of several hosts; cluster=FILE.yaml sets it as well."
    )
    tensor_parallel: int = setting(
        1,
        "Devices that compute the layers of each stage together.",
        "devices",
        limits=(1, MAX_STAGES),
    )
    draft_tensor_parallel: int = setting(
        1, "Devices that compute the draft model together.", "devices", limits=(1, MAX_STAGES)
    )
    threads: Any = setting(
        AUTO,
        "Threads of each rank that computes on a CPU; auto divides the cores of a host among its "
        "stages, and leaves the head some of its own where each stage has two, unless "
        "OMP_NUM_THREADS is set.",
        "threads",
        kind=int | str,
        experimental=True,
    )
    spares: int = setting(
        0,
        "More worker processes on this host, each of which can replace one that is lost.",
        "workers",
        limits=(0, MAX_STAGES),
        experimental=True,
    )
    patience_s: float = setting(
        30.0,
        "How long the cluster waits for a lost host before it goes on without it, and for your "
        "Redis before it ends.",
        "s",
        limits=(0, MAX_SECONDS),
        above=True,
        experimental=True,
    )

    def __post_init__(self) -> None:
        check_settings("cluster", self)
        if self.threads != AUTO:
            check_whole("cluster.threads", self.threads, 1, MAX_THREADS, f", or {AUTO}")
        for name in ("tensor_parallel", "draft_tensor_parallel"):
            size = getattr(self, name)
            if size > 1 and self.hosts is not None:
                raise ConfigError(
                    f"cluster.{name} is {size}, but a hosts file says itself what computes "
                    "together, as in `devices: [[cuda:0, cuda:1], cuda:2]`; leave one of them out."
                )
        for name, default in (("devices", ["auto"]), ("spares", 0)):
            if self.hosts is not None and getattr(self, name) != default:
                raise ConfigError(
                    f"cluster.{name} is {getattr(self, name)}, but a hosts file has {name} of its "
                    "own; write it there and leave this out."
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


@dataclass(frozen=True)
class DecodeConfig:
    """When the text ends, how the prompt is read, and which request is decoded first."""

    max_new_tokens: int = setting(
        128, "Longest answer of a request.", "tokens", limits=(1, MAX_COUNT)
    )
    stop: list[str] = setting([], "Strings that end the answer; they are not part of it.")
    ignore_eos: bool = setting(
        False, "Goes on after an end-of-sequence token, up to decode.max_new_tokens."
    )
    prefill_chunk: int = setting(
        128,
        "Most prompt tokens of a batch (chunked prefill).",
        "tokens",
        limits=(1, MAX_CHUNK),
        experimental=True,
    )
    chat: bool = setting(False, "Applies the tokenizer's chat template to the prompt.")
    priority: int = setting(
        0,
        "Requests of a lower number are decoded first; of equal ones, the earlier.",
        limits=(-MAX_PRIORITY, MAX_PRIORITY),
    )
    json_schema: str | None = setting(
        None, "File with a JSON schema; the answer is JSON that it describes."
    )
    regex: str | None = setting(
        None, "Regular expression that the whole answer matches; not with decode.json_schema."
    )

    def __post_init__(self) -> None:
        check_settings("decode", self)
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
        if "" in self.stop:
            raise ConfigError("decode.stop holds an empty string, which would end every text.")

    @property
    def form(self) -> str | None:
        """The setting that says what the answer must fit, if any does."""
        if self.json_schema is not None:
            return "decode.json_schema"
        return None if self.regex is None else "decode.regex"


@dataclass(frozen=True)
class SchedulingConfig:
    """How many requests are decoded at once, and whether they share their KV cache."""

    max_num_seqs: int = setting(
        64, "Most requests that are decoded at once.", "requests", limits=(1, MAX_SEQS)
    )
    max_num_batched_tokens: int | None = setting(
        None,
        "Most rows of a batch: roots, draft tokens and prompt tokens of all requests; null is what "
        "one request needs, and at least decode.prefill_chunk.",
        "rows",
        limits=(1, MAX_CHUNK),
    )
    prefix_cache: bool = setting(
        True,
        "Requests that begin with the same tokens share their KV cache, also with requests that "
        "have ended.",
    )

    def __post_init__(self) -> None:
        check_settings("scheduler", self)

    @property
    def max_retained(self) -> int:
        """Of how many requests that have ended the text may stay in KV; 0: of none."""
        return RETAINED * self.max_num_seqs if self.prefix_cache else 0


@dataclass(frozen=True)
class RunConfig:
    """What is set without a group."""

    trace: str | None = setting(
        None, "File for a trace of every rank, which https://ui.perfetto.dev shows."
    )


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    """Everything a run needs to know, checked. `request_policies` are further policies by name,
    which a request may choose instead of `policy` (`Request.policy`): the cluster is made for the
    most that any of them needs. `chosen` names the settings that were chosen for the model."""

    model: ModelConfig
    cluster: ClusterConfig
    policy: SpeculationPolicy
    proposer: ProposerConfig
    sampling: SamplingConfig
    decode: DecodeConfig
    scheduler: SchedulingConfig
    controller: ControllerConfig
    transport: TransportConfig
    emulate: StepClock
    emulate_link: LinkDelay
    request_policies: Mapping[str, SpeculationPolicy] = field(default_factory=dict)
    chosen: tuple[str, ...] = ()

    @property
    def time_scale(self) -> float | None:
        """How many times longer everything takes here than is reported; None: times are real."""
        return self.emulate.scale if self.emulate or self.emulate_link else None

    @property
    def policies(self) -> tuple[SpeculationPolicy, ...]:
        """All that requests may be decoded by, the cluster's own first."""
        return self.policy, *self.request_policies.values()

    @property
    def max_nodes(self) -> int:
        return max(each.max_nodes for each in self.policies)

    @property
    def max_rows(self) -> int:
        least = max(self._most_rows, self.decode.prefill_chunk)
        return self.scheduler.max_num_batched_tokens or least

    @property
    def fed_rows(self) -> int:
        """Rows of one batch that are no prompt's, at most."""
        requests = self.scheduler.max_num_seqs
        most = max(each.max_rows * (1 if each.shared else requests) for each in self.policies)
        return min(most, self.max_rows)

    @property
    def _most_rows(self) -> int:
        """Rows of one request that a batch has at most, prompts left out."""
        return max(each.max_rows for each in self.policies)

    def __post_init__(self) -> None:
        if self.proposer.needs_draft and self.model.draft is None:
            raise ConfigError(
                "model.draft is null, but this proposer uses a draft model; name its folder "
                "or hub id, or choose proposer=suffix, which needs none."
            )
        if self.proposer.needs_head and self.model.draft_quantization is not None:
            raise ConfigError(
                "model.draft_quantization is for draft models, not for draft heads; leave it out."
            )
        if self.proposer.overlap == "no" and not any(each.refills for each in self.policies):
            raise ConfigError(
                "proposer.overlap is no, but only best_first with policy.row_cost=null can draft "
                "while the stages wait; leave proposer.overlap out."
            )
        self.emulate.check(self.cluster.stages)
        given = self.scheduler.max_num_batched_tokens
        if given is not None and given < self._most_rows:
            raise ConfigError(
                f"scheduler.max_num_batched_tokens is {given}, but this policy feeds up to "
                f"{self._most_rows} rows of one request; raise it, or lower policy.width."
            )
        if self.trace is not None:
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
