"""From what the hosts said to what is wrong with them: pure, one sentence per finding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from ipaddress import ip_address

from pipespec.config.hosts import Host, HostsFile
from pipespec.survey.findings import Finding, Link, Offset, Seen
from pipespec.survey.inventory import CONFIG, INDEX, PACKAGES, Fingerprint, Inventory
from pipespec.survey.probe import Listening, Reach
from pipespec.system.interfaces import Interface, holding

# Beyond this, traces and logs of two hosts cannot be laid side by side.
CLOCK_LIMIT_S = 0.1
# A link that gives less than this share of what its interfaces state has a fault or is in use;
# a single burst from Python tells nothing about interfaces faster than `FASTEST_MBIT`.
FAIR_SHARE = 0.5
FASTEST_MBIT = 10_000
# What should be one version everywhere, and whether it must: ranks with different ones of those
# would not compute, or not say, the same.
AGREE = {
    "pipespec": True,
    "code": True,
    "torch": True,
    "transformers": True,
    "torchao": False,
    "bitsandbytes": False,
    "compressed-tensors": False,
    "gguf": False,
    "python": False,
    "driver": False,
}
TITLES = {"code": "The code of pipespec", "python": "Python", "driver": "The NVIDIA driver"}
# Problems of a Reach, and what helps.
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


def wanted(hosts_file: HostsFile, host: Host) -> tuple[str, ...]:
    """Which models the host must have: "target" for stages, the others where the head may
    be."""
    holds_stages = host.workers != (hosts_file.draft,)
    may_be_head = hosts_file.draft is None or hosts_file.draft in host.workers
    return ("target",) * holds_stages + ("draft", "mid") * may_be_head


def diagnose(
    hosts_file: HostsFile, hosts: Mapping[str, Seen], links: Sequence[Link]
) -> list[Finding]:
    """All findings, errors first."""
    stocks = {name: seen.inventory for name, seen in hosts.items() if seen.inventory is not None}
    found = [
        *(Finding(True, (name,), seen.failure) for name, seen in hosts.items() if seen.failure),
        *_addresses(hosts_file, hosts),
        *_closed(links),
        *_detours(hosts_file, hosts, links),
        *_versions(stocks),
        *_models(hosts_file, stocks),
        *_devices(hosts_file, stocks),
        *_attention(stocks),
        *_groups(hosts_file, hosts),
        *_slow(hosts, links),
        *_clocks({name: seen.clock for name, seen in hosts.items() if seen.clock is not None}),
    ]
    return sorted(found, key=lambda finding: not finding.error)


def _addresses(hosts_file: HostsFile, hosts: Mapping[str, Seen]) -> Iterator[Finding]:
    for name, seen in hosts.items():
        listening, host = seen.listening, hosts_file.host(name)
        if listening is None:
            continue
        sentence = None
        if listening.problem == "unknown":
            sentence = (
                f"{name} cannot resolve its own address {host.address!r}; write the number in "
                "`address`, or add the name to its /etc/hosts."
            )
        elif listening.problem == "absent":
            held = [f"{a} on {i.name}" for i in listening.interfaces if i.up for a in i.addresses]
            sentence = (
                f"No interface of {name} has its address {host.address}; set `address` to one that "
                f"it has ({_listed(held)})."
            )
        elif listening.problem == "no interface":
            usable = [i.name for i in listening.interfaces if i.up and i.addresses]
            sentence = (
                f"{name} has no interface {host.interface!r} that is up and has an address; set "
                f"`interface` to one that it has ({_listed(usable)})."
            )
        elif len(hosts) > 1 and _only_here(host, listening):
            sentence = (
                f"On {name} itself its address {host.address!r} means {listening.number}, where no "
                "other host reaches it; write the number in `address`, or correct its /etc/hosts."
            )
        if sentence is not None:
            yield Finding(True, (name,), sentence)


def _only_here(host: Host, listening: Listening) -> bool:
    """Whether the host's address is a name that stands for the loopback there."""
    number = listening.number
    return number is not None and number != host.address and ip_address(number).is_loopback


