"""`pipespec compare`: the same prompts decoded by several policies, side by side."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from pipespec.clock import monotonic_ns
from pipespec.config.schema import masked
from pipespec.console.arguments import STDIN, finish, overrides
from pipespec.console.prompt import read_prompt
from pipespec.console.terminal import (
    columns,
    labelled,
    live,
    on_terminal,
    progress,
    show,
    shown,
    table_of,
    write,
)
from pipespec.errors import PipespecError, PromptError
from pipespec.instruments.bench import dataset
from pipespec.instruments.commands.bench import number, split

if TYPE_CHECKING:
    from rich.table import Table

    from pipespec.console.arguments import Commands
    from pipespec.instruments.bench.comparison import Comparison, Standing

DATASET = ("dataset", "num_prompts")
NAMES = (*DATASET, "prompt_tokens")
HEADINGS = ("tokens", "tokens/s", "tokens/step", "speed-up")
OVERRUNS = "overruns"  # beside them where times are emulated: steps that were too slow for the pace
# Characters of the text that are shown: what other columns leave, within these.
LEAST_TEXT, MOST_TEXT = 12, 64
RENEW_NS = 10**9 // 4  # between two looks at the table


def add(commands: Commands) -> None:
    """Describe the command."""
    command = commands.add_parser(
        "compare",
        show_settings=True,
        help="decode the same prompts by several policies, side by side",
        usage="pipespec compare POLICY [POLICY ...] (--prompt TEXT | --prompt-file FILE | - | "
        "[dataset=PATH] num_prompts=N) [prompt_tokens=N] [--json] [SETTING=VALUE ...]",
        description="Decode the same prompts by several policies on one cluster, one after "
        "another; shows how fast each is, and whether their texts are equal. Every argument that "
        "sets policy.* is a policy: policy=root, or several settings together, as in 'policy=level "
        "policy.width=32'. All other settings hold for all policies. A data set is that of "
        "`pipespec bench`.",
    )
    command.add_argument("--prompt", metavar="TEXT", help="the prompt")
    command.add_argument(
        "--prompt-file", metavar="FILE", help="a UTF-8 file, taken as it is; - is standard input"
    )
    finish(command, run, starts=True)


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Decode prompts by several policies and compare."""
    texts = overrides(rest, arguments.known_options, stdin_allowed=True)
    ours, others = split(texts, NAMES)
    prompt_tokens = number(ours, "prompt_tokens")

    from pipespec.instruments.bench.comparison import compare, composed, policies_of

    policies, settings = policies_of(others)
    config = composed(settings, policies)
    samples = read_samples(arguments, ours, from_stdin=STDIN in rest)

    with ExitStack() as stack:
        board = Board(policies, stack if on_terminal() and not arguments.json else None)
        (on_loaded,) = stack.enter_context(progress("loading"))
        done = compare(
            config,
            samples,
            prompt_tokens=prompt_tokens,
            on_loaded=on_loaded,
            on_change=board.change,
        )
    if arguments.json:
        given = {"prompt_tokens": prompt_tokens, "settings": list(map(masked, settings))}
        write(json.dumps(as_json(done) | given, allow_nan=False) + "\n")
    elif not on_terminal():
        show(board.table())
    sentence = verdict(done)
    if any(done.differing().values()) and not done.labels["lossy"]:
        raise PipespecError(sentence)
    if not arguments.json:
        show(sentence)
    return 0


def read_samples(
    arguments: argparse.Namespace, ours: dict[str, str], *, from_stdin: bool
) -> list[dataset.Sample]:
    """The one prompt, or those of a data set. Raises ConfigError, PromptError."""
    if not any(name in ours for name in DATASET):
        prompt = read_prompt(arguments.prompt, arguments.prompt_file, from_stdin=from_stdin)
        return [dataset.Sample("prompt", "prompt", prompt)]
    if from_stdin or arguments.prompt is not None or arguments.prompt_file is not None:
        raise PromptError("A prompt and a data set are both given; leave one of them out.")
    where = dataset.chosen(ours.get("dataset"))
    return dataset.load(where, number(ours, "num_prompts"))


class Board:
    """The table of all policies, renewed on a terminal while they decode.

    `stack` is what the place on the terminal ends with; None: there is none.
    """

    def __init__(self, policies: Sequence[str], stack: ExitStack | None = None):
        self._standings: dict[str, Standing | None] = dict.fromkeys(policies)
        self._stack = stack
        self._renew: Callable[..., None] | None = None
        self._renewed_ns = 0

    def change(self, standing: Standing) -> None:
        """Something is new of a policy."""
        self._standings[standing.policy] = standing
        if self._stack is None:
            return
        if self._renew is None:  # all ranks have loaded
            self._renew = self._stack.enter_context(live())
        now = monotonic_ns()
        if standing.result is not None or now - self._renewed_ns > RENEW_NS:
            self._renewed_ns = now
            self._renew(self.table())

    def table(self) -> Table:
        """A row for every policy, as far as is known."""
        known = [each for each in self._standings.values() if each is not None]
        labels = known[0].labels if known else {}
        headings = (*HEADINGS, OVERRUNS) if labels.get("emulated") else HEADINGS
        title = "Ways to decode" + (labelled(labels) if labels else "")
        table = table_of(title, "policy", "text", *headings, left=2)
        setting = max(len(word) for policy in self._standings for word in policy.split())
        others = setting + sum(len(heading) + 1 for heading in headings) + 4
        room = min(max(columns() - others, LEAST_TEXT), MOST_TEXT)
        table.columns[0].min_width, table.columns[1].min_width = setting, room
        for column in table.columns[1:]:
            column.no_wrap = True
        first = next(iter(self._standings.values()))
        for policy, standing in self._standings.items():
            if standing is None:
                table.add_row(policy)
                continue
            figures = {} if standing.result is None else standing.result.summary()
            cells = (
                str(standing.tokens),
                shown(standing.tokens_per_s),
                shown(figures.get("tokens_per_step")),
                speed_up(standing, first),
                shown(figures.get(OVERRUNS)),
            )
            table.add_row(policy, end_of(standing.text, room), *cells[: len(headings)])
        return table


def end_of(text: str, most: int) -> str:
    """The last characters of a text, so many at most, in one line of a terminal."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line[-most:]


def speed_up(standing: Standing, first: Standing | None) -> str:
    """How much faster a policy is than the first one; "-" before it is known."""
    if first is None or first.result is None or not first.tokens_per_s or not standing.tokens_per_s:
        return "-"
    return f"{standing.tokens_per_s / first.tokens_per_s:.2f}x"


def verdict(done: Comparison) -> str:
    """One sentence on the texts."""
    differing = {policy: count for policy, count in done.differing().items() if count}
    if not differing:
        return "The texts of all policies are equal, token for token."
    counts = ", ".join(f"{count} with {policy}" for policy, count in differing.items())
    why = " as the verifier is LOSSY" if done.labels["lossy"] else ""
    return f"Texts differ from those of {next(iter(done.results))}{why}: {counts}."


def as_json(done: Comparison) -> dict[str, Any]:
    """All that was measured, and the answers."""
    policies = [
        row
        | {
            "answers": [
                {
                    "id": one.id,
                    "prompt_tokens": len(one.prompt_ids),
                    "text": one.text,
                    "token_ids": one.token_ids,
                    "finish_reason": one.finish_reason,
                }
                for one in done.results[row["policy"]].requests
            ]
        }
        for row in done.rows()
    ]
    return {**done.labels, "equal": not any(done.differing().values()), "policies": policies}
