"""The one home of a setting: a field of a dataclass, with its default, unit, limits and help.

    @dataclass(frozen=True)
    class LevelConfig:
        width: int = setting(16, "How many nodes a step computes.", "nodes", limits=(1, 4096))

        def __post_init__(self) -> None:
            check_settings("policy", self)

`pipespec.config` composes such dataclasses with OmegaConf; the help texts of the commands and
docs/settings.md are made from them.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any

from pipespec.limits import check_choice, check_number, check_whole
from pipespec.system.validation import alternatives

REQUIRED = MISSING  # as a default: the setting has none
ABOUT = "about"  # the key in a field's metadata


@dataclass(frozen=True)
class About:
    """What a field says of its setting besides type and default: a sentence of help for users, its
    unit ("": none), the least and the most that a number, or each of a list, may be (with `above`
    more than the least), what an error adds to these limits, and the only values of a text, if any.
    `kind` is the type where the field's annotation is Any, as OmegaConf has no such type. One that
    is `experimental` may change, and is not in the help texts."""

    help: str
    unit: str = ""
    limits: tuple[float, float] | None = None
    above: bool = False
    hint: str = ""
    choices: Sequence[str] = ()
    kind: Any = None
    experimental: bool = False


NO_HELP = About("")


def setting(
    default: Any, sentence: str, unit: str = "", *, visible: bool = True, **more: Any
) -> Any:
    """A field with a default (REQUIRED: without one) and an `About` of the other arguments. A
    setting that is not `visible` may hold a secret, and is left out of the dataclass's repr."""
    metadata = {ABOUT: About(sentence, unit, **more)}
    if isinstance(default, list):
        return field(default_factory=default.copy, repr=visible, metadata=metadata)
    return field(default=default, repr=visible, metadata=metadata)


def about(entry: Field[Any]) -> About:
    """What a field says of its setting; a field of a plain dataclass says nothing."""
    found = entry.metadata.get(ABOUT, NO_HELP)
    assert isinstance(found, About)
    return found


def kinds(cls: type) -> Mapping[str, Any]:
    """The type of each setting of a dataclass, by name."""
    hints = typing.get_type_hints(cls)
    return {f.name: about(f).kind or hints[f.name] for f in fields(cls)}


def check_settings(section: str, settings: Any) -> None:
    """Raise ConfigError, which names `section`.<field>, or without a section the field alone,
    unless all values of a dataclass of settings are within the limits that its fields state."""
    of_type = kinds(type(settings))
    for entry in fields(settings):
        its, value = about(entry), getattr(settings, entry.name)
        name = f"{section}.{entry.name}".removeprefix(".")
        if value is None:
            continue
        if its.choices:
            check_choice(name, value, its.choices)
        for number in value if isinstance(value, list) else [value]:
            if its.limits is None:
                break
            least, most = its.limits
            if float in alternatives(of_type[entry.name]):
                check_number(name, number, least, most, above=its.above, hint=its.hint)
            else:
                check_whole(name, number, int(least), int(most), its.hint)
