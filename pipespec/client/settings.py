"""The settings of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipespec.client.registry import RunningCluster
from pipespec.config.compose import compose_sections
from pipespec.config.schema import Config, DecodeConfig
from pipespec.errors import ConfigError
from pipespec.sampling.spec import VerifierSpec

# What a request may choose, and what looks alike but was settled when the cluster started.
PER_REQUEST = ("decode", "verify")
SETTLED = ("decode.prefill_chunk",)


@dataclass(frozen=True)
class RequestSettings:
    """How a prompt is read, how long the answer may be, and how its tokens are drawn."""

    decode: DecodeConfig
    verify: VerifierSpec

    @classmethod
    def of(cls, config: Config) -> RequestSettings:
        """Those of a run that starts a cluster of its own."""
        return cls(config.decode, config.verify)

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
        return cls(*compose_sections(PER_REQUEST, [*kept, *settings]))


def group(setting: str) -> str:
    """The part of the configuration that `group.name=value` or `group=choice` belongs to."""
    return setting.partition("=")[0].partition(".")[0]
