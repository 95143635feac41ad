"""What a user sets: overrides are read one by one, and a mistake is refused in one sentence."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException

from pipespec.config.choices import groups
from pipespec.config.hosts import load_hosts
from pipespec.config.schema import RunConfig, masked
from pipespec.errors import ConfigError
from pipespec.limits import suggest
from pipespec.settings import kinds
from pipespec.system.validation import Unreadable, alternatives, read_json, readable, typed


def with_files(overrides: Sequence[str]) -> list[str]:
    """`cluster=FILE.yaml` and `emulate=FILE.json` as what they stand for. Raises ConfigError."""
    found = []
    for text in overrides:
        name, _, value = text.partition("=")
        if name == "cluster" and value.endswith((".yaml", ".yml")):
            hosts_file = load_hosts(value)
            found += [f"cluster.hosts={value}", f"cluster.stages={hosts_file.num_stages}"]
        elif name == "emulate" and value.endswith(".json"):
            found += _times_of(value)
        else:
            found.append(text)
    return found


def _times_of(file: str) -> list[str]:
    """The settings of an emulated machine with the times of a profile. Raises ConfigError."""
    with readable(f"The profile {file!r} cannot be read"):
        profile = read_json(file)
    times = profile.get("stage_ms") if isinstance(profile, dict) else None
    if not isinstance(times, list) or not times:
        raise ConfigError(
            f"{file!r} has no times of stages; make it with `pipespec bench --profile`."
        )
    draft = profile.get("draft_ms", 0.0)
    of_stages = [each for each in times if isinstance(each, list)] or [times]
    stages, rounds = (
        [" ".join(map(str, points)) for points in curves]
        for curves in (of_stages, [draft if isinstance(draft, list) else [draft]])
    )
    return [
        "emulate=fixed",
        f"emulate.stage_ms={json.dumps(stages)}",
        f"emulate.draft_ms={json.dumps(rounds[0])}",
    ]


def no_setting(text: str) -> ConfigError:
    return ConfigError(
        f"{masked(text)!r} is not a setting, as name=value, nor a model's folder or file here; "
        "a text of several words needs quotes."
    )


def parse(text: str) -> Override:
    """One override as Hydra reads it. Raises ConfigError."""
    if "=" not in text:
        raise no_setting(text)
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


def quoted(text: str, classes: Mapping[str, type]) -> str:
    """The override with a text value in quotes, so that paths and URLs need none from the user.
    `classes` are those of the groups; "" has the settings without a group."""
    name, separator, value = text.partition("=")
    of_type = set(alternatives(_kind(name, classes)))
    if str not in of_type or {int, float} & of_type or not separator or value in ("", "null"):
        return text
    if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
        return text
    return f"{name}={QuotedString(text=value, quote=Quote.single).with_quotes()}"


def is_interpolation(override: Override) -> bool:
    """Whether the value of an override is made from those of other settings."""
    return "${" in str(override.value())


def resolved(key: str, value: Any, classes: Mapping[str, type]) -> Any:
    """What an interpolation gives, of the setting's type. Raises ConfigError."""
    of_type = set(alternatives(_kind(key, classes)))
    if {int, str} <= of_type and isinstance(value, str) and value.isdecimal():
        value = int(value)  # a variable of the environment is a text
    return checked(key, value, classes)


def checked(key: str, value: Any, classes: Mapping[str, type]) -> Any:
    """A value of a setting, of the setting's type. OmegaConf checks the types too, but turns
    numbers into texts and has no sentences for users. Raises ConfigError."""
    try:
        return typed(key, value, _kind(key, classes))
    except Unreadable as error:
        raise ConfigError(f"{masked(str(error))}.") from None


def _kind(key: str, classes: Mapping[str, type]) -> Any:
    """The type of a setting; None: it is not known."""
    group, _, name = key.rpartition(".")
    return kinds(classes[group]).get(name) if group in classes else None


def check_key(key: str, classes: Mapping[str, type], chosen: Sequence[str]) -> None:
    """Raise ConfigError, with what may be meant, unless one of the groups' classes has that value.
    `chosen` are the user's choices for the groups, as overrides."""
    known = [
        f"{group}.{entry.name}".lstrip(".")
        for group, cls in classes.items()
        for entry in fields(cls)
    ]
    if key in known:
        return
    group, _, leaf = key.partition(".")
    choice = next((text for text in chosen if text.startswith(f"{group}=")), None)
    where = f" with {choice}" if choice else ""
    siblings = [name for name in known if name.startswith(f"{group}.")]
    if leaf and group in classes and not siblings:
        raise ConfigError(f"The setting {key!r} does not exist{where}, which has no settings.")
    if not siblings:  # a bare "width" means "policy.width"; a bare "polcy" means the group
        by_leaf = {name.rpartition(".")[2]: name for name in known}
        near = get_close_matches(key, [*known, *by_leaf, *groups()], n=1)
        if near:
            name = by_leaf.get(near[0], near[0])
            raise ConfigError(f"The setting {key!r} does not exist; did you mean {name!r}?")
        siblings = [*groups(), *kinds(RunConfig)]
    raise ConfigError(f"The setting {key!r} does not exist{where}; {suggest(key, siblings)}.")
