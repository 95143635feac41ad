"""Is every text in a crowd the one that the target says alone? Token for token, with Hugging Face.

    python -m benchmarks.crowd --json benchmarks/results/crowd.json

For every number of stages, method, greedy and drawn: prompts alone, and then all of them together
with others that are cancelled at a drawn token, more than 32 at once. The others are drawn where
these are greedy and the other way round. KV holds so little that requests are put back. Hugging
Face's `generate` decodes the same, with our draw as its logits processor. Ends with exit code 1 if
a token in float32 is another, is lost or comes twice, or if nobody was put back or cancelled.

In bfloat16 a row's rounding depends on how many rows its batch has, so a text may part from the
one alone where two tokens are nearly equal: how often, and where first, is counted.
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

from benchmarks import emulated, experiment
from benchmarks.asked import Asked, ask, prompts, settled, short_of_room
from benchmarks.experiment import numbers
from pipespec.client.own import Running, running
from pipespec.cluster.deployment import decide
from pipespec.cluster.memory import slot_bytes
from pipespec.config.compose import compose
from pipespec.controller.records import CANCELLED
from pipespec.core import Sampling
from pipespec.sampling.distribution import adjust
from pipespec.sampling.draw import draw

METHODS = (*emulated.METHODS, "adaptive")
VERIFIERS = ("greedy", "sampled")
CONTEXT = 128
CAPACITY = 512  # of a tree; more would not fit into what KV there is
EXACT, ROUNDED = "float32", "bfloat16"
WAITING = 8  # requests beyond those that can be open


def sampling(verify: str, seed: int) -> Sampling:
    return Sampling() if verify == "greedy" else Sampling(temperature=0.9, top_p=0.9, seed=seed)


# --- what Hugging Face says ---------------------------------------------------------------------


class Drawn:
    """A logits processor of Hugging Face's that leaves the token alone that we would draw."""

    def __init__(self, asked: Sampling):
        self.asked = asked

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores_here = adjust(scores[0], self.asked, None)[None]
        (token,) = draw(scores_here, [self.asked], [ids.shape[1]])
        only = torch.full_like(scores, -torch.inf)
        only[0, token] = 0.0
        return only


def hugging_face(dtype: str, asked: Iterable[Asked]) -> list[list[int]]:
    """What `generate` answers, one prompt at a time, whatever the end of text is."""
    model = AutoModelForCausalLM.from_pretrained(emulated.TARGET, dtype=getattr(torch, dtype))
    model.generation_config.eos_token_id = None
    found = []
    for one in asked:
        ids = torch.tensor([one.prompt])
        drawn = [] if one.sampling.temperature == 0 else [Drawn(one.sampling)]
        answer = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=one.length,
            pad_token_id=0,
            logits_processor=LogitsProcessorList(drawn),
        )
        found.append(answer[0, ids.shape[1] :].tolist())
    return found


# --- one cluster --------------------------------------------------------------------------------


