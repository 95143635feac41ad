"""Makes findings, of one sentence each, of the reports on hosts and links, for `pipespec doctor`.
Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from pipespec.cluster.diagnostics.inventory import PACKAGES, Inventory
from pipespec.cluster.diagnostics.probe import Link, Listening, Reachability
from pipespec.config.hosts import Host, HostsFile
from pipespec.engine.checkpoint.fingerprint import Fingerprint
from pipespec.engine.formats.safetensors_headers import CONFIG, INDEX
from pipespec.engine.formats.slice_tensors import listed
from pipespec.system.network_interfaces import Interface

# A link slower than this share of its interfaces' stated rate has a fault or is in use; one
# connection from Python cannot measure interfaces faster than `FASTEST_MBIT`.
FAIR_SHARE = 0.5
FASTEST_MBIT = 10_000
# What should have one version everywhere, and whether a difference is an error: ranks with
# different versions would not compute the same.
AGREE = {
    "pipespec": True,
    "code": True,
    "torch": True,
    "transformers": True,
    "torchao": False,
    "bitsandbytes": False,
    "gguf": False,
    "python": False,
    "driver": False,
}
TITLES = {"code": "The code of pipespec", "python": "Python", "driver": "The NVIDIA driver"}
# Problems of a Reachability, and their remedies.
CLOSED = {
    "refused": "port {port} is refused, though {to} listens there; let all TCP ports from {who} "
    "through the firewall of {to}, and check that the address is its own.",
    "silent": "port {port} does not answer, though {to} listens there; let all TCP ports from "
    "{who} through the firewalls, and check the cable.",
    "no route": "there is no route; put both on one network, or correct `address`.",
    "taken": "{other} answers there; two hosts have this address, so correct `address` of one.",
    "stranger": "port {port} is another program's; the address is another machine's or is "
    "forwarded, so correct `address`.",
}
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


def required_models(hosts_file: HostsFile, host: Host) -> tuple[str, ...]:
    """Which models the host must have: "target" for stages, "draft" where the head may be."""
    holds_stages = host.workers != (hosts_file.draft,)
    may_be_head = hosts_file.draft is None or hosts_file.draft in host.workers
    return ("target",) * holds_stages + ("draft",) * may_be_head


def diagnose(
    hosts_file: HostsFile,
    hosts: Mapping[str, HostReport],
    links: Sequence[LinkReport],
    fetchable: Collection[str] = (),
) -> list[Finding]:
    """All findings, errors first. `fetchable` are the models ("target", "draft") that hosts get
    when a cluster starts."""
    inventories = {
        name: seen.inventory for name, seen in hosts.items() if seen.inventory is not None
    }
    found = [
        *(Finding(True, (name,), seen.failure) for name, seen in hosts.items() if seen.failure),
        *_not_examined(hosts_file),
        *_addresses(hosts_file, hosts),
        *_unreachable(links),
        *_versions(inventories),
        *_models(hosts_file, inventories, fetchable),
        *_devices(hosts_file, inventories),
        *_slow_links(hosts, links),
    ]
    return sorted(found, key=lambda finding: not finding.error)


def _not_examined(hosts_file: HostsFile) -> Iterator[Finding]:
    if names := hosts_file.by_hand:
        are, each = ("is", "there") if len(names) == 1 else ("are", "on each")
        yield Finding(
            False,
            names,
            f"{listed(names)} {are} started by hand (ssh: none) and not checked; run `pipespec "
            f"doctor` {each}.",
        )


def _addresses(hosts_file: HostsFile, hosts: Mapping[str, HostReport]) -> Iterator[Finding]:
    for name, seen in hosts.items():
        listening, host = seen.listening, hosts_file.host(name)
        if listening is None:
            continue
        up = [known for known in listening.interfaces if known.up and known.addresses]
        held = listed([f"{a} on {known.name}" for known in up for a in known.addresses])
        sentences = {
            "unknown": f"{name} cannot resolve its own address {host.address!r}; write the number "
            "in `address`, or add the name to its /etc/hosts.",
            "absent": f"No interface of {name} has its address {host.address}; set `address` to "
            f"one that it has ({held}).",
            "no interface": f"{name} has no interface {host.interface!r} that is up and has an "
            f"address; set `interface` to one that it has ({listed([k.name for k in up])}).",
            "only here": f"On {name} itself its address {host.address!r} means {listening.number}, "
            "where no other host reaches it; write the number in `address`, or correct its "
            "/etc/hosts.",
        }
        problem, number = listening.problem, listening.number
        if problem is None and len(hosts_file.hosts) > 1 and number not in (None, host.address):
            problem = "only here" if ip_address(number).is_loopback else None
        if problem is not None:
            yield Finding(True, (name,), sentences[problem])


def _unreachable(links: Sequence[LinkReport]) -> Iterator[Finding]:
    groups: dict[tuple[str, Reachability], list[str]] = {}
    for link in links:
        if link.reach.problem is not None:
            groups.setdefault((link.to, link.reach), []).append(link.source)
    for (to, reach), sources in groups.items():
        assert reach.problem is not None and reach.place is not None
        who = listed(sources)
        clause = CLOSED["taken" if reach.who else reach.problem].format(
            who=who, to=to, port=reach.place.port, other=reach.who
        )
        sentence = f"{who} cannot reach {to} at {reach.place.address}: {clause}"
        yield Finding(True, (*sources, to), sentence)


def _versions(inventories: Mapping[str, Inventory]) -> Iterator[Finding]:
    for package in PACKAGES:
        without = tuple(n for n, each in inventories.items() if each.versions[package] is None)
        if without:
            yield Finding(
                True,
                without,
                f"{package} is not installed on {listed(without)}; install pipespec there again, "
                "or correct `python`.",
            )
    differ = {package for package in AGREE if len(_by_version(inventories, package)) > 1}
    if "pipespec" in differ:
        differ.discard("code")  # of course
    for package in (package for package in AGREE if package in differ):
        each = [f"{v} on {listed(names)}" for v, names in _by_version(inventories, package).items()]
        yield Finding(
            AGREE[package],
            tuple(inventories),
            f"{TITLES.get(package, package)} is {listed(each)}; install one version on all.",
        )


def _by_version(inventories: Mapping[str, Inventory], package: str) -> dict[str, list[str]]:
    hosts_of: dict[str, list[str]] = {}
    for name, inventory in inventories.items():
        version = inventory.versions[package]
        if version is not None:
            # 2.9.0+cpu and 2.9.0+cu128 are one version, built for different hosts.
            hosts_of.setdefault(version.partition("+")[0], []).append(name)
    return hosts_of


def _models(
    hosts_file: HostsFile, inventories: Mapping[str, Inventory], fetchable: Collection[str]
) -> Iterator[Finding]:
    """What is wrong with the target and the draft; `fetchable`: those of which hosts
    get what they lack when a cluster starts."""
    for part in ("target", "draft"):
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


def _devices(hosts_file: HostsFile, inventories: Mapping[str, Inventory]) -> Iterator[Finding]:
    for name, inventory in inventories.items():
        for device in hosts_file.host(name).devices:
            if inventory.cuda is None or device == "cpu":
                continue
            problem, auto = inventory.cuda_problem, device == "auto"
            sentence = None
            if problem is not None and auto:
                sentence = (
                    f"{name} has an NVIDIA driver, but {problem}, so it would compute on its CPU; "
                    "install the torch that fits the driver."
                )
            elif problem is not None:
                sentence = (
                    f"{name} names the device {device}, but {problem}; install driver and torch "
                    "that fit each other, or set its `devices` to [cpu]."
                )
            elif int(device.partition(":")[2] or 0) >= len(inventory.cuda):
                sentence = (
                    f"{name} names the device {device}, but its CUDA devices end with "
                    f"cuda:{len(inventory.cuda) - 1}; correct its `devices`."
                )
            if sentence is not None:
                yield Finding(not auto, (name,), sentence)


def _slow_links(hosts: Mapping[str, HostReport], links: Sequence[LinkReport]) -> Iterator[Finding]:
    for link in links:
        here, there = _carrier(hosts[link.source]), _carrier(hosts[link.to])
        if link.measured is None or here is None or there is None:
            continue
        stated = min(here.mbit_per_s, there.mbit_per_s)
        gbit = link.measured.gbit_per_s
        if gbit < FAIR_SHARE * min(stated, FASTEST_MBIT) / 1e3:
            yield Finding(
                False,
                (link.source, link.to),
                f"The link from {link.source} to {link.to} carries {gbit:.2g} Gbit/s, though the "
                f"interfaces state {stated / 1e3:g}; check cable, switch port and other traffic.",
            )


def _carrier(seen: HostReport) -> Interface | None:
    listening = seen.listening
    if listening is None:
        return None
    return next((i for i in listening.interfaces if i.name == listening.carrier), None)
