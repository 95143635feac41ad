"""From overrides to a configuration: Hydra ends here.

`conf/` holds the settings and their defaults. `compose` puts them together with the user's
overrides, checks every name and type, and builds the policies that `conf/` names. Whatever is
wrong becomes one sentence in a ConfigError.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from pipespec.config.choices import groups
from pipespec.config.overrides import check_key, check_option, parse, quoted, with_hosts
from pipespec.config.schema import SECTIONS, Config
from pipespec.errors import ConfigError
from pipespec.system.reading import Unreadable, typed
from pipespec.system.resources import resource_dir

if TYPE_CHECKING:  # `pipespec generate --help` can do without
    from omegaconf import DictConfig


def compose(overrides: Sequence[str] = ()) -> Config:
    """The configuration that `conf/` and `overrides` ("feed=level", "feed.width=8") give.

    Reads no other file, writes none, and leaves no Hydra state behind. Raises ConfigError.
    """
    node = _compose(overrides)
    parts: dict[str, Any] = {}
    for name, section in node.items():
        assert isinstance(name, str)
        parts[name] = _build(name, section) if hasattr(section, "keys") else section
    parts["trace"] = _typed("trace", parts["trace"], str | None)
    return Config(**parts)


def compose_sections(names: Sequence[str], overrides: Sequence[str] = ()) -> list[Any]:
    """Some sections by themselves; the others are neither checked nor built.

    Raises ConfigError as `compose` does.
    """
    node = _compose(overrides)
    return [_build(name, node[name]) for name in names]


def _compose(overrides: Sequence[str]) -> DictConfig:
    """The raw tree of settings, all names known."""
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    OmegaConf.register_new_resolver("resource", lambda name: str(resource_dir(name)), replace=True)
    chosen, values = [], []
    for text in with_hosts(overrides):
        literal = quoted(text)
        override = parse(literal)
        if override.key_or_group in groups():
            check_option(override.key_or_group, override.value())
            chosen.append(literal)
        else:
            values.append(override)
    try:
        node = _hydra(chosen)
        for override in values:
            check_key(override.key_or_group, node, chosen)
        for override in values:  # as Hydra does it, who would compose everything once more
            OmegaConf.update(node, override.key_or_group, override.value(), merge=True)
        return node
    except (HydraException, OmegaConfBaseException) as error:
        raise _config_error(error) from error


def _hydra(overrides: list[str]) -> DictConfig:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(resource_dir("conf").resolve()), version_base="1.3"):
            return hydra_compose("config", overrides)
    finally:
        GlobalHydra.instance().clear()


def _build(section: str, node: DictConfig) -> Any:
    """The dataclass or policy of one section, types checked."""
    from hydra.errors import HydraException
    from hydra.utils import get_class
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    for name in map(str, node):
        if OmegaConf.is_missing(node, name):
            raise ConfigError(f"{section}.{name} has no value; pass {section}.{name}=VALUE.")
    try:
        values = OmegaConf.to_container(node, resolve=True)
        assert isinstance(values, dict)
        target = values.pop("_target_", None)
        cls = SECTIONS[section] if target is None else get_class(target)
        return cls(**_typed_fields(section, cls, values))
    except (HydraException, OmegaConfBaseException) as error:
        raise _config_error(error) from error


def _typed_fields(section: str, cls: type, values: Mapping[Any, Any]) -> dict[str, Any]:
    if not is_dataclass(cls):
        return dict(values)
    hints = typing.get_type_hints(cls)
    assert {f.name for f in fields(cls)} >= set(values), f"conf/{section} knows more than {cls}"
    return {name: _typed(f"{section}.{name}", value, hints[name]) for name, value in values.items()}


def _typed(name: str, value: Any, hint: Any) -> Any:
    try:
        return typed(name, value, hint)
    except Unreadable as error:
        raise ConfigError(f"{error}.") from None


def _config_error(error: BaseException) -> ConfigError:
    """The ConfigError inside a wrapper of Hydra's, or the wrapper's first line as one."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ConfigError):
            return cause
        cause = cause.__cause__
    first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return ConfigError(f"The configuration is not valid: {first.rstrip('.')}.")
