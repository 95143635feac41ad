"""`pipespec bench`: decode a data set of prompts and measure."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipespec.config.schema import check_new_file, masked
from pipespec.console.arguments import add_on, finish, overrides
from pipespec.console.terminal import labelled, progress, show, shown, table_of, write
from pipespec.errors import ConfigError, PipespecError
from pipespec.instruments.bench import dataset
from pipespec.instruments.bench.arrivals import Load, check_rate
from pipespec.limits import MAX_COUNT, MAX_SEED, check_whole

if TYPE_CHECKING:
    from pipespec.console.arguments import Commands
    from pipespec.instruments.bench.figures import BenchResult

LATENCIES = {
    "ttft": "time to first token (TTFT)",
    "tpot": "time per output token (TPOT)",
    "itl": "between verdicts (ITL)",
    "tbt": "time between tokens (TBT)",
    "e2el": "whole request (E2E)",
}
FIGURES = {
    "request_throughput": "requests per second",
    "output_throughput": "output tokens per second",
    "max_output_tokens_per_s": "output tokens in the best second",
    "total_token_throughput": "tokens per second, prompts included",
    "max_concurrent_requests": "requests at once, at most",
    "tokens_per_step": "tokens per step of a request",
    "accepted_per_batch": "tokens per verdict that decided any",
    "hit_rate": "hit rate",
    "rows_per_step": "rows per step of a request",
    "pipeline_steps": "steps of the pipeline, prompts included",
    "pipeline_tokens_per_step": "tokens per step of the pipeline",
    "pipeline_rows_per_step": "rows per step of the pipeline",
    "stage_busy": "share of time each stage computed",
    "overruns": "overruns",
    "seed": "seed",
}
COLUMNS = ("mean", "p50", "p90", "p99")


def add(commands: Commands) -> None:
    """Describe the command."""
    command = commands.add_parser(
        "bench",
        show_settings=True,
        help="decode a data set of prompts and measure",
        usage="pipespec bench [--on NAME] [--json] [--output FILE] [dataset=PATH] [concurrency=N] "
        "[request_rate=R] [arrival_seed=N] [num_prompts=N] [prompt_tokens=N] [SETTING=VALUE ...]",
        description="Decode a data set of prompts on one cluster: latencies and throughput, named "
        "as by `vllm bench serve`, and what speculation brought. --dataset, --concurrency, "
        "--request-rate, --arrival-seed, --num-prompts and --prompt-tokens may also be written "
        "like settings: concurrency=4.",
    )
    command.add_argument(
        "--dataset",
        metavar="PATH",
        help="a JSON Lines file, or a folder of them: id, benchmark and prompt per line "
        "(320 prompts of HumanEval, HumanEval-X, GSM8K and Alpaca that pipespec has)",
    )
    command.add_argument(
        "--concurrency",
        metavar="N",
        help="requests handed in and not yet finished, at most; the next is handed in when one "
        "finishes (1; with a rate: any number)",
    )
    command.add_argument(
        "--request-rate",
        metavar="R",
        help="requests handed in per second, at random moments (Poisson), as far as --concurrency "
        "allows; of the emulated machine's seconds, if there is one (inf: each at once)",
    )
    command.add_argument("--arrival-seed", metavar="N", help="the seed of these random moments (0)")
    command.add_argument(
        "--num-prompts", metavar="N", help="take so many, at equal distances from all (all)"
    )
    command.add_argument(
        "--prompt-tokens", metavar="N", help="cut every prompt to so many tokens (uncut)"
    )
    command.add_argument(
        "--output", metavar="FILE", help="write the figures and every request to a JSON file"
    )
    add_on(command)
    finish(command, run, starts=True)


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Decode a data set and print what was measured."""
    ours, settings = split(overrides(rest, arguments.known_options))
    for name in NAMES:
        value = getattr(arguments, name)
        if value is not None and name in ours:
            option = "--" + name.replace("_", "-")
            raise ConfigError(f"{name} is given twice, as {option} and as a setting; give it once.")
        if value is not None:
            ours[name] = value
    load: dict[str, Any] = {
        "concurrency": number(ours, "concurrency"),
        "request_rate": _rate(ours),
        "arrival_seed": number(ours, "arrival_seed", 0, MAX_SEED) or 0,
    }
    Load.of(**load)  # what is wrong is said before anything is read
    prompt_tokens = number(ours, "prompt_tokens")
    where = dataset.chosen(ours.get("dataset"))
    samples = dataset.load(where, number(ours, "num_prompts"))
    if arguments.output is not None:
        check_new_file("--output", arguments.output)

    result, inherited = measured(samples, settings, arguments.on, load, prompt_tokens)
    figures = {
        **result.summary(),
        "dataset": str(where),
        "prompt_tokens": prompt_tokens,
        "settings": list(map(masked, [*inherited, *settings])),
        "benchmarks": result.by_benchmark(),
    }
    if arguments.output is not None:
        requests = [asdict(request) for request in result.requests]
        text = json.dumps(figures | {"requests": requests}, allow_nan=False)
        store(arguments.output, text + "\n")
    if arguments.json:
        write(json.dumps(figures, allow_nan=False) + "\n")
    else:
        print_figures(result)
    return 0


