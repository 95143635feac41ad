"""The settings of a request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipespec.client.model_info import ModelInfo
from pipespec.client.registry import RunningCluster
from pipespec.config.compose import compose, compose_sections
from pipespec.config.overrides import no_setting
from pipespec.config.schema import Config, DecodeConfig
from pipespec.core import SamplingParams
from pipespec.engine.llguidance_backend import (
    grammar_from_choice,
    grammar_from_json_schema,
    grammar_from_lark,
    grammar_from_regex,
    require_installed,
    validate,
)
from pipespec.errors import ConfigError
from pipespec.sampling.grammar import GrammarFailed
from pipespec.sampling.params import SamplingConfig
from pipespec.system.validation import read_json, readable

# What a request may choose, and what looks alike but was settled when the cluster started.
PER_REQUEST = ("decode", "sampling")
SETTLED = ("decode.prefill_chunk",)
# What describes an answer, by vLLM's names, and what makes a grammar of it.
GRAMMARS: Mapping[str, Callable[[Any], str]] = {
    "json": grammar_from_json_schema,
    "regex": grammar_from_regex,
    "choice": grammar_from_choice,
    "grammar": grammar_from_lark,
}


@dataclass(frozen=True)
class RequestSettings:
    """How a prompt is read, how long the answer may be, how its tokens are drawn, what it must
    fit (`pipespec.engine.llguidance_backend`; "": anything), and by which of the cluster's policies
    it is decoded (`Request.policy`)."""

    decode: DecodeConfig
    sampling: SamplingConfig
    grammar: str = ""
    policy: str = ""

    def params(self, fresh_seed: int) -> SamplingParams:
        """How tokens are drawn; by `fresh_seed` if no seed is set."""
        return replace(self.sampling.params(fresh_seed), grammar=self.grammar)

    def fields(self, served: ModelInfo) -> dict[str, Any]:
        """The lengths, ends and the like of a request, as `AsyncAnswer.submit` takes them."""
        return {
            "max_new_tokens": self.decode.max_new_tokens,
            "stop": self.decode.stop,
            "eos": () if self.decode.ignore_eos else served.eos,
            "priority": self.decode.priority,
            "policy": self.policy,
        }

    @classmethod
    def of(cls, config: Config) -> RequestSettings:
        """Those of a run that starts a cluster of its own. Raises ConfigError."""
        return cls(config.decode, config.sampling, grammar_of(config.decode))

    @classmethod
    def on(cls, running: RunningCluster, settings: Sequence[str]) -> RequestSettings:
        """Those of a request to a running cluster: its defaults, and `settings` on top. Raises
        ConfigError for a setting that is not one of a request."""
        for text in settings:
            key, separator, _ = text.partition("=")
            if not separator:
                raise no_setting(text)
            if group(text) not in PER_REQUEST or key in SETTLED:
                compose([text])  # what does not exist is refused so
                raise ConfigError(
                    f"{key!r} was settled when the cluster {running.name!r} started; a request to "
                    "it may set decode.* and sampling.* only (decode.prefill_chunk not)."
                )
        kept = [text for text in running.overrides if group(text) in PER_REQUEST]
        decode, sampling = compose_sections(PER_REQUEST, [*kept, *settings])
        return cls(decode, sampling, grammar_of(decode))


def grammar_of(decode: DecodeConfig) -> str:
    """What the settings hold an answer to; "": nothing. Raises ConfigError."""
    if decode.form is None:
        return ""
    if decode.json_schema is None:
        return grammar_for(decode.form, "regex", decode.regex or "")
    with readable(f"The schema {decode.json_schema!r} cannot be read"):
        return grammar_for(decode.form, "json", read_json(decode.json_schema))


def grammar_for(name: str, kind: str, value: Any) -> str:
    """The grammar for a value of `GRAMMARS` that users know as `name`. Raises ConfigError."""
    require_installed(name)
    try:
        found = GRAMMARS[kind](value)
        validate(found)
    except GrammarFailed as error:
        raise ConfigError(f"{name} cannot be followed: {error}.") from None
    return found


def group(setting: str) -> str:
    """The part of the configuration that `group.name=value` or `group=choice` belongs to."""
    return setting.partition("=")[0].partition(".")[0]
