"""From overrides to a configuration: Hydra ends here.

`conf/` holds the settings and their defaults. `compose` puts them together with the user's
overrides, checks every name and type, and builds the policies that `conf/` names. Whatever is
wrong becomes one sentence in a ConfigError.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipespec.config.hosts import load_hosts
from pipespec.config.schema import (
    ClusterConfig,
    Config,
    ControllerConfig,
    DecodeConfig,
    ModelConfig,
    TransportConfig,
    masked,
)
from pipespec.errors import ConfigError
from pipespec.limits import suggest
from pipespec.system.reading import Unreadable, alternatives, typed
from pipespec.system.resources import resource_dir

if TYPE_CHECKING:  # `pipespec generate --help` can do without
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig

# Sections that are plain values; the others name their class in `_target_`.
SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "cluster": ClusterConfig,
    "decode": DecodeConfig,
    "controller": ControllerConfig,
    "transport": TransportConfig,
}


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


# --- what may be set --------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """One line of the help text."""

    name: str
    default: str
    note: str


def settings() -> Iterator[Setting]:
    """Every group and value of the default configuration, read from `conf/`."""
    from omegaconf import OmegaConf

    conf = resource_dir("conf")
    root = conf / "config.yaml"
    for entry in OmegaConf.load(root).defaults:
        if entry == "_self_":
            continue
        ((group, option),) = entry.items()
        yield Setting(group, option, "one of " + ", ".join(options(group)))
        yield from _lines(f"{group}.", conf / group / f"{option}.yaml")
    yield from _lines("", root)


def _lines(prefix: str, file: Path) -> Iterator[Setting]:
    for line in file.read_text(encoding="utf-8").splitlines():
        match = re.fullmatch(r"([a-z]\w*): ([^#]+?)(?: *# (.*))?", line)
        if match:
            name, default, note = match.groups(default="")
            default = re.sub(r"\$\{resource:(\w+)\}", r"<\1>", default)
            yield Setting(prefix + name, default, note)


def groups() -> list[str]:
    """The folders of `conf/`."""
    return sorted(folder.name for folder in resource_dir("conf").iterdir() if folder.is_dir())


def options(group: str) -> list[str]:
    """The files of `conf/<group>/`, without their ending."""
    return sorted(file.stem for file in (resource_dir("conf") / group).glob("*.yaml"))


# --- composing --------------------------------------------------------------------------------


def _with_hosts(overrides: Sequence[str]) -> list[str]:
    """`cluster=FILE.yaml` as the settings that it stands for. Raises ConfigError."""
    found = []
    for text in overrides:
        name, _, value = text.partition("=")
        if name == "cluster" and value.endswith((".yaml", ".yml")):
            hosts = load_hosts(value)
            found += [f"cluster.hosts={value}", f"cluster.stages={hosts.num_stages}"]
        else:
            found.append(text)
    return found


def _compose(overrides: Sequence[str]) -> DictConfig:
    """The raw tree of settings, all names known."""
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    OmegaConf.register_new_resolver("resource", lambda name: str(resource_dir(name)), replace=True)
    chosen, values = [], []
    for text in _with_hosts(overrides):
        literal = _quoted(text)
        override = _parse(literal)
        if override.key_or_group in groups():
            _check_option(override.key_or_group, override.value())
            chosen.append(literal)
        else:
            values.append((override, literal))
    try:
        base = _hydra(chosen)
        if not values:
            return base
        for override, _ in values:
            _check_key(override.key_or_group, base, chosen)
        return _hydra([*chosen, *(literal for _, literal in values)])
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


def _parse(text: str) -> Override:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    if "=" not in text:
        raise ConfigError(f"{masked(text)!r} is not a setting; write it as name=value.")
    try:
        (override,) = OverridesParser.create().parse_overrides([text])
    except (HydraException, RecursionError) as error:
        raise ConfigError(
            f"The setting {masked(text)!r} cannot be read: put a value that has spaces, commas or "
            "brackets in quotes, as in 'decode.stop=[\"a b\"]'."
        ) from error
    except ValueError as error:  # Python reads no number of thousands of digits
        name = text.partition("=")[0]
        raise ConfigError(f"{name} has too many digits; write a smaller number.") from error
    if override.is_sweep_override():
        name = override.key_or_group
        raise ConfigError(f"{masked(text)!r} holds several values; write a list as {name}=[a,b].")
    if override.package or override.is_add() or override.is_delete() or override.is_force_add():
        raise ConfigError(f"{masked(text)!r} adds or deletes a setting; write it as name=value.")
    return override


def _quoted(text: str) -> str:
    """The override with a text value in quotes, so that paths and URLs need none from the user."""
    from hydra.core.override_parser.types import Quote, QuotedString

    name, separator, value = text.partition("=")
    if name not in _text_settings() or not separator or value in ("", "null"):
        return text
    if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
        return text
    return f"{name}={QuotedString(text=value, quote=Quote.single).with_quotes()}"


def _text_settings() -> set[str]:
    names = {"trace", "source.truth"}
    for section, cls in SECTIONS.items():
        for name, hint in typing.get_type_hints(cls).items():
            if str in alternatives(hint):
                names.add(f"{section}.{name}")
    return names


def _check_option(group: str, value: object) -> None:
    if value not in options(group):
        raise ConfigError(
            f"{group}={value} is not known; {suggest(str(value), options(group), f'{group}=')}."
        )


def _check_key(key: str, base: DictConfig, chosen: list[str]) -> None:
    known = []
    for name, section in base.items():
        leaves = section.keys() if hasattr(section, "keys") else [""]
        known += [".".join(filter(None, (str(name), str(leaf)))) for leaf in leaves]
    known = [name for name in known if not name.endswith("._target_")]
    if key in known:
        return
    group, _, leaf = key.partition(".")
    choice = next((text for text in chosen if text.startswith(f"{group}=")), None)
    where = f" with {choice}" if choice else ""
    siblings = [name for name in known if name.startswith(f"{group}.")]
    if leaf and group in base and not siblings:
        raise ConfigError(f"The setting {key!r} does not exist{where}, which has no settings.")
    if not siblings:  # a bare "width" means "feed.width"; a bare "pace" or "fed" is a group
        by_leaf = {name.rpartition(".")[2]: name for name in known}
        near = get_close_matches(key, [*known, *by_leaf, *groups()], n=1)
        if near:
            name = by_leaf.get(near[0], near[0])
            raise ConfigError(f"The setting {key!r} does not exist; did you mean {name!r}?")
        siblings = [*groups(), "trace"]
    raise ConfigError(f"The setting {key!r} does not exist{where}; {suggest(key, siblings)}.")


# --- building ---------------------------------------------------------------------------------


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
