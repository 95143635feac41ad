"""What the settings beside `auto` leave to be chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipespec.instruments.model_choice.candidates import Candidate

SUFFIX = "proposer=suffix"
_FORMAT = ("model.quantization", "model.dtype", "model.keep_quantized")
_LAYOUT = ("cluster", "cluster.stages", "cluster.devices", "cluster.hosts", "cluster.split")
_MODELS = ("model.target", "model.draft")


@dataclass(frozen=True)
class GivenSettings:
    """Settings that stay as they are."""

    texts: tuple[str, ...]

    def value(self, key: str) -> str | None:
        """The value of a setting, None if it is not given."""
        found = [
            value for name, _, value in (text.partition("=") for text in self.texts) if name == key
        ]
        return found[-1] if found else None

    @property
    def without_models(self) -> tuple[str, ...]:
        """The settings but for the names of target and draft."""
        return tuple(text for text in self.texts if text.partition("=")[0] not in _MODELS)

    @property
    def target(self) -> str | None:
        """The target, if it is given."""
        return self.value("model.target")

    @property
    def draft(self) -> str | None:
        """The draft model, if it is given."""
        found = self.value("model.draft")
        return None if found == "null" else found

    @property
    def format_is_free(self) -> bool:
        """Whether it is to be chosen how the target's weights are held."""
        return all(self.value(key) is None for key in _FORMAT)

    @property
    def proposer_is_free(self) -> bool:
        """Whether the proposer is to be chosen."""
        return self.value("proposer") is None and self.draft is None

    @property
    def may_draft(self) -> bool:
        """Whether a draft model may propose."""
        return self.value("proposer") in (None, "draft_model", "hybrid") and (
            self.value("model.draft") != "null"
        )

    def layouts(self, draft: Candidate | None, num_gpus: int) -> list[tuple[str, ...]]:
        """Settings that say how many stages there are, best first: on a machine with GPUs one on
        each but that of the draft, or one on each; else one. Nothing, if it is given."""
        if any(self.value(key) is not None for key in _LAYOUT):
            return [()]
        found = [max(num_gpus, 1)]
        if draft is not None and num_gpus > 1:
            found.insert(0, num_gpus - 1)
        return [(f"cluster.stages={stages}",) for stages in found]


def given(texts: Sequence[str]) -> GivenSettings:
    """The same of a list."""
    return GivenSettings(tuple(texts))
