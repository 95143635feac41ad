"""What a common prefix saves: time to first token, prompt rows, chat turns.

    python -m benchmarks.load.prefix_reuse --json benchmarks/results/prefix_cache.json

On copies of the demo pair with a longer context. One request follows another with the same first
tokens; then many requests with another common prefix arrive at once. Both are run with and without
the prefix cache, and the texts are compared. Last, conversations: in each turn the text of the chat
template is compared, token by token, with the prompt and answer of the turn before. The exit code
is 1 if a text differs or a bound is missed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.common import experiment, run_options
from benchmarks.common.checked_requests import idle_statistics, shipped_prompts
from benchmarks.common.experiment import Row
from benchmarks.load.long_prompt import longer_pair
from pipespec.client.local_cluster import Running, running
from pipespec.client.sync_client import Client
from pipespec.clock import monotonic_ns
from pipespec.cluster.deployment import decide
from pipespec.config.compose import compose
from pipespec.controller.log_records import Accepted
from pipespec.core import SamplingParams
from pipespec.instruments.bench.dataset import load

OWN_TOKENS = 8  # of each prompt, after the common prefix
TTFT_RATIO = 0.2  # the bound of the second request's time to the first token by the first's
ROWS_APART = OWN_TOKENS + 16  # the bound of prompt rows of each request beyond the prefix


@dataclass
class Answers:
    """Answers to requests that were submitted together."""

    texts: list[list[int]]
    ttft_ms: list[float]
    cached: list[int] = field(default_factory=list)


@dataclass
class ChatTurns:
    """Counts over the later turns of conversations.

    Attributes:
        turns, whole: turns, and those whose prompt begins with all tokens of the turn before.
        known, tokens: tokens of the turn before, and those that the prompt repeats.
        read, cached: tokens of the prompts, and those found in KV.
    """

    turns: int = 0
    whole: int = 0
    tokens: int = 0
    known: int = 0
    cached: int = 0
    read: int = 0


def run_all(client: Client, prompt_ids: Sequence[Sequence[int]], tokens: int) -> Answers:
    """Submit prompts at once and wait for all answers."""
    submitted_ns = monotonic_ns()
    with client.follow() as followed:
        numbers = [
            followed.submit(prompt, SamplingParams(), max_new_tokens=tokens)
            for prompt in prompt_ids
        ]
        texts: dict[int, list[int]] = {number: [] for number in numbers}
        while len(followed):
            for number, event in followed.next():
                if isinstance(event, Accepted):
                    texts[number] += event.tokens
    heads = [client.reports(number)[0] for number in numbers]
    return Answers(
        [texts[number] for number in numbers],
        [(head["token_ns"][0] - submitted_ns) / 1e6 for head in heads],
        [head["cached_tokens"] for head in heads],
    )


def prompt_rows(cluster: Running) -> int:
    """Prompt rows that have been computed."""
    answers = idle_statistics(cluster)
    assert answers is not None, "the cluster did not become idle"
    return answers["prompt_rows"]


def common_prefixes(client: Client, options: argparse.Namespace) -> list[list[int]]:
    """Three texts of `options.prefix` tokens with different beginnings."""
    text = np.concatenate(shipped_prompts(client, 80, options.positions))
    return [np.resize(np.roll(text, -at), options.prefix).tolist() for at in (0, 1000, 2000)]


def measure_prefix(
    cluster: Running, options: argparse.Namespace
) -> tuple[list[Answers], Answers, int]:
    """Two requests in a row, many at once, and the prompt rows of the many."""
    client = cluster.client
    warm, first, second = common_prefixes(client, options)
    tails = shipped_prompts(client, options.requests, OWN_TOKENS)
    run_all(client, [warm], options.tokens)
    sequential = [run_all(client, [first + tail], options.tokens) for tail in tails[:2]]
    before = prompt_rows(cluster)
    parallel = run_all(client, [second + tail for tail in tails], options.tokens)
    return sequential, parallel, prompt_rows(cluster) - before


def run_conversations(client: Client, options: argparse.Namespace) -> ChatTurns:
    """Run conversations whose questions are the shipped prompts."""
    served, turns = client.served, ChatTurns()
    questions = [
        each.prompt for each in load(run_options.DATA, options.conversations * options.turns)
    ]
    for start in range(0, len(questions), options.turns):
        messages: list[dict[str, str]] = []
        known: list[int] = []  # prompt and answer of the turn before
        for question in questions[start : start + options.turns]:
            messages.append({"role": "user", "content": question})
            prompt = served.tokenizer.encode(served.render(messages), add_special_tokens=False)
            if len(prompt) + options.tokens > served.context:
                break
            answers = run_all(client, [prompt], options.tokens)
            if known:
                common = next(
                    (i for i, (a, b) in enumerate(zip(known, prompt, strict=False)) if a != b),
                    min(len(known), len(prompt)),
                )
                turns.turns += 1
                turns.whole += common == len(known)
                turns.tokens += common
                turns.known += len(known)
                turns.cached += answers.cached[0]
                turns.read += len(prompt)
            answer = [token for token in answers.texts[0] if token not in served.eos]
            # The last token is decided but not computed; the template closes the answer itself.
            known = prompt + answer[: len(answers.texts[0]) - 1]
            text = served.tokenizer.decode(answer, skip_special_tokens=True)
            messages.append({"role": "assistant", "content": text})
    return turns


def main() -> None:
    parser = experiment.parser(__doc__)
    parser.add_argument("--prefix", type=int, default=2048, help="common tokens (2048)")
    parser.add_argument("--requests", type=int, default=32, help="at once (32)")
    parser.add_argument("--tokens", type=int, default=24, help="of an answer (24)")
    parser.add_argument("--conversations", type=int, default=40, help="(40)")
    parser.add_argument("--turns", type=int, default=4, help="of a conversation (4)")
    parser.add_argument("--stages", type=int, default=2, help="(2)")
    options = experiment.parse(parser, prefix=512, requests=4, conversations=2, turns=2)
    options.positions = 2 * options.prefix
    found: dict[bool, tuple[list[Answers], Answers, int]] = {}
    turns = ChatTurns()
    with tempfile.TemporaryDirectory() as name:
        settings = [
            *longer_pair(Path(name), options.positions),
            f"cluster.stages={options.stages}",
            "cluster.devices=[cpu]",
            f"scheduler.max_num_seqs={options.requests}",
        ]
        for cached in (False, True):
            chosen = [*settings, f"scheduler.prefix_cache={str(cached).lower()}"]
            with running(decide(compose(chosen))) as cluster:
                found[cached] = measure_prefix(cluster, options)
                if cached:
                    turns = run_conversations(cluster.client, options)
        named = experiment.overrides(settings, Path(name))
    rows = []
    for cached, (sequential, parallel, read) in found.items():
        which = "with the cache" if cached else "without"
        ratio = sequential[1].ttft_ms[0] / sequential[0].ttft_ms[0]
        most = options.prefix + ROWS_APART * options.requests
        rows += [
            Row(f"first request, TTFT in ms, {which}", sequential[0].ttft_ms[0]),
            Row(f"second, as a share, {which}", ratio, TTFT_RATIO if cached else None),
            Row(f"many at once, prompt rows, {which}", read, most if cached else None),
            Row(f"many, longest TTFT in ms, {which}", max(parallel.ttft_ms)),
        ]
    different = sum(
        one.texts != other.texts
        for one, other in zip(
            [*found[True][0], found[True][1]], [*found[False][0], found[False][1]], strict=True
        )
    )
    rows += [
        Row("texts that differ", different, 0),
        Row("chat turns after another", turns.turns),
        Row("of them, begin with all tokens of the turn before", turns.whole / max(turns.turns, 1)),
        Row("tokens of the turn before that are repeated", turns.tokens / max(turns.known, 1)),
        Row("tokens of these turns, found in KV", turns.cached / max(turns.read, 1)),
    ]
    title = f"requests with {options.prefix} common tokens, {options.stages} stages on CPUs"
    experiment.publish(options, title, [vars(row) for row in rows], settings=named)
    missed = [row.name for row in rows if row.budget is not None and row.value > row.budget]
    if missed:
        sys.exit("missed: " + "; ".join(missed))


if __name__ == "__main__":
    main()
