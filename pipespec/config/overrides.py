"""What a user sets, one text after another: read, and refused in words where it cannot be meant."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING

from pipespec.config.choices import groups, options
from pipespec.config.hosts import load_hosts
from pipespec.config.schema import SECTIONS, masked
from pipespec.errors import ConfigError
from pipespec.limits import suggest
from pipespec.system.reading import alternatives

if TYPE_CHECKING:  # `pipespec generate --help` can do without
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig


def with_hosts(overrides: Sequence[str]) -> list[str]:
    """`cluster=FILE.yaml` as the settings that it stands for. Raises ConfigError."""
    found = []
    for text in overrides:
        name, _, value = text.partition("=")
        if name == "cluster" and value.endswith((".yaml", ".yml")):
            hosts_file = load_hosts(value)
            found += [f"cluster.hosts={value}", f"cluster.stages={hosts_file.num_stages}"]
        else:
            found.append(text)
    return found


def parse(text: str) -> Override:
    """One override as Hydra reads it. Raises ConfigError."""
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


def quoted(text: str) -> str:
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


def check_option(group: str, value: object) -> None:
    """Raise ConfigError unless `conf/<group>/` has that choice."""
    if value not in options(group):
        raise ConfigError(
            f"{group}={value} is not known; {suggest(str(value), options(group), f'{group}=')}."
        )


def check_key(key: str, base: DictConfig, chosen: list[str]) -> None:
    """Raise ConfigError, with what may be meant, unless `base` has that value.

    `chosen` are the groups' choices that made `base`, as overrides.
    """
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
