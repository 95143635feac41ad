"""Is every text under load the one of the target alone? Compared with Hugging Face by token.

    python -m benchmarks.load.exact_texts --json benchmarks/results/crowd.json

For every number of stages and method, greedy and sampled: prompts run alone, and then all together,
more than 32 at once, with other requests that are cancelled at a random token. The others are
sampled where these are greedy, and the other way round. The KV pools are so small that requests are
preempted. Hugging Face's `generate` decodes the same prompts, with our sampling as its logits
processor. The exit code is 1 if a token in float32 differs, is lost or comes twice, or if no
request was preempted or cancelled.

In bfloat16 the rounding of a row depends on the number of rows in its batch, so a text may differ
from the one alone where two tokens are nearly equally likely; how often and where is counted.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LogitsProcessorList

from benchmarks.common import experiment, run_options
from benchmarks.common.checked_requests import (
    CheckedRequest,
    idle_statistics,
    run_requests,
    shipped_prompts,
    small_kv_settings,
)
from benchmarks.common.experiment import numbers
from pipespec.client.local_cluster import Running, running
from pipespec.cluster.deployment import decide
from pipespec.cluster.memory import slot_bytes
from pipespec.config.choices import options
from pipespec.config.compose import compose
from pipespec.controller.log_records import CANCELLED
from pipespec.core import SamplingParams
from pipespec.sampling.distribution import adjust
from pipespec.sampling.draw import draw

METHODS = ("root", *(policy for policy in options("policy") if policy != "root"))
VERIFIERS = ("greedy", "sampled")
CONTEXT = 128
CAPACITY = 256  # of a tree; more would not fit into the KV pool of the draft
EXACT, ROUNDED = "float32", "bfloat16"
WAITING = 8  # requests beyond those that can run


def sampling(verify: str, seed: int) -> SamplingParams:
    return (
        SamplingParams()
        if verify == "greedy"
        else SamplingParams(temperature=0.9, top_p=0.9, seed=seed)
    )


# --- Hugging Face -------------------------------------------------------------------------------


class SampledToken:
    """A logits processor for Hugging Face that allows only the token that we would sample."""

    def __init__(self, sampling: SamplingParams):
        self.sampling = sampling

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores_here = adjust(scores[0], self.sampling, None)[None]
        (token,) = draw(scores_here, [self.sampling], [ids.shape[1]])
        only = torch.full_like(scores, -torch.inf)
        only[0, token] = 0.0
        return only


def hugging_face(dtype: str, requests: Iterable[CheckedRequest]) -> list[list[int]]:
    """The answers of `generate`, one prompt at a time, without an end of text."""
    model = AutoModelForCausalLM.from_pretrained(run_options.TARGET, dtype=getattr(torch, dtype))
    model.generation_config.eos_token_id = None
    found = []
    for request in requests:
        ids = torch.tensor([request.prompt])
        sampled = request.sampling.temperature > 0
        processors = [SampledToken(request.sampling)] if sampled else []
        answer = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=request.length,
            pad_token_id=0,
            logits_processor=LogitsProcessorList(processors),
        )
        found.append(answer[0, ids.shape[1] :].tolist())
    return found


# --- one cluster --------------------------------------------------------------------------------


def settings(dtype: str, stages: int, method: str, options: argparse.Namespace) -> list[str]:
    """A cluster whose stages have KV for `options.kv_tokens` tokens of text and draft tokens."""
    given = {"stages": stages, "context": CONTEXT, "concurrency": options.at_once}
    sized = [*run_options.method(method, options), f"model.dtype={dtype}"]
    if method not in ("root", "level"):  # the others take a size of the tree
        sized.append(f"policy.capacity={CAPACITY}")
    deployment = decide(compose([*small_kv_settings(**given, kv="1GiB"), *sized]))
    slot = slot_bytes(deployment, deployment.target, 1)
    kib = -(-options.kv_tokens * slot // 1024)
    return [*small_kv_settings(**given, kv=f"{kib}KiB"), *sized]


def checked_requests(
    verify: str, prompts: Sequence[Sequence[int]], options: argparse.Namespace, seed: int = 0
) -> list[CheckedRequest]:
    """A request for every prompt, greedy or sampled."""
    return [
        CheckedRequest(prompt, sampling(verify, seed + i), options.tokens)
        for i, prompt in enumerate(prompts)
    ]


def cancelled_requests(
    verify: str, prompts: Sequence[Sequence[int]], options: argparse.Namespace
) -> list[CheckedRequest]:
    """Requests that are cancelled, sampled if the checked ones are greedy and vice versa."""
    rng = random.Random(options.seed)
    (other,) = {*VERIFIERS} - {verify}
    found = checked_requests(
        other, rng.choices(prompts, k=options.cancelled), options, seed=len(prompts)
    )
    for request in found:
        request.cancel_after = rng.randrange(options.tokens)
    return found


def most_at_once(cluster: Running, requests: Sequence[int]) -> int:
    """The most requests that were between their first and last tokens at the same time."""
    moments = []
    for request in requests:
        times = cluster.client.reports(request)[0]["token_ns"]
        if times:
            moments += [(times[0], 1), (times[-1], -1)]
    most = running = 0
    for _, change in sorted(moments):
        running += change
        most = max(most, running)
    return most


def row(
    cluster: Running,
    dtype: str,
    verify: str,
    expected_texts: Sequence[Sequence[int]],
    prompts: Sequence[Sequence[int]],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """All prompts alone and together, greedy or sampled."""
    began = time.monotonic()
    every = 1 if dtype == ROUNDED else options.alone_every
    alone = checked_requests(verify, prompts, options)[::every]
    run_requests(cluster, alone, concurrency=1)
    together = checked_requests(verify, prompts, options)
    cancelled = cancelled_requests(verify, prompts, options)
    for request, reference in zip(together[::every], alone, strict=True):
        request.expected = reference.tokens
    requests = [*together, *cancelled]
    random.Random(options.seed).shuffle(requests)
    before = idle_statistics(cluster)
    numbers = run_requests(cluster, requests, concurrency=options.at_once + WAITING)
    after = idle_statistics(cluster)
    assert before is not None and after is not None, "the cluster did not become idle"
    parted = [request.wrong_positions[0] for request in together if request.wrong_positions]
    return {
        "verify": verify,
        "alone": len(alone),
        "alone_not_hugging_face": sum(
            request.tokens != expected
            for request, expected in zip(alone, expected_texts[::every], strict=True)
        ),
        "crowd": len(together),
        "crowd_not_hugging_face": sum(
            request.tokens != expected
            for request, expected in zip(together, expected_texts, strict=True)
        ),
        "crowd_not_alone": len(parted),
        "first_token": min(parted, default=None),
        "lost_or_doubled": sum(request.lost + request.doubled for request in (*alone, *requests)),
        "at_once": most_at_once(cluster, numbers),
        "put_back": after["preemptions"] - before["preemptions"],
        "cancelled": sum(request.reason == CANCELLED for request in cancelled),
        "slots_held": after["kv_slots_held"],
        "seconds": round(time.monotonic() - began),
        "parted_at": sorted(parted),
    }


# --- all runs -----------------------------------------------------------------------------------


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sums for each type of the weights, number of stages and verifier, over the methods."""

    def place(row: dict[str, Any]) -> tuple[bool, int, bool]:
        return row["dtype"] != EXACT, row["stages"], row["verify"] != "greedy"

    found = []
    for _, group in groupby(sorted(rows, key=place), key=place):
        mine = list(group)
        sums = (
            "alone",
            "alone_not_hugging_face",
            "crowd",
            "crowd_not_hugging_face",
            "crowd_not_alone",
            "lost_or_doubled",
            "put_back",
            "cancelled",
        )
        same = {name: mine[0][name] for name in ("dtype", "stages", "verify")}
        first = [row["first_token"] for row in mine if row["first_token"] is not None]
        found.append(
            same
            | {name: sum(row[name] for row in mine) for name in sums}
            | {"first_token": min(first, default=None)}
            | {"at_once": max(row["at_once"] for row in mine)}
        )
    return found


