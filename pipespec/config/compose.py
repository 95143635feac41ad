"""From overrides to a configuration. The choices of `conf/` are merged on top of the dataclasses
that they name, then come the overrides; OmegaConf checks the types and makes the objects. Any
mistake becomes one sentence in a ConfigError."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipespec.config.choices import default_choices, options, read_choice
from pipespec.config.overrides import (
    check_key,
    checked,
    is_interpolation,
    parse,
    quoted,
    resolved,
    with_files,
)
from pipespec.config.schema import Config, RunConfig, masked
from pipespec.errors import ConfigError
from pipespec.head.policies.policy import SpeculationPolicy
from pipespec.limits import suggest
from pipespec.system.devices import num_cuda
from pipespec.system.folders import resource_dir


def compose(overrides: Sequence[str] = ()) -> Config:
    """The configuration that `conf/` and `overrides` ("policy=level", "policy.width=8") give. Reads
    no other file. Raises ConfigError."""
    names = [*default_choices(), *(entry.name for entry in fields(RunConfig))]
    sections = dict(zip(names, compose_sections(names, overrides), strict=True))
    return Config(**sections, chosen=chosen_in(overrides))


def compose_sections(names: Sequence[str], overrides: Sequence[str] = ()) -> list[Any]:
    """Some sections; the limits of the others are not checked. Raises ConfigError."""
    try:
        node = _compose(overrides)
        return [_build(name, node) for name in names]
    except OmegaConfBaseException as error:
        lines = [*filter(str.strip, str(error).splitlines()), type(error).__name__]
        at = getattr(error, "full_key", None)
        where = f" at {at}" if at else ""
        raise ConfigError(
            f"The configuration is not valid{where}: {masked(lines[0]).rstrip('.')}."
        ) from error


def chosen_in(overrides: Sequence[str]) -> tuple[str, ...]:
    """The settings that a target of the user's own decides; the defaults are the demo pair's."""
    given = {text.partition("=")[0] for text in with_files(overrides)}
    found = list[str]()
    if "model.target" in given:
        if not given & {"cluster.stages", "cluster.hosts", "emulate"}:
            found.append("cluster.stages")
        if not given & {"model", "model.draft", "proposer"}:
            found.append("proposer")
    return tuple(found)


def _compose(overrides: Sequence[str]) -> DictConfig:
    texts = with_files(overrides)
    names, chosen_here = default_choices(), chosen_in(overrides)
    if any(text.startswith("model.target=") for text in texts):
        names["model"] = "custom"
    names |= {"proposer": "suffix"} if "proposer" in chosen_here else {}
    chosen = [text for text in texts if text.partition("=")[0] in names]
    for override in map(parse, chosen):
        group, name = override.key_or_group, str(override.value())
        if name not in (known := options(group)):
            raise ConfigError(f"{group}={name} is not known; {suggest(name, known, f'{group}=')}.")
        names[group] = name
    choices = [read_choice(group, name) for group, name in names.items()]
    for choice in choices:
        choice.check_names()
    classes = {"": RunConfig, **{choice.group: choice.cls for choice in choices}}
    values = [parse(quoted(text, classes)) for text in texts if text not in chosen]
    for override in values:
        check_key(override.key_or_group, classes, chosen)

    OmegaConf.register_new_resolver("resource", lambda name: str(resource_dir(name)), replace=True)
    node = OmegaConf.create({entry.name: entry.default for entry in fields(RunConfig)})
    for choice in choices:
        section = OmegaConf.structured(choice.cls)
        OmegaConf.set_readonly(section, None)  # the nodes of a frozen dataclass are
        node[choice.group] = OmegaConf.merge(section, choice.values)
    for override in values:
        # A value made of others' is a text until all others are known.
        value = override.value()
        if not is_interpolation(override):
            value = checked(override.key_or_group, value, classes)
        OmegaConf.update(node, override.key_or_group, value, merge=True)
    for key in (each.key_or_group for each in values if is_interpolation(each)):
        found = OmegaConf.select(node, key)
        if OmegaConf.is_config(found):
            found = OmegaConf.to_container(found, resolve=True)
        OmegaConf.update(node, key, resolved(key, found, classes), merge=True)
    if "cluster.stages" in chosen_here:
        count = num_cuda() if node.cluster.devices[0] in ("auto", "cuda") else 1
        node.cluster.stages = max(1, count // node.cluster.tensor_parallel)
    return node


def _build(name: str, node: DictConfig) -> Any:
    section = node[name]
    if not OmegaConf.is_dict(section):
        return section
    for key in map(str, section):
        if OmegaConf.is_missing(section, key):
            raise ConfigError(f"{name}.{key} has no value; pass {name}.{key}=VALUE.")
    return OmegaConf.to_object(section)


# --- policies, by the names of the files of `conf/policy/` -------------------------------------


def policy_class(name: str) -> type[SpeculationPolicy]:
    known = options("policy")
    if name not in known:
        raise ConfigError(f"The policy {name!r} is not known; choose from {', '.join(known)}.")
    return read_choice("policy", name).cls


def default_policy(name: str) -> SpeculationPolicy:
    """A policy as it is if no setting is given. Raises ConfigError."""
    policy_class(name)
    (policy,) = compose_sections(["policy"], [f"policy={name}"])
    return policy


def sized_policy(policy: SpeculationPolicy, width: int, children: int) -> SpeculationPolicy:
    """A policy with rows per step and candidates per node, as far as it has such settings; one of
    fixed size is left as it is. Raises ConfigError."""
    if policy.has_fixed_size:
        return policy
    size = {"width": width, "children": children}
    known = {entry.name for entry in fields(policy)}  # type: ignore[arg-type] # of a dataclass
    chosen = {name: value for name, value in size.items() if name in known}
    return replace(policy, **chosen)  # type: ignore[type-var] # of a dataclass


def policies_to_compare() -> list[str]:
    """Every policy; those of a fixed size come first."""
    return sorted(options("policy"), key=lambda name: not policy_class(name).has_fixed_size)
