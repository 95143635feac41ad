"""From the arguments of `LLM` to the overrides of a configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from pipespec.errors import ConfigError

Path = str | os.PathLike[str]


def overrides_of(
    model: Path | None,
    draft: Path | None,
    stages: int | None,
    hosts: Path | None,
    settings: Mapping[str, Any],
) -> list[str]:
    if hosts is not None and stages is not None:
        raise ConfigError(
            f"hosts={os.fspath(hosts)} and stages={stages} are both given, but a hosts file says "
            "how many stages there are; leave one out."
        )
    if draft is not None and model is None:
        raise ConfigError(
            f"draft={os.fspath(draft)} is given without a model; pass the model that it drafts for."
        )
    if "trace" in settings:
        raise ConfigError("An LLM has no setting 'trace'; leave it to `pipespec generate`.")
    found: list[str] = []
    if model is not None:
        found.append(f"model.target={os.fspath(model)}")
        if draft is not None:
            found.append(f"model.draft={os.fspath(draft)}")
        elif not {"model.draft", "proposer"} & set(settings):
            found.append("proposer=suffix")
    if stages is not None:
        found.append(f"cluster.stages={stages}")
    if hosts is not None:
        found.append(f"cluster={os.fspath(hosts)}")
    return [*found, *(f"{name}={value_text(value)}" for name, value in settings.items())]


def check_policy(policy: object, settings: Mapping[str, Any]) -> None:
    if policy is None:
        return
    from pipespec.head.policies.policy import SpeculationPolicy

    kind = type(policy)
    if not isinstance(policy, SpeculationPolicy):
        raise ConfigError(
            f"policy is {policy!r:.60}, but must be a SpeculationPolicy; name one that is built in "
            'by settings={"policy": ...}.'
        )
    if kind.__module__ == "__main__":
        raise ConfigError(
            f"The policy {kind.__name__} is defined in __main__, which ranks cannot import; put "
            "its class into a module of its own."
        )
    for name in settings:
        if name.partition(".")[0] == "policy":
            raise ConfigError(f"policy and the setting {name!r} are both given; leave one out.")


def value_text(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_item, value))}]"
    return str(value)


def _item(value: Any) -> str:
    if not isinstance(value, str):
        return value_text(value)
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
