"""Reads caches and hosts, and chooses the models of `pipespec up auto`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from pipespec.config.compose import compose_sections
from pipespec.config.hosts import Host, load_hosts, this_machine
from pipespec.config.schema import masked
from pipespec.engine.checkpoint.cached_models import cached_models
from pipespec.engine.checkpoint.inspection import inspect
from pipespec.engine.checkpoint_parts.hub_client import Unavailable
from pipespec.errors import ConfigError, ModelError
from pipespec.instruments.model_choice.candidates import Candidate
from pipespec.instruments.model_choice.choose_models import Choice, Chooser
from pipespec.instruments.model_choice.fitting import Fit
from pipespec.instruments.model_choice.given_settings import GivenSettings, given
from pipespec.instruments.model_choice.host_memory import Memory, usable_memory
from pipespec.instruments.model_choice.offered_models import Table, offered, read_table
from pipespec.system.devices import num_cuda
from pipespec.system.sizes import size_text

WORD = "auto"
REMEDY = "free memory there, add a host or device, or lower model.context"


@dataclass(frozen=True)
class AutoSettings:
    """The settings that were chosen, and sentences that say why."""

    settings: tuple[str, ...]
    reasons: tuple[str, ...]


def choose_settings(texts: Sequence[str], command: str) -> AutoSettings:
    """The models of the caches that suit the memory of the hosts.

    Args:
        texts: settings, which stay; of `cluster=FILE.yaml` all hosts are asked.
        command: of pipespec, for the message where none fits.

    Raises ConfigError if none fits, with what would; HostFailed if a host cannot be asked.
    """
    table, settings = read_table(), given(texts)
    hosts = _hosts(texts)
    usable = usable_memory(hosts)
    several = any(not host.local for host in hosts) or len(hosts) > 1
    models, others = _models(settings, partial=several)
    memory = "; ".join(
        f"{device}{'' if len(hosts) == 1 else f' of {name}'} {size_text(free)}"
        for name, devices in usable.items()
        for device, free in devices.items()
    )
    looked = f"Free: {memory}. {len(models)} models here can be decoded."
    found: Choice | Fit | ConfigError | None = None
    if models:
        try:
            found = Chooser(models, settings, usable, table.context).choose()
        except ConfigError as error:
            found = error
    if isinstance(found, Choice):
        return AutoSettings(found.settings, (looked, *found.reasons))
    problem = _problem(found, models, others, settings)
    with suppress(Unavailable):
        if settings.target is None:
            problem += _proposal(table, settings, usable, command)
    raise ConfigError(problem)


def explicit_command(command: str, settings: Sequence[str]) -> str:
    """The command that does the same without `auto`, passwords masked."""
    return shlex.join(["pipespec", command, *map(masked, settings)])


def _hosts(texts: Sequence[str]) -> tuple[Host, ...]:
    """The hosts of the settings. Raises ConfigError."""
    (cluster,) = compose_sections(["cluster"], texts)
    if cluster.hosts is None:
        return (this_machine(["cpu", *(f"cuda:{index}" for index in range(num_cuda()))]),)
    hosts_file = load_hosts(cluster.hosts)
    hosts_file.require_devices()
    for host in hosts_file.hosts:
        if host.target or host.draft:
            raise ConfigError(
                f"Host {host.name} names its own models, so {WORD} cannot choose them; leave "
                "target and draft out of the hosts file, or name model.target and model.draft."
            )
    return hosts_file.hosts


def _models(settings: GivenSettings, *, partial: bool) -> tuple[list[Candidate], dict[str, str]]:
    """The models of the caches and those that the settings name, and why others cannot be used.

    `partial`: models of which weights are missing here count, as other hosts may have them.
    Raises ModelError if one that is named cannot be decoded.
    """
    found: dict[str, Candidate] = {}
    refused: dict[str, str] = {}
    for each in cached_models():
        if not (each.whole or partial):
            refused[each.name] = "is here in part"
            continue
        try:
            found[each.name] = Candidate(each.name, inspect(each.path))
        except ModelError as error:
            refused[each.name] = str(error)
    for name in (settings.target, settings.draft):
        if name is not None and name not in found:
            found[name] = Candidate(name, inspect(name))
    return list(found.values()), refused


def _problem(
    found: Fit | ConfigError | None,
    models: Sequence[Candidate],
    refused: dict[str, str],
    settings: GivenSettings,
) -> str:
    """A sentence that says why there is no choice."""
    if found is None:
        few = "" if not refused else f" ({len(refused)} cannot be used, such as {min(refused)})"
        return (
            f"The caches of this machine hold no model that can be decoded{few}; name a folder or "
            "hub id as model.target."
        )
    what = settings.target or "the models in the caches"
    if isinstance(found, ConfigError):
        return f"{WORD} cannot use {what}: {found}"
    lacking = f"{size_text(found.missing_bytes)} are missing on {found.where}; {REMEDY}."
    if settings.target is not None:
        return f"{settings.target} does not fit in any format: {lacking}"
    name = next(each.name for each in models if each.info.path == found.deployment.target.path)
    return f"None of the {len(models)} models in the caches fits; for {name} {lacking}"


def _proposal(table: Table, settings: GivenSettings, usable: Memory, command: str) -> str:
    """A sentence that names a pair which can be fetched and fits; "": there is none. Raises
    Unavailable if the hub cannot be reached."""
    for target, draft, num_bytes in offered(table, usable):
        try:
            found = Chooser((target, draft), settings, usable, table.context).choose()
        except ConfigError:
            continue
        if isinstance(found, Choice) and found.target is target:
            explicit = explicit_command(command, found.settings)
            return (
                f" From the hub {target.name} with the draft {draft.name} would fit: `{explicit}` "
                f"fetches {size_text(num_bytes)}."
            )
    return ""
