"""Measures the boxes of a hosts file: their devices, and the links between them."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

from pipespec.cluster import ssh
from pipespec.config.hosts import Box, Hosts
from pipespec.config.schema import Config
from pipespec.errors import HostFailed
from pipespec.planning.placement import BoxFigures, Figures, LinkFigures, choose_dtype
from pipespec.survey import doctor
from pipespec.survey.measure import Wish
from pipespec.system.reading import Unreadable, parse_json, typed

MODULE = "pipespec.survey.measure"
# Loading some layers and the whole draft takes minutes where the disk is slow.
TIMEOUT_S = 900.0
# Tokens of text that a batch attends to while it is timed.
LENGTH = 1024


def gather(
    hosts: Hosts, config: Config, on_box: Callable[[int, int], None] = lambda done, of: None
) -> Figures:
    """Measure everything that `pipespec.planning.placement` wants.

    Args:
        on_box: called with how many boxes have been measured, and of how many.

    Raises:
        ConfigError: a device that is no particular one.
        HostFailed: a box or a link between two boxes that cannot be used.
    """
    hosts.require_devices()
    links = _links(hosts, config)
    dtype, rows = choose_dtype(hosts, config), config.feed.max_rows
    answers: dict[str, BoxFigures] = {}

    def ask(box: Box) -> None:
        wish = asdict(_wish(hosts, box, config, dtype))
        told = ssh.run(box, MODULE, input=json.dumps(wish).encode(), timeout=TIMEOUT_S)
        try:
            answers[box.name] = typed("its answer", parse_json(told), BoxFigures)
        except Unreadable as error:
            raise HostFailed(
                f"{box.name}: its answer cannot be read ({error}); install the same pipespec there "
                "as here."
            ) from error
        on_box(len(answers), len(hosts.boxes))

    # Boxes that are this machine would slow one another down.
    for box in hosts.boxes:
        if box.local:
            ask(box)
    with ThreadPoolExecutor(len(hosts.boxes)) as pool:
        list(pool.map(ask, (box for box in hosts.boxes if not box.local)))
    first = answers[hosts.boxes[0].name]
    return Figures(
        rows=rows,
        length=LENGTH,
        dtype=dtype,
        quantization=(config.model.quantization, config.model.draft_quantization),
        target=first["target"],
        draft=first["draft"],
        members={
            member: found
            for box in hosts.boxes
            for member, found in zip(box.members, answers[box.name]["devices"], strict=True)
        },
        links=links,
    )


def _links(hosts: Hosts, config: Config) -> list[LinkFigures]:
    """Round trip and rate between boxes, once `pipespec doctor` finds nothing wrong with them."""
    if len(hosts.boxes) == 1:
        return []
    report = doctor.examine(hosts, config.model)
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


def _wish(hosts: Hosts, box: Box, config: Config, dtype: str) -> Wish:
    """What to measure on a box: what its members may become."""

    def roles(member: str) -> tuple[str, ...]:
        if hosts.draft == member:
            return ("draft",)
        can_draft = hosts.draft is None and member not in hosts.spare_members
        return ("stage", "draft") if can_draft else ("stage",)

    draft = None
    if config.source.needs_draft:
        draft = box.draft or config.model.draft
    return Wish(
        target=box.target or config.model.target,
        draft=draft,
        devices=box.devices,
        roles=tuple(map(roles, box.members)),
        rows=config.feed.max_rows,
        length=LENGTH,
        children=config.feed.children,
        dtype=dtype,
        quantization=(config.model.quantization, config.model.draft_quantization),
    )
