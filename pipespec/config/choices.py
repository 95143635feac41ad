"""What may be set: the groups and choices of `conf/`, and the dataclasses behind them.
`conf/<group>/<choice>.yaml` names the dataclass that holds its settings, and the values in which it
differs from the defaults of that class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from importlib import import_module
from inspect import isabstract
from typing import Any

import yaml  # type: ignore[import-untyped]

from pipespec.config.schema import RunConfig
from pipespec.errors import ConfigError, is_of_extras
from pipespec.limits import suggest
from pipespec.settings import about
from pipespec.system.folders import resource_dir

# Of which class those of a group are, where others may add to it.
BASES = {
    "policy": "pipespec.head.policies.policy.SpeculationPolicy",
    "proposer": "pipespec.head.proposer.ProposerConfig",
    "emulate": "pipespec.timing.clock.StepClock",
    "emulate_link": "pipespec.transport.transport.LinkDelay",
}
# The choice of `emulate` and `emulate_link` that is there without `pipespec.extras`.
REAL = "none"


@dataclass(frozen=True)
class Choice:
    """A file of `conf/<group>/`: the full name of its class, and the values that it sets itself."""

    group: str
    name: str
    base: str
    values: Mapping[str, Any]

    @property
    def cls(self) -> type:
        """The dataclass of its settings; only the modules of chosen ones are imported. Raises
        ConfigError if the file names no class that can be used."""
        try:
            found = _imported(self.base)
        except (ImportError, AttributeError) as error:
            absent = isinstance(error, ImportError) and is_of_extras(error)
            if absent and self.name == REAL and self.group in BASES:
                return _imported(BASES[self.group])
            raise self._wrong(f"cannot be imported ({error})") from error
        if not isinstance(found, type) or not is_dataclass(found):
            raise self._wrong("is no dataclass")
        if self.group in BASES and not issubclass(found, _imported(BASES[self.group])):
            raise self._wrong(f"is no {BASES[self.group].rpartition('.')[2]}")
        if isabstract(found):
            lacks = ", ".join(sorted(found.__abstractmethods__))
            raise self._wrong(f"does not define {lacks}", remedy="define it")
        return found

    def _wrong(self, what: str, remedy: str = "correct its `defaults`") -> ConfigError:
        return ConfigError(
            f"conf/{self.group}/{self.name}.yaml names the class {self.base}, which {what}; "
            f"{remedy}."
        )

    def check_names(self) -> None:
        known = [entry.name for entry in fields(self.cls)]
        for name in self.values.keys() - set(known):
            raise ConfigError(
                f"conf/{self.group}/{self.name}.yaml sets {name!r}, which {self.base} has not; "
                f"{suggest(str(name), known)}."
            )

    def default(self, entry: Field[Any]) -> str:
        """The value of a setting under this choice, as one writes it; "": none."""
        return written(self.values[entry.name]) if entry.name in self.values else default(entry)


@dataclass(frozen=True)
class Setting:
    name: str
    default: str
    note: str


def groups() -> list[str]:
    return sorted(folder.name for folder in resource_dir("conf").iterdir() if folder.is_dir())


def options(group: str) -> list[str]:
    """The files of `conf/<group>/`, without their ending."""
    return sorted(file.stem for file in (resource_dir("conf") / group).glob("*.yaml"))


def read_choice(group: str, name: str) -> Choice:
    """A file of `conf/`. Raises ConfigError if it names no class."""
    values = _read(f"{group}/{name}")
    match values.pop("defaults", None):
        case [str(base)] if "." in base:
            return Choice(group, name, base, values)
        case other:
            raise ConfigError(
                f"conf/{group}/{name}.yaml has the defaults {other!r}, but must name one class, "
                "as in `defaults: [my_module.MyClass]`."
            )


def default_choices() -> dict[str, str]:
    """The choice that `conf/config.yaml` makes for each group."""
    entries = [entry for entry in _read("config")["defaults"] if isinstance(entry, dict)]
    return {group: name for entry in entries for group, name in entry.items()}


def settings() -> Iterator[Setting]:
    """Every group, and every setting of the default choices that is not experimental."""
    for group, name in default_choices().items():
        yield Setting(group, name, "one of " + ", ".join(options(group)))
        choice = read_choice(group, name)
        for entry in fields(choice.cls):
            if not about(entry).experimental:
                yield Setting(f"{group}.{entry.name}", choice.default(entry), about(entry).help)
    for entry in fields(RunConfig):
        yield Setting(entry.name, default(entry), about(entry).help)


def default(entry: Field[Any]) -> str:
    """The default of a field, as one writes it; "": none."""
    if entry.default_factory is not MISSING:
        return written(entry.default_factory())
    return "" if entry.default is MISSING else written(entry.default)


def written(value: Any) -> str:
    """A value as one writes it behind `name=`; the folder of what pipespec brings is <name>."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{','.join(map(written, value))}]"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).replace("${resource:", "<").replace("}", ">")


def _imported(name: str) -> Any:
    module, _, own = name.rpartition(".")
    return getattr(import_module(module), own)


def _read(name: str) -> dict[str, Any]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        found = yaml.load((resource_dir("conf") / f"{name}.yaml").read_bytes(), loader)
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"conf/{name}.yaml cannot be read: {reason}.") from error
    if not isinstance(found, dict):
        raise ConfigError(f"conf/{name}.yaml holds no settings; start with `defaults: [CLASS]`.")
    return found
