"""From overrides to a configuration: Hydra is used here alone. Hydra composes the choices of
`conf/` on top of the dataclasses that they name, and OmegaConf checks the types and makes the
objects. Any mistake becomes one sentence in a ConfigError."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from pipespec.config.choices import Choice, default_choices, read_choice
from pipespec.config.overrides import (
    check_key,
    check_option,
    is_interpolation,
    parse,
    quoted,
    resolved,
    value_of,
    with_files,
)
from pipespec.config.schema import Config, RunConfig, masked
from pipespec.errors import ConfigError, interrupt_cause
from pipespec.system.folders import resource_dir

if TYPE_CHECKING:
    from omegaconf import DictConfig

# What Hydra made of chosen files: the choices and their classes, and the tree. Hydra takes .1 s.
_composed: dict[tuple[str, ...], tuple[tuple[Any, ...], DictConfig]] = {}


def compose(overrides: Sequence[str] = ()) -> Config:
    """The configuration that `conf/` and `overrides` ("policy=level", "policy.width=8") give. Reads
    no other file, writes none, and leaves no Hydra state behind. Raises ConfigError."""
    names = [*default_choices(), *(entry.name for entry in fields(RunConfig))]
    return Config(**dict(zip(names, compose_sections(names, overrides), strict=True)))


def compose_sections(names: Sequence[str], overrides: Sequence[str] = ()) -> list[Any]:
    """Some sections; the limits of the others are not checked. Raises ConfigError."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        node = _compose(overrides)
        return [_build(name, node) for name in names]
    except (HydraException, OmegaConfBaseException) as error:
        if (interrupt := interrupt_cause(error)) is not None:
            raise interrupt from None
        lines = [*filter(str.strip, str(error).splitlines()), type(error).__name__]
        at = getattr(error, "full_key", None)
        where = f" at {at}" if at else ""
        raise ConfigError(
            f"The configuration is not valid{where}: {masked(lines[0]).rstrip('.')}."
        ) from error


def _compose(overrides: Sequence[str]) -> DictConfig:
    from omegaconf import OmegaConf

    texts = with_files(overrides)
    options = default_choices()
    chosen = [text for text in texts if text.partition("=")[0] in options]
    for override in map(parse, chosen):
        check_option(override.key_or_group, override.value())
        options[override.key_or_group] = str(override.value())
    choices = {group: read_choice(group, name) for group, name in options.items()}
    for choice in choices.values():
        choice.check_names()
    classes = {"": RunConfig, **{group: choice.cls for group, choice in choices.items()}}
    values = [parse(quoted(text, classes)) for text in texts if text not in chosen]
    for override in values:
        check_key(override.key_or_group, classes, chosen)
    node = _chosen(chosen, choices, classes)
    for override in values:
        value = value_of(override, classes)
        OmegaConf.update(node, override.key_or_group, value, merge=True)
    for override in values:
        if is_interpolation(override):
            key = override.key_or_group
            found = OmegaConf.select(node, key)
            if OmegaConf.is_config(found):
                found = OmegaConf.to_container(found, resolve=True)
            OmegaConf.update(node, key, resolved(key, found, classes), merge=True)
    return node


def _chosen(
    overrides: list[str], choices: Mapping[str, Choice], classes: Mapping[str, type]
) -> DictConfig:
    """The tree of the chosen files as they are now, with nothing overridden."""
    key, made_of = (str(resource_dir("conf")), *overrides), (choices, classes)
    before, node = _composed.get(key, (None, None))
    if node is None or before != made_of:
        _register(choices)
        node = _hydra(overrides)
        _composed[key] = made_of, node
    return deepcopy(node)


def _register(choices: Mapping[str, Choice]) -> None:
    """Make the dataclasses of the choices known to Hydra, and the resolver of `conf/`."""
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    OmegaConf.register_new_resolver("resource", lambda name: str(resource_dir(name)), replace=True)
    store = ConfigStore.instance()
    without_group = {entry.name: entry.default for entry in fields(RunConfig)}
    store.store(f"{RunConfig.__module__}.{RunConfig.__name__}", without_group)
    for group, choice in choices.items():
        node = OmegaConf.structured(choice.cls)
        OmegaConf.set_readonly(node, None)  # the nodes of a frozen dataclass are
        store.store(choice.base, node, group=group)


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


def _build(name: str, node: DictConfig) -> Any:
    from omegaconf import OmegaConf

    section = node[name]
    if not OmegaConf.is_dict(section):
        return section
    for key in map(str, section):
        if OmegaConf.is_missing(section, key):
            raise ConfigError(f"{name}.{key} has no value; pass {name}.{key}=VALUE.")
    return OmegaConf.to_object(section)
