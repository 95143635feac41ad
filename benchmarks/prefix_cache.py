"""What requests save that begin alike: time to the first token, rows that are read, chat turns.

    python -m benchmarks.prefix_cache --json benchmarks/results/prefix_cache.json

On copies of the demo pair with a longer context. A request comes behind one with the same first
tokens; then many come at once with another beginning in common. Both are done with and without the
prefix cache, and the texts are compared. Last, conversations: in each turn the chat template's text
is compared, token by token, with what the turn before had read and said. Ends with exit code 1 if a
text differs or a bound is missed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks import emulated, experiment
from benchmarks.asked import prompts, settled
from benchmarks.experiment import Row
from benchmarks.long_prompt import pair
from pipespec.client.client import Client
from pipespec.client.dataset import load
from pipespec.client.own import Running, running
from pipespec.clock import monotonic_ns
from pipespec.cluster.deployment import decide
from pipespec.config.compose import compose
from pipespec.controller.records import Accepted
from pipespec.core import Sampling

OWN_TOKENS = 8  # of each prompt, behind what it has in common with others
TTFT_RATIO = 0.2  # the bound of the second request's time to the first token by the first's
ROWS_APART = OWN_TOKENS + 16  # the bound of rows that each of many reads beside the beginning


@dataclass
class Told:
    """What requests that were handed in together have come to."""

    texts: list[list[int]]
    ttft_ms: list[float]
    cached: list[int] = field(default_factory=list)


@dataclass
class Turns:
    """How conversations went on: `whole` of `turns` begin with all that was read and said before,
    and so do `tokens` of `known` tokens; `cached` of `read` were found in KV."""

    turns: int = 0
    whole: int = 0
    tokens: int = 0
    known: int = 0
    cached: int = 0
    read: int = 0


def ask(client: Client, asked: Sequence[Sequence[int]], tokens: int) -> Told:
    """Hand prompts in at once and wait for all answers."""
    came = monotonic_ns()
    numbers = [client.submit(prompt, Sampling(), max_new_tokens=tokens) for prompt in asked]
    texts: dict[int, list[int]] = {number: [] for number in numbers}
    with client.follow() as followed:
        for number in numbers:
            followed.add(number)
        while len(followed):
            for number, event in followed.next():
                if isinstance(event, Accepted):
                    texts[number] += event.tokens
    heads = [client.reports(number)[0] for number in numbers]
    return Told(
        [texts[number] for number in numbers],
        [(head["token_ns"][0] - came) / 1e6 for head in heads],
        [head["cached_tokens"] for head in heads],
    )


def prompt_rows(cluster: Running) -> int:
    """Rows of prompts that were fed so far."""
    told = settled(cluster)
    assert told is not None, "the cluster did not settle"
    return told["prompt_rows"]


def beginnings(client: Client, options: argparse.Namespace) -> list[list[int]]:
    """Three texts of the asked length that begin otherwise."""
    text = np.concatenate(prompts(client, 80, options.positions))
    return [np.resize(np.roll(text, -at), options.prefix).tolist() for at in (0, 1000, 2000)]


def behind(cluster: Running, options: argparse.Namespace) -> tuple[list[Told], Told, int]:
    """One request behind another, and many at once; and the rows of prompts that the many took."""
    client = cluster.client
    warm, first, second = beginnings(client, options)
    tails = prompts(client, options.requests, OWN_TOKENS)
    ask(client, [warm], options.tokens)
    apart = [ask(client, [first + tail], options.tokens) for tail in tails[:2]]
    before = prompt_rows(cluster)
    many = ask(client, [second + tail for tail in tails], options.tokens)
    return apart, many, prompt_rows(cluster) - before


def converse(client: Client, options: argparse.Namespace) -> Turns:
    """Conversations of some turns, whose questions are the shipped prompts."""
    served, turns = client.served, Turns()
    questions = [each.prompt for each in load(emulated.DATA, options.conversations * options.turns)]
    for start in range(0, len(questions), options.turns):
        messages: list[dict[str, str]] = []
        known: list[int] = []  # what the turn before has read and said
        for question in questions[start : start + options.turns]:
            messages.append({"role": "user", "content": question})
            prompt = served.tokenizer.encode(served.render(messages), add_special_tokens=False)
            if len(prompt) + options.tokens > served.context:
                break
            told = ask(client, [prompt], options.tokens)
            if known:
                common = next(
                    (i for i, (a, b) in enumerate(zip(known, prompt, strict=False)) if a != b),
                    min(len(known), len(prompt)),
                )
                turns.turns += 1
                turns.whole += common == len(known)
                turns.tokens += common
                turns.known += len(known)
                turns.cached += told.cached[0]
                turns.read += len(prompt)
            answer = [token for token in told.texts[0] if token not in served.eos]
            # The last token is decided, not fed; the template closes the answer by itself.
            known = prompt + answer[: len(told.texts[0]) - 1]
            said = served.tokenizer.decode(answer, skip_special_tokens=True)
            messages.append({"role": "assistant", "content": said})
    return turns


def main() -> None:
    parser = experiment.parser(__doc__)
    parser.add_argument("--prefix", type=int, default=2048, help="tokens in common (2048)")
    parser.add_argument("--requests", type=int, default=32, help="that come at once (32)")
    parser.add_argument("--tokens", type=int, default=24, help="of an answer (24)")
    parser.add_argument("--conversations", type=int, default=40, help="(40)")
    parser.add_argument("--turns", type=int, default=4, help="of a conversation (4)")
    parser.add_argument("--stages", type=int, default=2, help="(2)")
    options = experiment.parse(parser, prefix=512, requests=4, conversations=2, turns=2)
    options.positions = 2 * options.prefix
    found: dict[bool, tuple[list[Told], Told, int]] = {}
    turns = Turns()
    with tempfile.TemporaryDirectory() as name:
        settings = [
            *pair(Path(name), options.positions),
            f"cluster.stages={options.stages}",
            "cluster.devices=[cpu]",
            f"scheduler.max_num_seqs={options.requests}",
        ]
        for cached in (False, True):
            chosen = [*settings, f"scheduler.prefix_cache={str(cached).lower()}"]
            with running(decide(compose(chosen))) as cluster:
                found[cached] = behind(cluster, options)
                if cached:
                    turns = converse(cluster.client, options)
        named = experiment.overrides(settings, Path(name))
    rows = []
    for cached, (apart, many, read) in found.items():
        which = "with the cache" if cached else "without"
        ratio = apart[1].ttft_ms[0] / apart[0].ttft_ms[0]
        most = options.prefix + ROWS_APART * options.requests
        rows += [
            Row(f"first request, TTFT in ms, {which}", apart[0].ttft_ms[0]),
            Row(f"second, as a share, {which}", ratio, TTFT_RATIO if cached else None),
            Row(f"many at once, rows read, {which}", read, most if cached else None),
            Row(f"many, longest TTFT in ms, {which}", max(many.ttft_ms)),
        ]
    different = sum(
        one.texts != other.texts
        for one, other in zip(
            [*found[True][0], found[True][1]], [*found[False][0], found[False][1]], strict=True
        )
    )
    rows += [
        Row("texts that differ", different, 0),
        Row("chat turns behind another", turns.turns),
        Row("of them, begin with all that was read and said", turns.whole / max(turns.turns, 1)),
        Row("tokens that were read and said, found again", turns.tokens / max(turns.known, 1)),
        Row("tokens of these turns, found in KV", turns.cached / max(turns.read, 1)),
    ]
    title = f"requests with {options.prefix} tokens in common, {options.stages} stages on CPUs"
    experiment.publish(options, title, [vars(row) for row in rows], settings=named)
    missed = [row.name for row in rows if row.budget is not None and row.value > row.budget]
    if missed:
        sys.exit("missed: " + "; ".join(missed))


if __name__ == "__main__":
    main()
