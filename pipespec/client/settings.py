"""The settings of a request to a cluster that is up already."""

from __future__ import annotations

from collections.abc import Sequence

from pipespec.client.registry import Card
from pipespec.config.compose import compose
from pipespec.config.schema import Config
from pipespec.errors import ConfigError

# What a request may choose, and what looks alike but was settled when the cluster started.
PER_REQUEST = ("decode", "verify")
SETTLED = ("decode.prefill_chunk",)
# What figures are made with; the rest of the cluster is no business of who asks.
FIGURES = ("pace", "link")


def configure(card: Card, settings: Sequence[str]) -> Config:
    """The configuration of requests to a cluster: its own defaults, and `settings` on top.

    Raises ConfigError for a setting that is not one of a request.
    """
    for text in settings:
        key = text.partition("=")[0]
        if group(text) not in PER_REQUEST or key in SETTLED:
            raise ConfigError(
                f"{key!r} was settled when the cluster {card.name!r} started; a request to it may "
                "set decode.* and verify.* alone (decode.prefill_chunk not)."
            )
    # A choice such as verify=sample takes the cluster's own one and its values away.
    chosen = {key for text in settings if (key := text.partition("=")[0]) in PER_REQUEST}
    kept = [text for text in card.overrides if group(text) in {*PER_REQUEST, *FIGURES} - chosen]
    # What guesses is the cluster's affair, unless guesses made from the answer need a label.
    guesses = [text for text in card.overrides if group(text) == "source"]
    if "source=synthetic" not in guesses:
        guesses = ["source=ngram"]
    stages = f"cluster.stages={card.num_ranks - 1}"
    return compose([f"model.target={card.target}", stages, *guesses, *kept, *settings])


def group(setting: str) -> str:
    """The part of the configuration that `group.name=value` or `group=choice` belongs to."""
    return setting.partition("=")[0].partition(".")[0]