def _closed(links: Sequence[Link]) -> Iterator[Finding]:
    groups: dict[tuple[str, Reach], list[str]] = {}
    for link in links:
        if link.reach.problem is not None:
            key = link.to, replace(link.reach, interface=None)
            groups.setdefault(key, []).append(link.source)
    for (to, reach), sources in groups.items():
        assert reach.problem is not None and reach.place is not None
        who = _listed(sources)
        clause = CLOSED["taken" if reach.who else reach.problem].format(
            who=who, to=to, port=reach.place.port, other=reach.who
        )
        sentence = f"{who} cannot reach {to} at {reach.place.address}: {clause}"
        yield Finding(True, (*sources, to), sentence)


def _detours(
    hosts_file: HostsFile, hosts: Mapping[str, Seen], links: Sequence[Link]
) -> Iterator[Finding]:
    """Ways that leave through another interface than the one that should carry batches."""
    groups: dict[tuple[str, str], list[str]] = {}
    for link in links:
        here, there = hosts[link.source].listening, hosts[link.to].listening
        used = link.reach.interface
        if here is None or there is None or used is None or here.carrier in (None, used):
            continue
        if holding(there.places[-1].address, here.interfaces) is not None:
            continue  # one machine
        groups.setdefault((link.source, used), []).append(link.to)
    for (source, used), targets in groups.items():
        listening, host = hosts[source].listening, hosts_file.host(source)
        assert listening is not None
        named = host.interface is not None
        why = "the `interface` of its entry" if named else "which has its `address`"
        yield Finding(
            named,
            (source, *targets),
            f"{source} reaches {_listed(targets)} through {used} and not through "
            f"{listening.carrier}, {why}; correct the routes, or name {used} and its address.",
        )


def _versions(stocks: Mapping[str, Inventory]) -> Iterator[Finding]:
    for package in PACKAGES:
        without = [name for name, stock in stocks.items() if stock.versions[package] is None]
        if without:
            yield Finding(
                True,
                tuple(without),
                f"{package} is not installed on {_listed(without)}; install pipespec there again, "
                "or correct `python`.",
            )
    differ = {package for package in AGREE if len(_by_version(stocks, package)) > 1}
    if "pipespec" in differ:
        differ.discard("code")  # of course
    for package in (package for package in AGREE if package in differ):
        each = [f"{v} on {_listed(names)}" for v, names in _by_version(stocks, package).items()]
        yield Finding(
            AGREE[package],
            tuple(stocks),
            f"{TITLES.get(package, package)} is {_listed(each)}; install one version on all.",
        )


def _by_version(stocks: Mapping[str, Inventory], package: str) -> dict[str, list[str]]:
    hosts_of: dict[str, list[str]] = {}
    for name, stock in stocks.items():
        version = stock.versions[package]
        if version is not None:
            # 2.9.0+cpu and 2.9.0+cu128 are one version, built for different hosts.
            hosts_of.setdefault(version.partition("+")[0], []).append(name)
    return hosts_of


def _models(hosts_file: HostsFile, stocks: Mapping[str, Inventory]) -> Iterator[Finding]:
    for part in ("target", "draft", "mid"):
        found = {name: stock.models[part] for name, stock in stocks.items() if part in stock.models}
        usable = {name: model for name, model in found.items() if model.problem is None}
        # Without a place for the draft in the file, one host that has it is enough.
        needed = part == "target" or hosts_file.draft is not None or not usable
        for name in (name for name in found if name not in usable):
            yield Finding(needed, (name,), _lacking(part, name, found[name]))
        usual = Counter(map(_content, usable.values())).most_common(1)
        same = [name for name in usable if _content(usable[name]) == usual[0][0]]
        for name in (name for name in usable if name not in same):
            parts = [
                what
                for what, ours, theirs in zip(
                    (CONFIG, INDEX, "the sizes of its weight files"),
                    _content(usable[name]),
                    _content(usable[same[0]]),
                    strict=True,
                )
                if ours != theirs
            ]
            yield Finding(
                part == "target",
                (name, *same),
                f"The {part} {usable[name].folder} on {name} is another than on {_listed(same)}: "
                f"{_listed(parts)} differ; copy the folder from {same[0]}.",
            )


def _content(model: Fingerprint) -> tuple[str | None, str | None, str | None]:
    return model.config, model.index, model.shards


def _lacking(part: str, name: str, model: Fingerprint) -> str:
    hub = model.folder.count("/") == 1 and model.folder[0] not in "/~."
    remedy = f"run `hf download {model.folder}` there" if hub else "copy it there"
    return (
        f"The {part} {model.folder} on {name} {model.problem}; {remedy}, or set `{part}` of the "
        "host to where it lies."
    )


