"""The settings of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipespec.client.registry import RunningCluster
from pipespec.config.compose import compose_sections
from pipespec.config.schema import Config, DecodeConfig
from pipespec.core import Sampling
from pipespec.engine import grammar
from pipespec.errors import ConfigError
from pipespec.sampling.grammar import GrammarFailed
from pipespec.sampling.spec import VerifierSpec
from pipespec.system.reading import Unreadable, read_json

# What a request may choose, and what looks alike but was settled when the cluster started.
PER_REQUEST = ("decode", "verify")
SETTLED = ("decode.prefill_chunk",)


@dataclass(frozen=True)
class RequestSettings:
    """How a prompt is read, how long the answer may be, how its tokens are drawn, what it must
    fit (`pipespec.engine.grammar`; "": anything), and by which of the cluster's ways it is decoded
    (`Request.feed`)."""

    decode: DecodeConfig
    verify: VerifierSpec
    grammar: str = ""
    feed: str = ""

    def sampling(self, fresh_seed: int) -> Sampling:
        """How tokens are drawn; by `fresh_seed` if no seed is set."""
        return replace(self.verify.sampling(fresh_seed), grammar=self.grammar)

    @classmethod
    def of(cls, config: Config) -> RequestSettings:
        """Those of a run that starts a cluster of its own. Raises ConfigError."""
        return cls(config.decode, config.verify, grammar_of(config.decode))

    @classmethod
    def on(cls, running: RunningCluster, settings: Sequence[str]) -> RequestSettings:
        """Those of a request to a running cluster: its defaults, and `settings` on top.

        Raises ConfigError for a setting that is not one of a request.
        """
        for text in settings:
            key = text.partition("=")[0]
            if group(text) not in PER_REQUEST or key in SETTLED:
                raise ConfigError(
                    f"{key!r} was settled when the cluster {running.name!r} started; a request to "
                    "it may set decode.* and verify.* alone (decode.prefill_chunk not)."
                )
        # A choice such as verify=sample takes the cluster's own one and its values away.
        chosen = {key for text in settings if (key := text.partition("=")[0]) in PER_REQUEST}
        kept = [text for text in running.overrides if group(text) in {*PER_REQUEST} - chosen]
        decode, verify = compose_sections(PER_REQUEST, [*kept, *settings])
        return cls(decode, verify, grammar_of(decode))


def grammar_of(decode: DecodeConfig) -> str:
    """What the settings hold an answer to; "": nothing. Raises ConfigError."""
    if decode.json_schema is None and decode.regex is None:
        return ""
    name = "decode.regex" if decode.json_schema is None else "decode.json_schema"
    grammar.require_installed(name)
    try:
        if decode.json_schema is None:
            found = grammar.of_regex(decode.regex or "")
        else:
            found = grammar.of_json_schema(read_json(decode.json_schema))
        grammar.validate(found)
    except Unreadable as error:
        raise ConfigError(f"The schema {decode.json_schema!r} cannot be read: {error}.") from None
    except GrammarFailed as error:
        raise ConfigError(f"{name} cannot be followed: {error}.") from None
    return found


def group(setting: str) -> str:
    """The part of the configuration that `group.name=value` or `group=choice` belongs to."""
    return setting.partition("=")[0].partition(".")[0]
