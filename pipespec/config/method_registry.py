"""The policies that there are, by the names of the files of `conf/policy/`."""

from __future__ import annotations

from dataclasses import fields, replace

from pipespec.config.choices import options, read_choice
from pipespec.config.compose import compose_sections
from pipespec.errors import ConfigError
from pipespec.head.policies.policy import SpeculationPolicy


def policy_class(name: str) -> type[SpeculationPolicy]:
    known = options("policy")
    if name not in known:
        raise ConfigError(f"The policy {name!r} is not known; choose from {', '.join(known)}.")
    found = read_choice("policy", name).cls
    assert issubclass(found, SpeculationPolicy)
    return found


def default_policy(name: str) -> SpeculationPolicy:
    """A policy as it is if no setting is given. Raises ConfigError."""
    policy_class(name)
    (policy,) = compose_sections(["policy"], [f"policy={name}"])
    assert isinstance(policy, SpeculationPolicy)
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
