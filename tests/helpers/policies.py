"""Every policy of `conf/policy`, small enough that a short pipeline and few tokens try it."""

from __future__ import annotations

from dataclasses import replace

from pipespec.config.choices import options
from pipespec.config.compose import default_policy, sized_policy
from pipespec.head.policies.policy import SpeculationPolicy

OWN_SIZE = {"static_tree": {"shape": [1, 2]}}


def small_policies(width: int, children: int = 2) -> list[SpeculationPolicy]:
    """One of each, of so many rows per step and candidates per node where it has such settings."""
    return [
        replace(
            sized_policy(default_policy(name), width, children),
            **OWN_SIZE.get(name, {}),  # type: ignore[arg-type]
        )
        for name in options("policy")
    ]
