"""The choice of `pipespec up auto`: which target, in which format, with which draft.

Of the models in the caches it is the largest one that fits the memory of the hosts, with KV memory
for the stated context, in the format of most bits that fits, with the largest draft that is fast
enough. Without a draft, draft tokens come from the text itself (`proposer=suffix`); such a target
is chosen only if it is at least twice as large as the largest one with a draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from pipespec.errors import ConfigError
from pipespec.instruments.model_choice.candidates import (
    Candidate,
    drafts,
    formats,
    kept_bits,
    same_vocabulary,
)
from pipespec.instruments.model_choice.fitting import Fit, fit
from pipespec.instruments.model_choice.given_settings import SUFFIX, GivenSettings
from pipespec.instruments.model_choice.host_memory import Memory
from pipespec.system.sizes import size_text

# A target without a draft is chosen if it is so many times as large as one with a draft.
WITHOUT_DRAFT = 2.0
# A draft is fast enough if its weights are at most this share of a stage's: two rounds then take no
# longer than the stage.
ROUND_SHARE = 0.5


@dataclass(frozen=True)
class Choice:
    """What was chosen. `settings` make the cluster, and `reasons` are sentences."""

    target: Candidate
    draft: Candidate | None
    fit: Fit
    settings: tuple[str, ...]
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Chooser:
    """Chooses among models.

    Attributes:
        models: those that can be decoded.
        given: settings that stay as they are; what they say is not chosen.
        usable: the bytes of each device of each host.
        context: tokens for which there must be KV memory, unless the settings say how many.
    """

    models: Sequence[Candidate]
    given: GivenSettings
    usable: Memory
    context: int

    def choose(self) -> Choice | Fit:
        """The choice; where nothing fits, what lacks the fewest bytes.

        Raises ConfigError if no model can be a target.
        """
        without: Choice | None = None
        nearest: Fit | None = None
        problem = ConfigError("None of the models in the caches can be a target.")
        targets = [
            each
            for each in self.models
            if self.given.target in (None, each.name) and each.info.mask_token is None
        ]
        targets.sort(key=lambda each: (-each.size, each.name))
        for size, group in groupby(targets, key=lambda each: each.size):
            if without is not None and WITHOUT_DRAFT * size <= without.target.size:
                break
            for target, how in self._alternatives(list(group)):
                try:
                    found = self._with_draft(target, how)
                except ConfigError as error:
                    problem = error
                    continue
                if isinstance(found, Fit):
                    lacks_less = nearest is None or found.missing_bytes < nearest.missing_bytes
                    nearest = found if lacks_less else nearest
                elif found[0] is not None or not self._seeks_draft:
                    return self._choice(target, *found, passed=without)
                else:
                    without = without or self._choice(target, *found)
        if without is None and nearest is None:
            raise problem
        return without or nearest  # type: ignore[return-value]

    @property
    def _num_gpus(self) -> int:
        return sum(device != "cpu" for devices in self.usable.values() for device in devices)

    @property
    def _seeks_draft(self) -> bool:
        return self.given.proposer_is_free and self.given.may_draft

    def _alternatives(
        self, targets: Sequence[Candidate]
    ) -> list[tuple[Candidate, tuple[str, ...]]]:
        """Targets of one size and settings for the format of their weights, those with most bits
        first."""
        found = [
            (target, how)
            for target in targets
            for how in (
                formats(target, on_cpu=not self._num_gpus) if self.given.format_is_free else [()]
            )
        ]
        return sorted(found, key=lambda each: -kept_bits(*each))

    def _with_draft(
        self, target: Candidate, how: tuple[str, ...]
    ) -> tuple[Candidate | None, Fit] | Fit:
        """The best draft of a target, or None where it needs or has none, and how both fit; where
        they do not, what lacks the fewest bytes. Raises ConfigError if a setting is wrong."""
        fitting: list[tuple[Candidate, Fit]] = []
        short: list[Fit] = []
        for draft in self._drafts(target):
            found = self._fit(target, how, draft)
            if found.missing_bytes:
                short.append(found)
                continue
            fitting.append((draft, found))
            if self.given.draft or found.draft_bytes <= ROUND_SHARE * found.stage_bytes:
                return draft, found
        if fitting:  # a round of any takes longer than half a stage
            return min(fitting, key=lambda each: each[1].draft_bytes)
        if self.given.draft is None:
            found = self._fit(target, how, None)
            if not found.missing_bytes:
                return None, found
            short.append(found)
        return min(short, key=lambda each: each.missing_bytes)

    def _drafts(self, target: Candidate) -> list[Candidate]:
        if not self.given.may_draft:
            return []
        if self.given.draft is not None:
            return [each for each in self.models if each.name == self.given.draft]
        return drafts(target, self.models)

    def _fit(self, target: Candidate, how: tuple[str, ...], draft: Candidate | None) -> Fit:
        """How a target and a draft fit in the layout that needs the fewest bytes more."""
        settings = [f"model.target={target.info.path}", *how]
        if draft is not None:
            settings.append(f"model.draft={draft.info.path}")
        elif self.given.proposer_is_free:
            settings.append(SUFFIX)
        if self.given.value("model.context") is None:
            settings.append(f"model.context={min(self.context, target.info.context)}")
        found: list[Fit] = []
        for layout in self.given.layouts(draft, self._num_gpus):
            tried = fit(self.given.without_models, (*settings, *layout), self.usable)
            if not tried.missing_bytes:
                return tried
            found.append(tried)
        return min(found, key=lambda each: each.missing_bytes)

    def _choice(
        self,
        target: Candidate,
        draft: Candidate | None,
        found: Fit,
        passed: Choice | None = None,
    ) -> Choice:
        names = {f"model.target={target.info.path}": f"model.target={target.name}"}
        if draft is not None:
            names[f"model.draft={draft.info.path}"] = f"model.draft={draft.name}"
        settings = (
            *(names.get(each, each) for each in found.settings),
            *self.given.without_models,
        )
        reasons = (self._why_target(target, found, passed), self._why_draft(target, draft, found))
        return Choice(target, draft, found, settings, reasons)

    def _why_target(self, target: Candidate, found: Fit, passed: Choice | None) -> str:
        size = (
            f"{size_text(found.weight_bytes)} of weights ({found.weight_format}) and "
            f"{size_text(found.kv_bytes)} of KV for {found.deployment.context} tokens"
        )
        if self.given.target is not None:
            return f"Target {target.name}, as given: {size}."
        larger = sorted(
            (each for each in self.models if each.size > target.size), key=lambda each: each.size
        )
        too_large = [each.name for each in larger if passed is None or each is not passed.target]
        others = f" {_listed(too_large)} would not." if too_large else ""
        if passed is not None:
            others += f" {passed.target.name} fits too, but not with a draft."
        return f"Target {target.name}, the largest in the caches that fits: {size}.{others}"

    def _why_draft(self, target: Candidate, draft: Candidate | None, found: Fit) -> str:
        if draft is not None and self.given.draft is not None:
            return f"Draft {draft.name}, as given: {size_text(found.draft_bytes)} of weights."
        if draft is not None:
            share = found.draft_bytes / found.stage_bytes
            return (
                f"Draft {draft.name}, which has the target's vocabulary: "
                f"{size_text(found.draft_bytes)} of weights, {share:.2g} of the largest stage's."
            )
        if not self._seeks_draft:
            return "No draft model, as given."
        alike = any(
            same_vocabulary(target, each) for each in self.models if each.name != target.name
        )
        why = "no other model in the caches has its vocabulary"
        if alike:
            why = "of those with its vocabulary none is small enough and fits beside it"
        return f"No draft model: {why}; draft tokens come from the text itself."


def _listed(names: Sequence[str]) -> str:
    """Up to two names, and how many more there are."""
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return ", ".join(names[:2]) + more
