"""The results of `pipespec doctor`: reports on hosts and links, and findings, here those on models:
missing, or unlike those of the others. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from pipespec.cluster.diagnostics.inventory import Inventory
from pipespec.cluster.diagnostics.probe import Link, Listening
from pipespec.config.hosts import HostsFile
from pipespec.engine.checkpoint.fingerprint import Fingerprint
from pipespec.engine.formats.safetensors_headers import CONFIG, INDEX
from pipespec.engine.formats.slice_tensors import listed

COMES = "the host gets what it computes when the cluster starts, or by `pipespec cache fetch`"


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem: a sentence with its remedy, and the hosts that it concerns. An *error* keeps the
    hosts from working together, or from generating the same text everywhere; other findings are
    warnings."""

    error: bool
    hosts: tuple[str, ...]
    sentence: str


@dataclass(slots=True)
class HostReport:
    """What is known of a host. `failure` has ended its examination, if it is not None."""

    inventory: Inventory | None = None
    listening: Listening | None = None
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class LinkReport(Link):
    source: str
    to: str


def model_findings(
    hosts_file: HostsFile, inventories: Mapping[str, Inventory], fetchable: Collection[str]
) -> Iterator[Finding]:
    """What is wrong with the target, the draft and the mid-size model; `fetchable`: those of which
    hosts get what they lack when a cluster starts."""
    for part in ("target", "draft", "mid"):
        found = {
            name: inventory.models[part]
            for name, inventory in inventories.items()
            if part in inventory.models
        }
        usable = {name: model for name, model in found.items() if model.problem is None}
        # Without a place for the draft in the file, one host that has it is enough, and one that
        # is not examined may.
        nowhere = not usable and not hosts_file.by_hand
        needed = part == "target" or hosts_file.draft is not None or nowhere
        for name, model in found.items():
            fetched = part in fetchable and getattr(hosts_file.host(name), part) is None
            comes = fetched and model.problem == "is missing"
            if name not in usable and not (comes and not needed):
                yield Finding(needed and not comes, (name,), _lacking(part, name, model, comes))
        yield from _different(part, usable)


def _different(part: str, usable: Mapping[str, Fingerprint]) -> Iterator[Finding]:
    """Models whose files are others than on most hosts."""
    usual = Counter((model.config, model.index) for model in usable.values()).most_common(1)
    sizes: dict[str, Counter[int]] = {}
    for model in usable.values():
        for file, size in (model.shards or {}).items():
            sizes.setdefault(file, Counter())[size] += 1
    usual_sizes = {file: counts.most_common(1)[0][0] for file, counts in sizes.items()}
    differ = {}
    for name, model in usable.items():
        unusual = any(usual_sizes[file] != size for file, size in (model.shards or {}).items())
        others = (
            (CONFIG, model.config != usual[0][0][0]),
            (INDEX, model.index != usual[0][0][1]),
            ("the sizes of its weight files", unusual),
        )
        differ[name] = [what for what, other in others if other]
    same = [name for name in usable if not differ[name]]
    for name in (name for name in usable if differ[name] and same):
        yield Finding(
            part == "target",
            (name, *same),
            f"The {part} {usable[name].folder} on {name} is another than on {listed(same)}: "
            f"{listed(differ[name])} differ; copy the folder from {same[0]}.",
        )


def _lacking(part: str, name: str, model: Fingerprint, comes: bool) -> str:
    if comes:
        return f"The {part} {model.folder} on {name} {model.problem}; {COMES}."
    hub = model.folder.count("/") == 1 and model.folder[0] not in "/~."
    remedy = f"run `hf download {model.folder}` there" if hub else "copy it there"
    return (
        f"The {part} {model.folder} on {name} {model.problem}; {remedy}, or set `{part}` of the "
        "host to its path."
    )
