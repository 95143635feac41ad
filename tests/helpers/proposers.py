"""Settings of every proposer of `conf/proposer`, and of policies to try it with."""

import json
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path

from pipespec.config.choices import options, read_choice
from pipespec.config.compose import compose, policy_class
from pipespec.head.policies.policy import SpeculationPolicy
from tests.helpers import heads

# Small sizes, so that pipelines of a few stages fill, and what a policy needs besides them.
SIZE = ("policy.width=8", "policy.children=4")
OWN_SIZE = {"static_tree": ("policy.shape=[1,2,1]",)}


def _small(policy: str) -> tuple[str, ...]:
    fixed = policy_class(policy).has_fixed_size
    return (f"policy={policy}", *OWN_SIZE.get(policy, () if fixed else SIZE))


POLICIES = {policy: _small(policy) for policy in options("policy")}
PROPOSERS = tuple(options("proposer"))


def small_policies() -> list[SpeculationPolicy]:
    """One of each policy of `conf/policy`."""
    return [compose(list(settings)).policy for settings in POLICIES.values()]


def proposer_overrides(proposer: str, *, truth: Path, target: Path) -> list[str]:
    """`truth` is the file that synthetic drafts read, `target` that for which a draft head is
    made."""
    overrides = [f"proposer={proposer}"]
    needed = {
        entry.name
        for entry in fields(read_choice("proposer", proposer).cls)
        if entry.default is entry.default_factory is MISSING
    }
    if "truth" in needed:
        overrides.append(f"proposer.truth={truth}")
    config = compose(overrides).proposer
    if config.needs_head:
        overrides.append(f"model.draft={heads.shared(target)}")
    elif not config.needs_draft:
        overrides.append("model.draft=null")
    return overrides


def write_truth(
    file: Path, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> None:
    """The file of prompts and answers that synthetic drafts read (`proposer.truth`)."""
    texts = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    file.write_text("".join(json.dumps(text) + "\n" for text in texts))
