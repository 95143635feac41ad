"""Measures the hosts of a hosts file: their devices, and the links between them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from itertools import count
from typing import Any, NamedTuple

from pipespec.cluster.deployment.deployment import Deployment
from pipespec.cluster.diagnostics.examine_hosts import Examination, examine_hosts
from pipespec.config.hosts import Host, HostsFile
from pipespec.config.schema import AUTO, Config
from pipespec.engine.formats.slice_tensors import parts_of
from pipespec.engine.inspection.inspection import CheckpointInfo, Sizes
from pipespec.engine.precision import KV_PLAIN
from pipespec.errors import ConfigError, HostFailed
from pipespec.placement.costs import Route, Worker
from pipespec.placement.host_figures import Figures, HostFigures, LinkFigures
from pipespec.placement.measurements import choose_dtype, layer_kinds
from pipespec.system.cores import num_cores, share_cores

# Tokens of text that a batch attends to while it is timed.
LENGTH = 1024


class MeasuredHost(NamedTuple):
    """The workers of a host, and its links to and from other hosts."""

    workers: tuple[Worker, ...]
    routes: Mapping[tuple[str, str], Route]


@dataclass(frozen=True)
class MeasureRequest:
    """What to measure. `roles`: of each device, "stage" and "draft", or one of them. `rows`,
    `length`: the width of a batch, and how many tokens of text it attends to. `children`: the
    draft's candidates. `dtype`: of plain weights, and if it was asked for, of weights of few bits
    too. `quantization`: of target and draft. `groups`: the sizes of those devices, in order, that
    compute together; nothing: none do. `threads`: `cluster.threads`. `shared`: the target's name in
    the parts cache of a host that got these `parts` of it from others (`Repository`); None: it is
    at `target`."""

    target: str
    draft: str | None
    devices: tuple[str, ...]
    roles: tuple[tuple[str, ...], ...]
    rows: int
    length: int
    children: int
    dtype: str
    quantization: tuple[str | None, str | None] = (None, None)
    keep_quantized: str = "auto"
    kv_dtype: str = KV_PLAIN
    dtype_asked: bool = False
    groups: tuple[int, ...] = ()
    threads: int | str = AUTO
    shared: Mapping[str, Any] | None = None
    parts: tuple[str, ...] = ()

    def num_threads(self) -> int:
        """Threads of a stage on the CPU, as ranks set them, if one worker that can draft becomes
        the head where there are several."""
        if self.threads != AUTO:
            return int(self.threads)
        if "OMP_NUM_THREADS" in os.environ:
            return int(os.environ["OMP_NUM_THREADS"])
        on_cpu = [
            roles for device, roles in zip(self.devices, self.roles, strict=True) if device == "cpu"
        ]
        has_head = len(on_cpu) > 1 and any("draft" in roles for roles in on_cpu)
        num_stages = max(1, len(on_cpu) - has_head)
        return share_cores(num_cores(), num_stages, has_head=has_head).stage

    def weight_format(self, info: CheckpointInfo, role: str) -> str | None:
        """How target (`stage`) or draft is held; see CheckpointInfo."""
        return info.weight_format(
            self.quantization[role == "draft"], self.keep_quantized, self.dtype_of(info)
        )

    def sizes(self, info: CheckpointInfo, role: str) -> Sizes:
        return info.loaded(self.dtype_of(info), self.weight_format(info, role))

    def kinds(self, info: CheckpointInfo) -> tuple[int, ...]:
        return layer_kinds(info, self.sizes(info, "stage").layers)

    def dtype_of(self, info: CheckpointInfo) -> str:
        if self.dtype_asked or not info.few_bits:
            return info.compute_dtype(self.dtype)
        return info.chosen_dtype("auto", self.devices)


def measure_hosts(
    hosts_file: HostsFile,
    config: Config,
    on_host: Callable[[int, int], None] = lambda done, of: None,
    *,
    sums: bool = False,
) -> Figures:
    """Measure everything that `pipespec.placement.measurements` wants. `on_host` is called with how
    many hosts have been measured, and of how many. `sums`: the devices of each host might form any
    groups: measure what a sum of all takes, which counts for groups of fewer too. Raises
    ConfigError: a device of the hosts file is not a single device, or a host is started by hand;
    HostFailed: a host, or a link between two hosts, cannot be used."""
    hosts_file.require_devices()
    if names := hosts_file.by_hand:
        raise ConfigError(
            f"{', '.join(names)} cannot be measured, as `ssh: none` means that you start it by "
            "hand; divide the layers with `split`, or measure a hosts file without it."
        )
    links = _links(hosts_file, config)
    dtype, rows = choose_dtype(hosts_file, config), config.policy.max_rows
    answers: dict[str, HostFigures] = {}
    numbers = count(1)
    # Hosts that are this machine would slow one another down.
    others = [[host] for host in hosts_file.hosts if not host.local]
    together = [[host for host in hosts_file.hosts if host.local], *others]
    with ThreadPoolExecutor(len(together)) as pool, Examination(hosts_file) as examination:

        def measure(hosts: Sequence[Host]) -> None:
            for host in hosts:
                request = _request_for(hosts_file, host, config, dtype)
                if sums:
                    request = replace(request, groups=(len(host.devices),))
                examination.start(host.name)
                answers[host.name] = examination.measure_devices(host.name, asdict(request))
                examination.end(host.name)  # the next one may need its memory
                on_host(next(numbers), len(hosts_file.hosts))

        for each in as_completed([pool.submit(measure, hosts) for hosts in together]):
            each.result()  # the first that fails ends the others
    if sums:
        for figures in answers.values():
            for device in figures["devices"]:
                device["sum_ms"] = figures["devices"][0]["sum_ms"]
    first = answers[hosts_file.hosts[0].name]
    return Figures(
        rows=rows,
        dtype=dtype,
        target=first["target"],
        draft=first["draft"],
        members={
            worker: found
            for host in hosts_file.hosts
            for worker, found in zip(host.workers, answers[host.name]["devices"], strict=True)
        },
        links=links,
    )


def measure_joined(host: Host, deployment: Deployment, layers: range) -> MeasuredHost:
    """Measure a host that joins a running cluster, and its links to the others. It computes stages
    alone, and has the weights of these layers of the target. Raises HostFailed."""
    config, target = deployment.config, deployment.target
    shared = deployment.shared.get("target")
    request = _request(
        host,
        config,
        target=str(target.path),
        draft=None,
        roles=(("stage",),) * len(host.devices),
        dtype=deployment.dtype,
        dtype_asked=True,
        shared=None if shared is None else asdict(shared),
        parts=tuple(sorted(parts_of(layers, target.num_layers, tied=target.tied))),
    )
    with Examination(HostsFile("joined", (*deployment.hosts, host))) as examination:
        examination.start(host.name)
        devices = examination.measure_devices(host.name, asdict(request))["devices"]
        for each in deployment.hosts:
            examination.start(each.name)
        links = examination.links_of(host.name)
    workers = []
    for name, found in zip(host.workers, devices, strict=True):
        stage = found.get("stage")
        if stage is None:
            raise HostFailed(
                f"{host.name}: no times of {name} came; install the same pipespec there"
            )
        times: dict[str, Any] = {key: ms for key, ms in stage.items() if key != "kv_slot_bytes"}
        workers.append(Worker(name, **times, memory_bytes=found["memory_bytes"]))
    routes = {
        (link.source, link.to): Route(link.measured.rtt_ms, link.measured.gbit_per_s)
        for link in links
        if link.measured is not None
    }
    return MeasuredHost(tuple(workers), routes)


def _links(hosts_file: HostsFile, config: Config) -> list[LinkFigures]:
    """Round trip and rate between hosts, once `pipespec doctor` finds nothing wrong with them."""
    if len(hosts_file.hosts) == 1:
        return []
    report = examine_hosts(hosts_file, config.model)
    for finding in report.findings:
        if finding.error:
            raise HostFailed(finding.sentence)
    return [
        {
            "source": link.source,
            "to": link.to,
            "rtt_ms": link.measured.rtt_ms,
            "gbit_s": link.measured.gbit_per_s,
        }
        for link in report.links
        if link.measured is not None
    ]


def _request_for(hosts_file: HostsFile, host: Host, config: Config, dtype: str) -> MeasureRequest:
    """What to measure on a host: what its workers may become."""

    def roles(worker: str) -> tuple[str, ...]:
        if hosts_file.draft is not None and worker in hosts_file.members_of(hosts_file.draft):
            return ("draft",)
        free = hosts_file.draft is None and worker not in hosts_file.spare_workers
        return ("stage", "draft") if free and worker in hosts_file.heads else ("stage",)

    return _request(
        host,
        config,
        target=host.target or config.model.target,
        draft=(host.draft or config.model.draft) if config.proposer.needs_draft else None,
        roles=tuple(map(roles, host.workers)),
        groups=host.groups,
        dtype=dtype,
        dtype_asked=config.model.dtype != "auto",
    )


def _request(host: Host, config: Config, **fields: Any) -> MeasureRequest:
    return MeasureRequest(
        devices=host.devices,
        rows=config.policy.max_rows,
        length=LENGTH,
        children=config.policy.children,
        quantization=(config.model.quantization, config.model.draft_quantization),
        keep_quantized=config.model.keep_quantized,
        kv_dtype=config.model.kv_dtype,
        threads=config.cluster.threads,
        **fields,
    )
