"""`pipespec bench`: decode a data set of prompts and measure; one policy, several, or a profile."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipespec.client import registry
from pipespec.client.request_settings import RequestSettings
from pipespec.client.sync_client import attach
from pipespec.config.compose import compose
from pipespec.config.schema import check_new_file, masked
from pipespec.console.arguments import AddParser, add_on, finish, overrides
from pipespec.console.terminal import labelled, progress, show, shown, table_of, write
from pipespec.errors import ConfigError, PipespecError
from pipespec.extras.bench import dataset
from pipespec.extras.bench.comparison import Comparison, compare, composed, policies_of
from pipespec.extras.bench.dataset import Load
from pipespec.extras.bench.figures import BenchResult
from pipespec.extras.bench.measurement import bench, bench_on
from pipespec.extras.plan.pipeline_times import Profile

LATENCIES = {
    "ttft": "time to first token (TTFT)",
    "tpot": "time per output token (TPOT)",
    "itl": "between verdicts (ITL)",
    "tbt": "time between tokens (TBT)",
    "e2el": "whole request (E2E)",
}
FIGURES = (
    *("request_throughput", "output_throughput", "max_output_tokens_per_s"),
    *("total_token_throughput", "max_concurrent_requests", "tokens_per_step"),
    *("accepted_per_batch", "hit_rate", "rows_per_step", "pipeline_steps"),
    *("pipeline_tokens_per_step", "pipeline_rows_per_step", "stage_busy", "overruns", "seed"),
)
COLUMNS = ("mean", "p50", "p90", "p99")
COMPARED = ("tokens", "tokens_per_s", "tokens_per_step", "speed_up")
PROFILED = 16  # prompts of a profile, unless --num-prompts says otherwise


def add(add_parser: AddParser) -> None:
    command = add_parser(
        show_settings=True,
        usage="pipespec bench [--on NAME | --policies POLICY,... | --profile FILE] "
        "[--dataset PATH] [...] [MODEL] [SETTING=VALUE ...]",
        description="Decode a data set of prompts on one cluster: latencies and throughput, named "
        "as by `vllm bench serve`, and what speculation brought. With --policies the same prompts "
        "are decoded by each, one after another. With --profile they are decoded plainly and with "
        "the policy, and the draft reads the answers: the file says how long stages, draft rounds "
        "and links take and how well the draft predicts each text, for `pipespec plan --profile` "
        "and for emulate=FILE.",
    )
    command.add_argument(
        "--dataset",
        metavar="PATH",
        help="a text file with a prompt per line, a JSON Lines file, or a folder of these: id, "
        "benchmark and prompt per line (320 prompts of HumanEval, HumanEval-X, GSM8K and Alpaca)",
    )
    command.add_argument(
        "--num-prompts",
        type=int,
        metavar="N",
        help=f"take so many, at equal distances from all (all; {PROFILED} of a profile)",
    )
    command.add_argument(
        "--prompt-tokens", type=int, metavar="N", help="cut every prompt to so many tokens (uncut)"
    )
    command.add_argument(
        "--concurrency",
        type=int,
        metavar="N",
        help="requests handed in and not yet finished, at most; the next is handed in when one "
        "finishes (1; with a rate: any number)",
    )
    command.add_argument(
        "--request-rate",
        type=float,
        metavar="R",
        help="requests handed in per second, at random moments (Poisson), as far as --concurrency "
        "allows; of the emulated machine's seconds, if there is one (inf: each at once)",
    )
    command.add_argument(
        "--policies",
        metavar="POLICY,...",
        help="compare policies, each with settings of its own if it has any, as in "
        "'root,level policy.width=4,best_first'",
    )
    command.add_argument("--profile", metavar="FILE", help="write a profile of machine and draft")
    command.add_argument(
        "--output", metavar="FILE", help="write the figures and every request to a JSON file"
    )
    add_on(command)
    finish(command, run)


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    settings = overrides(rest, arguments.known_options)
    names = ("policies", "profile", "on")
    forms = [name for name in names if getattr(arguments, name) is not None]
    if len(forms) > 1:
        raise ConfigError(f"--{forms[0]} and --{forms[1]} cannot be combined; leave one out.")
    # What is wrong is said before anything is read.
    load = Load.of(arguments.concurrency, arguments.request_rate)
    for option in ("output", "profile"):
        if getattr(arguments, option) is not None:
            check_new_file(f"--{option}", getattr(arguments, option))
    where = dataset.chosen(arguments.dataset)
    count = arguments.num_prompts
    usual = PROFILED if arguments.profile is not None else None
    samples = dataset.load(where, usual if count is None else count)
    if arguments.policies is not None:
        return _compare(arguments, settings, samples)
    if arguments.profile is not None:
        return _profile(arguments, settings, samples)

    result, inherited = measured(samples, settings, arguments.on, load, arguments.prompt_tokens)
    figures = {
        **result.summary(),
        "dataset": str(where),
        "prompt_tokens": arguments.prompt_tokens,
        "settings": list(map(masked, [*inherited, *settings])),
        "benchmarks": result.by_benchmark(),
    }
    requests = [asdict(request) for request in result.requests]
    _finish(arguments, figures, {"requests": requests})
    if not arguments.json:
        print_figures(result)
    return 0


def measured(
    samples: Sequence[dataset.Sample],
    settings: list[str],
    on: str | None,
    load: Load,
    prompt_tokens: int | None,
) -> tuple[BenchResult, tuple[str, ...]]:
    """Decode a data set on the running cluster of that name, or on one of its own; the settings
    that the running one was started with."""
    if on is not None:
        running = registry.find(on)
        chosen = RequestSettings.on(running, settings)
        with attach(running) as client, progress("decoding") as (on_done,):
            how = load, prompt_tokens, on_done
            return bench_on(client, chosen, samples, *how), running.overrides

    config = compose(settings)

    with progress("loading", "decoding") as (on_loaded, on_done):
        return bench(config, samples, load, prompt_tokens, on_done, on_loaded), ()


def _compare(
    arguments: argparse.Namespace, settings: list[str], samples: Sequence[dataset.Sample]
) -> int:
    policies = policies_of(arguments.policies)
    config = composed(settings, policies)
    with progress("loading", "decoding") as (on_loaded, on_done):
        done = compare(config, samples, arguments.prompt_tokens, on_loaded, on_done)
    given = {"prompt_tokens": arguments.prompt_tokens, "settings": list(map(masked, settings))}
    figures = {**done.labels, "equal": not done.differing, **given, "policies": done.rows()}
    each = {policy: list(map(asdict, of.requests)) for policy, of in done.results.items()}
    _finish(arguments, figures, {"requests": each})
    if not arguments.json:
        print_comparison(done)
    if done.differing and not done.labels["lossy"]:
        raise PipespecError(done.verdict)
    if not arguments.json:
        show(done.verdict)
    return 0


def _profile(
    arguments: argparse.Namespace, settings: list[str], samples: Sequence[dataset.Sample]
) -> int:
    from pipespec.extras.bench.profiling import BARS, check, profile

    config = compose(settings)
    check(config)
    hosts = [] if config.cluster.hosts is None else ["measuring hosts"]
    with progress(*hosts, *BARS) as bars:
        found = profile(settings, samples, prompt_tokens=arguments.prompt_tokens, shown=bars)
    values = {name: value for name, value in asdict(found).items() if value not in ((), [], {}, "")}
    store(arguments.profile, values)
    _finish(arguments, values, {})
    if not arguments.json:
        print_profile(found)
        show(
            f"{arguments.profile} is written. Predict other policies and sizes with `pipespec plan "
            f"--profile {arguments.profile}`, and decode at these times with "
            f"emulate={arguments.profile}."
        )
    return 0


def _finish(
    arguments: argparse.Namespace, figures: Mapping[str, Any], more: Mapping[str, Any]
) -> None:
    """Write the figures, with `more` to a file, as the options say."""
    if arguments.output is not None:
        store(arguments.output, {**figures, **more})
    if arguments.json:
        write(json.dumps(figures, allow_nan=False) + "\n")


def store(file: str, values: Mapping[str, Any]) -> None:
    """Write what was measured. Raises PipespecError."""
    try:
        Path(file).write_text(json.dumps(values, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise PipespecError(f"{file!r} cannot be written: {error.strerror}.") from error


def print_figures(result: BenchResult) -> None:
    """Three tables: latencies, what speculation brought, and each benchmark by itself."""
    figures = result.summary()
    label = labelled(figures)
    at_once = figures["max_concurrency"] or "any number"
    rate = figures["request_rate"]
    often = "" if rate == "inf" else f"{shown(rate)} handed in per second, "
    summary = (
        f"{figures['completed']} requests, {at_once} at once, {often}"
        f"{figures['total_output_tokens']} tokens after {figures['total_input_tokens']} of the "
        f"prompts in {figures['duration']:.1f} s{label}"
    )
    latencies = table_of(f"Latencies{label}", "milliseconds", *COLUMNS)
    for kind, name in LATENCIES.items():
        latencies.add_row(name, *(shown(figures[f"{c}_{kind}_ms"]) for c in COLUMNS))
    brought = table_of(f"Over all requests{label}", "", "")
    brought.show_header = False
    for key in FIGURES:
        if key != "overruns" or figures["emulated"]:
            brought.add_row(key.replace("_", " "), shown(figures[key]))
    headings = ("requests", "tokens", "TTFT ms", "TBT ms", "tok/step", "hit rate", "tok/verdict")
    each = table_of(f"Means of each benchmark{label}", "benchmark", *headings)
    for row in result.by_benchmark():
        each.add_row(*map(shown, row.values()))
    show(summary, latencies, brought, each)


def print_comparison(done: Comparison) -> None:
    """A row for every policy; overruns where times are emulated."""
    columns = (*COMPARED, "overruns") if done.labels["emulated"] else COMPARED
    headings = [name.replace("_per_", "/").replace("_", "-") for name in columns]
    table = table_of(f"Policies{labelled(done.labels)}", "policy", *headings)
    for row in done.rows():
        table.add_row(row["policy"], *(shown(row[name]) for name in columns))
    show(table)


def print_profile(found: Profile) -> None:
    label = ", times EMULATED" if found.about["emulated"] else ""
    times = table_of(f"Milliseconds by rows{label}", "", "rows: ms", left=2)
    stages = ((f"stage {rank}", points) for rank, points in enumerate(found.stage_ms, 1))
    for name, points in (*stages, ("draft round", found.draft_ms), ("hop", found.hop_ms)):
        parts = (str(point).partition(":") for point in points)  # type: ignore[union-attr]
        times.add_row(name, "  ".join(f"{rows}: {float(ms):.2f}" for rows, _, ms in parts))
    headings = ("tokens", "plain TBT", "TBT", "tok/step", "hit rate")
    each = table_of(f"By benchmark{label}", "benchmark", *headings)
    for row in found.about["measured"]:
        each.add_row(*map(shown, row.values()))
    show(times, each)