def _devices(hosts_file: HostsFile, stocks: Mapping[str, Inventory]) -> Iterator[Finding]:
    for name, stock in stocks.items():
        for device in hosts_file.host(name).devices:
            if stock.cuda is None or device == "cpu":
                continue
            index = int(device.partition(":")[2] or 0)
            if stock.cuda_problem is not None and device == "auto":
                yield Finding(
                    False,
                    (name,),
                    f"{name} has an NVIDIA driver, but {stock.cuda_problem}, so it would compute "
                    "on its CPU; install the torch that fits the driver.",
                )
            elif stock.cuda_problem is not None:
                yield Finding(
                    True,
                    (name,),
                    f"{name} names the device {device}, but {stock.cuda_problem}; install driver "
                    "and torch that fit each other, or set its `devices` to [cpu].",
                )
            elif index >= len(stock.cuda):
                yield Finding(
                    True,
                    (name,),
                    f"{name} names the device {device}, but its CUDA devices end with "
                    f"cuda:{len(stock.cuda) - 1}; correct its `devices`.",
                )


def _attention(stocks: Mapping[str, Inventory]) -> Iterator[Finding]:
    for name, stock in stocks.items():
        for backend, fault in stock.attention.items():
            if fault is not None:
                yield Finding(
                    False, (name,), f"On {name} attention={backend} is not used, because {fault}."
                )


def _groups(hosts_file: HostsFile, hosts: Mapping[str, Seen]) -> Iterator[Finding]:
    """Devices that are to compute together and cannot, or not faster than one of them."""
    for name, seen in hosts.items():
        host = hosts_file.host(name)
        for leader, gain in seen.gains.items():
            group = host.members[leader]
            devices = _listed([host.devices[host.workers.index(worker)] for worker in group])
            if gain.problem is not None:
                yield Finding(True, (name,), f"{gain.problem}, on {name} ({devices}).")
            elif gain.sums_ms >= gain.sooner_ms:
                yield Finding(
                    False,
                    (name,),
                    f"{devices} of {name} would read a layer {gain.sooner_ms:.2g} ms sooner "
                    f"together than one of them, but add up for {gain.sums_ms:.2g} ms in each; the "
                    "link between them is too slow, so make each a stage of its own.",
                )


def _slow(hosts: Mapping[str, Seen], links: Sequence[Link]) -> Iterator[Finding]:
    slow: dict[int, dict[tuple[str, str], float]] = {}
    for link in links:
        here, there = _carrier(hosts[link.source]), _carrier(hosts[link.to])
        if link.measured is None or here is None or there is None:
            continue
        stated = min(here.mbit_per_s, there.mbit_per_s)
        gbit = link.measured.gbit_per_s
        if gbit < FAIR_SHARE * min(stated, FASTEST_MBIT) / 1e3:
            slow.setdefault(stated, {})[link.source, link.to] = gbit
    for stated, rates in slow.items():
        each = [f"{a} to {b} carries {gbit:.2g}" for (a, b), gbit in rates.items()]
        yield Finding(
            False,
            tuple(dict.fromkeys(name for pair in rates for name in pair)),
            f"{_listed(each)} Gbit/s, though the interfaces state {stated / 1e3:g}; check cable, "
            "switch port and other traffic.",
        )


def _carrier(seen: Seen) -> Interface | None:
    listening = seen.listening
    if listening is None:
        return None
    return next((i for i in listening.interfaces if i.name == listening.carrier), None)


def _clocks(clocks: Mapping[str, Offset]) -> Iterator[Finding]:
    """Clocks that are off, beside the one in the middle."""
    if not clocks:
        return
    by_time = sorted(clocks, key=lambda name: clocks[name].offset_s)
    middle = by_time[(len(by_time) - 1) // 2]
    for name in clocks:
        off = clocks[name].offset_s - clocks[middle].offset_s
        margin = clocks[name].margin_s + clocks[middle].margin_s
        if abs(off) - margin > CLOCK_LIMIT_S:
            yield Finding(
                False,
                (name, middle),
                f"The clock of {name} is {abs(off):.2g} s {'ahead of' if off > 0 else 'behind'} "
                f"that of {middle}; let NTP (chrony, systemd-timesyncd) set it.",
            )


def _listed(words: Sequence[str]) -> str:
    """ "a, b and c"."""
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))
