"""What the commands' arguments have in common: a parser whose complaints are ours, overrides."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from pipespec.errors import ConfigError

STDIN = "-"
# What options of vLLM and llama.cpp are called here.
SETTINGS = {
    "--max-model-len": "model.context",
    "--ctx-size": "model.context",
    "-c": "model.context",
    "--speculative-config": "model.draft",
    "--model-draft": "model.draft",
    "-md": "model.draft",
    "--tensor-parallel-size": "cluster.tensor_parallel",
    "--pipeline-parallel-size": "cluster.stages",
    "--max-num-seqs": "scheduler.max_num_seqs",
    "--parallel": "scheduler.max_num_seqs",
    "--max-num-batched-tokens": "scheduler.max_num_batched_tokens",
    "--enable-prefix-caching": "scheduler.prefix_cache",
    "--max-tokens": "decode.max_new_tokens",
    "--n-predict": "decode.max_new_tokens",
    "--temperature": "sampling.temperature",
    "--temp": "sampling.temperature",
    "--top-p": "sampling.top_p",
    "--top-k": "sampling.top_k",
    "--seed": "sampling.seed",
    "--dtype": "model.dtype",
    "--quantization": "model.quantization",
    "--kv-cache-dtype": "model.kv_dtype",
    "--kv-cache-memory": "model.kv_memory",
    "--gpu-memory-utilization": "model.kv_memory",
}
# Options that are settings, as other tools name them.
MODELS = {"-m": "model.target", "--model": "model.target", "--draft": "model.draft"}


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are ConfigErrors. With `show_settings` its help ends with
    the settings of `conf/`, read only when asked for."""

    def __init__(self, *, show_settings: bool = False, **options: Any):
        super().__init__(allow_abbrev=False, **options)
        self._show_settings = show_settings

    def error(self, message: str) -> NoReturn:
        raise ConfigError(
            f"{message[:1].upper()}{message[1:].rstrip('.')}; see {self.prog} --help."
        )

    def format_help(self) -> str:
        text = super().format_help()
        if not self._show_settings:
            return text

        from pipespec.config.choices import settings

        lines = [f"  {s.name}={s.default}".ljust(34) + f"  {s.note}".rstrip() for s in settings()]
        models = "MODEL, -m MODEL and --model MODEL are model.target=MODEL; --draft is model.draft."
        return "\n".join([text, models, "", "settings and their defaults:", *lines, ""])


# Makes the parser of a command, of its options.
AddParser = Callable[..., Parser]


def add_name(command: Parser, sentence: str = "the cluster (by default the only one)") -> None:
    command.add_argument("name", nargs="?", metavar="NAME", help=sentence)


def finish(command: Parser, run: Callable[[argparse.Namespace, list[str]], int]) -> None:
    """Add what every command has: `--json`, what runs it, and which options it knows."""
    command.add_argument(
        "--json", action="store_true", help="print one JSON object and nothing else"
    )
    known = [name for action in command._actions for name in action.option_strings]
    command.set_defaults(command=run, command_name=command.prog, known_options=known)


def add_on(command: Parser) -> None:
    command.add_argument(
        "--on",
        metavar="NAME",
        help="ask the cluster that `pipespec up` started under this name; only decode.* and "
        "sampling.* may then be set",
    )


def list_of(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """An argparse type: values with commas between them."""

    def parse(text: str) -> list[Any]:
        return [kind(part.strip()) for part in text.split(",")]

    parse.__name__ = f"list of {kind.__name__.lstrip('_')}"
    return parse


def words(rest: list[str], known: Sequence[str], *, stdin_allowed: bool = False) -> list[str]:
    """What argparse did not know, in which no option may be left."""
    for argument in rest:
        if argument.startswith("-") and not (argument == STDIN and stdin_allowed):
            name = argument.partition("=")[0]
            near = get_close_matches(name, [*known, *MODELS], n=1)
            hint = f"did you mean {near[0]}?" if near else "see --help."
            if name in SETTINGS:
                hint = f"set {SETTINGS[name]}=VALUE."
            raise ConfigError(f"The option {name!r} does not exist; {hint}")
    return [each for each in rest if each != STDIN]


def overrides(rest: list[str], known: Sequence[str], *, stdin_allowed: bool = False) -> list[str]:
    """What argparse did not know, as overrides. HOSTS.yaml is cluster=HOSTS.yaml; a path, or what
    exists in the working folder, is the target."""
    found, left = [], iter(rest)
    for word in left:
        name, separator, value = word.partition("=")
        if name in MODELS:
            word = f"{MODELS[name]}={value if separator else next(left, '')}"
        elif word.endswith((".yaml", ".yml")) and not separator:
            word = f"cluster={word}"
        elif not word.startswith("-") and (
            "/" in name or name.endswith(".gguf") or (not separator and os.path.lexists(word))
        ):
            word = f"model.target={word}"
        found.append(word)
    found = words(found, known, stdin_allowed=stdin_allowed)
    targets = [each.partition("=")[2] for each in found if each.startswith("model.target=")]
    if len(targets) > 1:
        raise ConfigError(f"Targets are {' and '.join(targets)}; name the draft by --draft.")
    return found


def refuse_settings(arguments: argparse.Namespace, rest: list[str]) -> None:
    if found := words(rest, arguments.known_options):
        raise ConfigError(f"`{arguments.command_name}` takes no settings, but got {found[0]!r}.")


def refuse_trace(settings: Sequence[str], command: str) -> None:
    """Raise ConfigError for a trace, which would grow for as long as the cluster runs."""
    if any(text.startswith("trace=") for text in settings):
        raise ConfigError(
            f"`pipespec {command}` writes no trace; leave trace=FILE to `pipespec generate` "
            "without --on."
        )