def measured(
    samples: Sequence[dataset.Sample],
    settings: list[str],
    on: str | None,
    load: dict[str, Any],
    prompt_tokens: int | None,
) -> tuple[BenchResult, tuple[str, ...]]:
    """Decode a data set on the running cluster of that name, or on one of its own; the settings
    that the running one was started with. `load` are arguments of `arrivals.Load.of`."""
    if on is not None:
        from pipespec.client import registry
        from pipespec.client.request_settings import RequestSettings
        from pipespec.client.sync_client import attach
        from pipespec.instruments.bench.measurement import bench_on

        running = registry.find(on)
        chosen = RequestSettings.on(running, settings)
        with attach(running) as client, progress("decoding") as (on_done,):
            result = bench_on(
                client,
                chosen,
                samples,
                **load,
                prompt_tokens=prompt_tokens,
                on_done=on_done,
            )
        return result, running.overrides

    from pipespec.config.compose import compose

    config = compose(settings)

    from pipespec.instruments.bench.measurement import bench

    with progress("loading", "decoding") as (on_loaded, on_done):
        result = bench(
            config,
            samples,
            **load,
            prompt_tokens=prompt_tokens,
            on_done=on_done,
            on_loaded=on_loaded,
        )
    return result, ()


# --- settings of the bench itself -------------------------------------------------------------

NAMES = (
    "dataset",
    "concurrency",
    "request_rate",
    "arrival_seed",
    "num_prompts",
    "prompt_tokens",
)


def split(texts: Sequence[str], names: Sequence[str] = NAMES) -> tuple[dict[str, str], list[str]]:
    """Settings of the command itself, by name, and those of the run. Raises ConfigError."""
    ours: dict[str, str] = {}
    others = []
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or name not in names:
            others.append(text)
            continue
        if name in ours:
            raise ConfigError(f"{name} is given twice; give it once.")
        if not value:
            raise ConfigError(f"{name} has no value; write {name}=VALUE.")
        ours[name] = value
    return ours, others


def number(ours: dict[str, str], name: str, least: int = 1, most: int = MAX_COUNT) -> int | None:
    """The value of a setting that is a whole number, if it is given. Raises ConfigError."""
    text = ours.get(name)
    if text is None:
        return None
    # `int` refuses a text of thousands of digits, and so does the sentence about it.
    value = int(text) if re.fullmatch(r"[+-]?[0-9]{1,18}", text) else text
    check_whole(name, value, least, most)
    return int(value)


def _rate(ours: dict[str, str]) -> float | None:
    """The requests per second, if they are given. Raises ConfigError."""
    text = ours.get("request_rate")
    if text is None:
        return None
    plain = r"[+-]?([0-9]{1,18}(\.[0-9]{0,18})?|\.[0-9]{1,18})(e[+-]?[0-9]{1,2})?|inf"
    value = float(text) if re.fullmatch(plain, text) else text
    check_rate(value)
    return float(value)


# --- what comes out ---------------------------------------------------------------------------


def store(file: str, text: str) -> None:
    """Write what was measured. Raises PipespecError."""
    try:
        Path(file).write_text(text, encoding="utf-8")
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
    for key, name in FIGURES.items():
        if key != "overruns" or figures["emulated"]:
            brought.add_row(name, shown(figures[key]))
    rows = result.by_benchmark()
    headings = ("requests", "tokens", "TTFT ms", "TBT ms", "tok/step", "hit rate", "tok/verdict")
    each = table_of(f"Means of each benchmark{label}", "benchmark", *headings)
    for row in rows:
        each.add_row(*map(shown, row.values()))
    show(summary, latencies, brought, each)