def wrong(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The errors; that nothing was preempted or cancelled is one."""
    exact = [row for row in rows if row["dtype"] == EXACT]
    names = ("alone_not_hugging_face", "crowd_not_hugging_face", "crowd_not_alone")
    found = {name: sum(row[name] for row in exact) for name in names}
    found |= {name: sum(row[name] for row in rows) for name in ("lost_or_doubled", "slots_held")}
    missing = [name for name in ("put_back", "cancelled") if not any(row[name] for row in rows)]
    return [
        *(f"{name}: {count}" for name, count in found.items() if count),
        *(f"{name}: 0, so this run shows nothing about it" for name in missing),
    ]


def main() -> None:
    parser = experiment.parser(__doc__)
    run_options.add_methods(parser, METHODS, width=16)
    parser.set_defaults(children=8)
    parser.add_argument("--stages", type=numbers, default=[1, 2, 4, 8], help="(1,2,4,8)")
    parser.add_argument(
        "--rounded-stages", type=numbers, default=[4], help=f"the same in {ROUNDED} (4)"
    )
    parser.add_argument("--num-prompts", type=int, default=45, help="(45)")
    parser.add_argument(
        "--alone-every", type=int, default=4, help=f"of these, in {EXACT}, one is also alone (4)"
    )
    parser.add_argument("--prompt-tokens", type=int, default=32, help="cut to (32)")
    parser.add_argument("--tokens", type=int, default=24, help="of an answer (24)")
    parser.add_argument("--at-once", type=int, default=40, help="scheduler.max_num_seqs (40)")
    parser.add_argument(
        "--cancelled", type=int, default=19, help="further requests, all cancelled (19)"
    )
    parser.add_argument("--kv-tokens", type=int, default=1300, help="that a stage holds (1300)")
    parser.add_argument("--seed", type=int, default=1)
    options = experiment.parse(
        parser,
        stages=[2],
        rounded_stages=[1],
        methods=["best_first"],
        num_prompts=12,
        at_once=16,
        cancelled=5,
        kv_tokens=360,
    )
    rows: list[dict[str, Any]] = []
    prompts: list[list[int]] = []
    cells = [(EXACT, n) for n in options.stages] + [(ROUNDED, n) for n in options.rounded_stages]
    expected_texts: dict[tuple[str, str], list[list[int]]] = {}
    used = {}
    for dtype, stages in cells:
        for method in options.methods:
            overrides = settings(dtype, stages, method, options)
            used[f"{dtype}, {stages} stages, {method}"] = overrides
            with running(decide(compose(overrides))) as cluster:
                prompts = prompts or shipped_prompts(
                    cluster.client, options.num_prompts, options.prompt_tokens
                )
                for verify in VERIFIERS:
                    if (dtype, verify) not in expected_texts:
                        expected_texts[dtype, verify] = hugging_face(
                            dtype, checked_requests(verify, prompts, options)
                        )
                    found = row(
                        cluster,
                        dtype,
                        verify,
                        expected_texts[dtype, verify],
                        prompts,
                        options,
                    )
                    rows.append({"dtype": dtype, "stages": stages, "method": method} | found)
                    print(rows[-1], file=sys.stderr)
    title = (
        f"{len(prompts)} prompts alone and {options.at_once} at once, {options.tokens} tokens, "
        f"KV for {options.kv_tokens} of them; methods: {', '.join(options.methods)}"
    )
    experiment.publish(options, title, summary(rows), cells=rows, settings=used)
    if problems := wrong(rows):
        sys.exit("; ".join(problems))
    print(f"In {EXACT} every text is Hugging Face's, alone and together, token for token.")


if __name__ == "__main__":
    main()
