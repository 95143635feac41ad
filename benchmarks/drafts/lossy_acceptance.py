"""What the lossy acceptance rules gain, and what they cost (SpecPipe 3.4, where neither was
evaluated).

    python -m benchmarks.drafts.lossy_acceptance --scale 4 --json benchmarks/results/lossy.json

Tokens per step, hit rate and the EMULATED time between tokens with eight stages, beside the exact
rule with the same sampling. Then the target reads every answer: *agreement* is the share of tokens
that are its own first choice after the text before them, *loss* by how much less probable than that
choice they are, in nats per token. Both are those of the exact rule too where it samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import torch
from rich.progress import track
from transformers import AutoModelForCausalLM

from benchmarks.common import experiment, run_options
from benchmarks.common.demo_pair import Measured, Pair
from pipespec.controller.embedded_redis import EmbeddedRedis
from pipespec.core import EXACT, RELAXED, STRICT, SamplingParams

GREEDY, NUCLEUS = SamplingParams(), SamplingParams(0.6, top_p=0.9, seed=1)
# The sampling of each rule; relaxed takes the most probable candidate, whatever the temperature.
RULES = ((EXACT, GREEDY), (RELAXED, GREEDY), (EXACT, NUCLEUS), (STRICT, NUCLEUS))
POLICIES = ("level", "best_first")


def losses(
    pair: Pair, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> np.ndarray:
    """By how many nats each token of the answers is less probable than the target's first choice
    there, `[tokens]`."""
    model = AutoModelForCausalLM.from_pretrained(pair.target, dtype=torch.float32)
    found = []
    for prompt, answer in zip(prompts, answers, strict=True):
        text = torch.tensor([[*prompt, *answer]])
        with torch.inference_mode():
            logits = model(text).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        found.append((logits.amax(1) - chosen).numpy())
    return np.concatenate(found)


def main() -> None:
    parser = experiment.parser(__doc__)
    run_options.add_size(parser)
    run_options.add_cluster(parser, machine="rtx3090_8")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=9)
    parser.add_argument("--prompt-tokens", type=int, default=96)
    parser.add_argument("--tokens", type=int, default=64)
    options = experiment.parse(parser, prompts=2, tokens=16)

    pair = Pair()
    prompts = pair.prompts(options.prompts, options.prompt_tokens)
    cluster = [*run_options.cluster(options), f"proposer.rounds={options.rounds}"]
    rows: list[dict[str, str | float]] = []
    with EmbeddedRedis() as server:
        cases = [("root", RULES[0]), *product(POLICIES, RULES)]
        for policy, (rule, sampling) in track(cases, "decoding", transient=True):
            decoded = pair.decode(
                server,
                prompts,
                options.tokens,
                *cluster,
                *run_options.method(policy, options),
                sampling=replace(sampling, acceptance=rule),
            )
            lost = losses(pair, prompts, decoded.answers)
            rows.append(row(policy, rule, sampling, decoded, lost, options.scale))
            rows[-1]["speed_up"] = float(rows[0]["tbt_ms"]) / float(rows[-1]["tbt_ms"])
    title = (
        f"Lossy acceptance, {options.stages} stages, demo pair, {len(prompts)} prompts × "
        f"{options.tokens} tokens; times EMULATED ({options.machine})"
    )
    experiment.publish(options, title, rows)


def row(
    policy: str,
    rule: str,
    sampling: SamplingParams,
    decoded: Measured,
    lost: np.ndarray,
    scale: float,
) -> dict[str, str | float]:
    """One row of the table."""
    how = "greedy" if not sampling.temperature else "temperature 0.6, top-p 0.9"
    return {
        "policy": policy,
        "acceptance": rule,
        "sampling": how,
        "tokens_per_step": decoded.tokens_per_step,
        "hit_rate": decoded.mean("hit_rate"),
        "tbt_ms": decoded.tbt_ms / scale,
        "agreement": float(np.mean(lost == 0)),
        "loss": float(np.mean(lost)),
        "overruns_per_step": decoded.mean("overruns") / decoded.mean("steps"),
    }


if __name__ == "__main__":
    main()