def settings(dtype: str, stages: int, method: str, options: argparse.Namespace) -> list[str]:
    """Of a cluster whose stages hold KV for `options.kv_tokens` tokens of text and guesses."""
    given = {"stages": stages, "context": CONTEXT, "at_once": options.at_once}
    sized = [*emulated.method(method, options), f"model.dtype={dtype}"]
    if method not in ("root", "level"):  # the others have a tree of a size that is set
        sized.append(f"feed.capacity={CAPACITY}")
    deployment = decide(compose([*short_of_room(**given, kv="1GiB"), *sized]))
    slot = slot_bytes(deployment, deployment.target, 1)
    kib = -(-options.kv_tokens * slot // 1024)
    return [*short_of_room(**given, kv=f"{kib}KiB"), *sized]


def texts(
    verify: str, given: Sequence[Sequence[int]], options: argparse.Namespace, seed: int = 0
) -> list[Asked]:
    """Every prompt, decided one way."""
    return [
        Asked(prompt, sampling(verify, seed + i), options.tokens) for i, prompt in enumerate(given)
    ]


def others(verify: str, given: Sequence[Sequence[int]], options: argparse.Namespace) -> list[Asked]:
    """Whoever is cancelled, decided the other way."""
    drawn = random.Random(options.seed)
    (way,) = {*VERIFIERS} - {verify}
    found = texts(way, drawn.choices(given, k=options.cancelled), options, seed=len(given))
    for one in found:
        one.doomed = drawn.randrange(options.tokens)
    return found


def at_once(cluster: Running, requests: Sequence[int]) -> int:
    """How many requests were between their first and their last tokens at once, at most."""
    moments = []
    for request in requests:
        times = cluster.client.reports(request)[0]["token_ns"]
        if times:
            moments += [(times[0], 1), (times[-1], -1)]
    most = open_ = 0
    for _, change in sorted(moments):
        open_ += change
        most = max(most, open_)
    return most


def row(
    cluster: Running,
    dtype: str,
    verify: str,
    truth: Sequence[Sequence[int]],
    given: Sequence[Sequence[int]],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """All prompts alone and in a crowd, decided one way."""
    began = time.monotonic()
    every = 1 if dtype == ROUNDED else options.alone_every
    alone = texts(verify, given, options)[::every]
    ask(cluster, alone, at_once=1)
    crowd, doomed = texts(verify, given, options), others(verify, given, options)
    for one, by_itself in zip(crowd[::every], alone, strict=True):
        one.right = by_itself.tokens
    coming = [*crowd, *doomed]
    random.Random(options.seed).shuffle(coming)
    before = settled(cluster)
    requests = ask(cluster, coming, at_once=options.at_once + WAITING)
    after = settled(cluster)
    assert before is not None and after is not None, "the head says nothing"
    parted = [one.different[0] for one in crowd if one.different]
    return {
        "verify": verify,
        "alone": len(alone),
        "alone_not_hugging_face": sum(
            one.tokens != right for one, right in zip(alone, truth[::every], strict=True)
        ),
        "crowd": len(crowd),
        "crowd_not_hugging_face": sum(
            one.tokens != right for one, right in zip(crowd, truth, strict=True)
        ),
        "crowd_not_alone": len(parted),
        "first_token": min(parted, default=None),
        "lost_or_doubled": sum(one.lost + one.doubled for one in (*alone, *coming)),
        "at_once": at_once(cluster, requests),
        "put_back": after["preemptions"] - before["preemptions"],
        "cancelled": sum(one.reason == CANCELLED for one in doomed),
        "slots_held": after["kv_slots_held"],
        "seconds": round(time.monotonic() - began),
        "parted_at": sorted(parted),
    }


# --- all of them --------------------------------------------------------------------------------


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
    """What must not be; and what must be, or nothing is shown."""
    exact = [row for row in rows if row["dtype"] == EXACT]
    names = ("alone_not_hugging_face", "crowd_not_hugging_face", "crowd_not_alone")
    found = {name: sum(row[name] for row in exact) for name in names}
    found |= {name: sum(row[name] for row in rows) for name in ("lost_or_doubled", "slots_held")}
    missing = [name for name in ("put_back", "cancelled") if not any(row[name] for row in rows)]
    return [
        *(f"{name}: {count}" for name, count in found.items() if count),
        *(f"{name}: 0, so nothing is shown of it" for name in missing),
    ]


def main() -> None:
    parser = experiment.parser(__doc__)
    emulated.add_methods(parser, METHODS, width=16)
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
    parser.add_argument("--cancelled", type=int, default=19, help="others, all cancelled (19)")
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
    rows, given = [], []
    cells = [(EXACT, n) for n in options.stages] + [(ROUNDED, n) for n in options.rounded_stages]
    truth: dict[tuple[str, str], list[list[int]]] = {}
    used = {}
    for dtype, stages in cells:
        for method in options.methods:
            overrides = settings(dtype, stages, method, options)
            used[f"{dtype}, {stages} stages, {method}"] = overrides
            with running(decide(compose(overrides))) as cluster:
                given = given or prompts(cluster.client, options.num_prompts, options.prompt_tokens)
                for verify in VERIFIERS:
                    if (dtype, verify) not in truth:
                        truth[dtype, verify] = hugging_face(dtype, texts(verify, given, options))
                    found = row(cluster, dtype, verify, truth[dtype, verify], given, options)
                    rows.append({"dtype": dtype, "stages": stages, "method": method} | found)
                    print(rows[-1], file=sys.stderr)
    title = (
        f"{len(given)} prompts alone and in a crowd of {options.at_once}, {options.tokens} tokens, "
        f"KV for {options.kv_tokens} of them; methods: {', '.join(options.methods)}"
    )
    experiment.publish(options, title, summary(rows), cells=rows, settings=used)
    if problems := wrong(rows):
        sys.exit("; ".join(problems))
    print(f"In {EXACT} every text is Hugging Face's, alone and in the crowd, token for token.")


if __name__ == "__main__":
    main()
