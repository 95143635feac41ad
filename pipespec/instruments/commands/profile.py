"""`pipespec profile`: measure a pair of models on a cluster and on prompts of one's own."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pipespec.config.schema import check_new_file
from pipespec.console.arguments import finish, overrides
from pipespec.console.terminal import progress, show, table_of, write
from pipespec.instruments.bench import dataset
from pipespec.instruments.commands.bench import store

if TYPE_CHECKING:
    from rich.table import Table

    from pipespec.console.arguments import Commands
    from pipespec.instruments.plan.machine_profile import Profile

# Prompts that are decoded, and the file that is written, unless others are given.
PROMPTS = 16
FILE = "profile.json"
# Ranks and rows for which the summary has a column.
RANKS = (1, 2, 4, 8, 16)


def add(commands: Commands) -> None:
    """Describe the command."""
    command = commands.add_parser(
        "profile",
        show_settings=True,
        help="measure a pair of models on a cluster and on prompts of your own",
        usage="pipespec profile [--prompts FILE] [--num-prompts N] [--prompt-tokens N] "
        "[--output FILE] [--json] [SETTING=VALUE ...]",
        description="Decode prompts on the cluster of the settings, plainly and with its policy, "
        "then let the draft read the answers: how long stages, draft rounds and links take, and "
        "how well the draft predicts each text. The file is for `pipespec plan --profile`, for "
        "emulate=FILE, and with a hosts file for `pipespec partition --measured`.",
    )
    command.add_argument(
        "--prompts",
        metavar="FILE",
        help="a text file with a prompt per line, or JSON Lines as for `pipespec bench` "
        "(320 prompts of HumanEval, HumanEval-X, GSM8K and Alpaca that pipespec has)",
    )
    command.add_argument(
        "--num-prompts",
        type=int,
        default=PROMPTS,
        metavar="N",
        help=f"take so many, at equal distances from all ({PROMPTS})",
    )
    command.add_argument(
        "--prompt-tokens", type=int, metavar="N", help="cut every prompt to so many tokens (uncut)"
    )
    command.add_argument("--output", metavar="FILE", default=FILE, help=f"({FILE})")
    finish(command, run, starts=True)


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Measure, write the profile, and print what it says."""
    settings = overrides(rest, arguments.known_options)
    check_new_file("--output", arguments.output)
    samples = dataset.load(dataset.chosen(arguments.prompts), arguments.num_prompts)

    from pipespec.config.compose import compose
    from pipespec.instruments.bench.profiling import Shown, check, nothing, profile

    config = compose(settings)
    check(config)
    bars = ["loading", "plain decoding", "speculative decoding", "reading"]
    if config.cluster.hosts is not None:
        bars.insert(0, "measuring hosts")
    with progress(*bars) as moved:
        shown = dict(zip(bars, moved, strict=True))
        found = profile(
            settings,
            samples,
            prompt_tokens=arguments.prompt_tokens,
            shown=Shown(shown.get("measuring hosts", nothing), *moved[-4:]),
        )
    plain = as_json(found)
    text = json.dumps(plain, allow_nan=False)
    store(arguments.output, text + "\n")
    if arguments.json:
        write(text + "\n")
        return 0
    label = ", times EMULATED" if found.about["emulated"] else ""
    show(_stages(found, label), _texts(found, label), *_sentences(found, arguments.output))
    return 0


def as_json(found: Profile) -> dict[str, Any]:
    """The values of a profile that are not empty."""
    return {name: value for name, value in asdict(found).items() if value not in ((), [], {}, "")}


# --- what comes out ---------------------------------------------------------------------------


def _stages(found: Profile, label: str) -> Table:
    """The times of every stage, of a draft round and of a hop."""
    table = table_of(f"Milliseconds by rows{label}", "", "rows: ms", left=2)
    for rank, times in enumerate(found.stage_ms, 1):
        table.add_row(f"stage {rank}", "  ".join(_rounded(times)))
    table.add_row("draft round", "  ".join(_rounded(found.draft_ms)))
    table.add_row("hop", "  ".join(_rounded(found.hop_ms)))
    return table


def _rounded(times: Any) -> list[str]:
    points = [str(point).partition(":") for point in times]
    return [f"{rows}: {float(ms):.2f}" for rows, _, ms in points]


def _texts(found: Profile, label: str) -> Table:
    """What was measured of each benchmark, and how good the draft was."""
    from pipespec.instruments.plan.recorded_draft import DraftRecord

    headings = [f"top-{rank}" for rank in RANKS]
    table = table_of(
        f"By benchmark{label}", "benchmark", "tokens", "plain TBT", "TBT", "tok/step", *headings
    )
    for row in found.about["measured"]:
        texts = [text for text in found.texts if text.benchmark == row["benchmark"]]
        if not texts:
            continue
        record = DraftRecord(texts)
        times = (row["plain_tbt_ms"], row["tbt_ms"], row["tokens_per_step"])
        hits = [f"{record.hit_rate(rank):.3f}" for rank in RANKS]
        table.add_row(
            row["benchmark"], str(row["tokens"]), *(f"{each:.2f}" for each in times), *hits
        )
    return table


def _sentences(found: Profile, file: str) -> list[str]:
    best = [text.ranks.count(1) / len(text.ranks) for text in found.texts]
    stated = found.about["confidence"]
    accuracy = (
        f"The draft's first choice is right for {min(best):.0%} to {max(best):.0%} of a text's "
        f"tokens, and states {stated:.0%} for it on average."
    )
    use = (
        f"{file} is written. Predict other policies and sizes with `pipespec plan --profile {file}`"
        f", and decode at these times with emulate={file}."
    )
    return [accuracy, use]
