"""`pipespec generate`: decode one prompt."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict

from rich.table import Table

from pipespec.cli.cache import checked, with_weights
from pipespec.client import registry
from pipespec.client.answers import Result, ask, write_trace
from pipespec.client.local_cluster import asking
from pipespec.client.model_info import CHARACTERS, ModelInfo
from pipespec.client.request_settings import RequestSettings
from pipespec.client.sync_client import attach
from pipespec.cluster import session
from pipespec.cluster.decide import decide, require_room
from pipespec.cluster.deployment.checks import loading
from pipespec.cluster.deployment.deployment import fit_context
from pipespec.config.compose import compose
from pipespec.console.arguments import STDIN, AddParser, add_on, finish, overrides
from pipespec.console.terminal import labelled, progress, show, shown, standard_input, write
from pipespec.controller.cluster_status import read_status
from pipespec.errors import PromptError, Unreachable
from pipespec.system.validation import is_whole, read_text, readable

# Statistics that say what they are by more than their name.
LABELS = {
    "cached_tokens": "tokens of the prompt found in KV",
    "ttft_ms": "time to first token (ms)",
    "tbt_ms": "time between tokens (ms)",
    "tokens_per_s": "tokens per second",
    "control_ms_per_step": "controller per step (ms)",
    "features_ms_per_step": "waiting for features per step (ms)",
    "stage_busy": "share of time each stage computed",
}


def add(add_parser: AddParser) -> None:
    command = add_parser(
        show_settings=True,
        usage="pipespec generate (--prompt TEXT | --prompt-file FILE | -) [--chat] [--on NAME] "
        "[--stats] [--json] [MODEL] [SETTING=VALUE ...]",
        description="Decode one prompt: the text as it comes, then a line of figures.",
    )
    command.add_argument("--prompt", metavar="TEXT", help="the prompt")
    command.add_argument(
        "--prompt-file", metavar="FILE", help="a UTF-8 file, taken as it is; - is standard input"
    )
    command.add_argument(
        "--chat", action="store_true", help="wrap the prompt in the tokenizer's chat template"
    )
    command.add_argument(
        "--stats", action="store_true", help="print all statistics (docs/statistics.md)"
    )
    add_on(command)
    finish(command, run)


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    settings = overrides(rest, arguments.known_options, stdin_allowed=True)
    prompt = read_prompt(arguments.prompt, arguments.prompt_file, from_stdin=STDIN in rest)
    if arguments.chat:
        settings.append("decode.chat=true")

    result, fault = decode(
        prompt, settings, arguments.on, (lambda _: None) if arguments.json else write
    )
    if arguments.json:
        write(json.dumps(asdict(result), allow_nan=False) + "\n")
    else:
        write("\n")
        print_statistics(result, fault, full=arguments.stats)
    return 0


def read_prompt(text: str | None, file: str | None, *, from_stdin: bool) -> str:
    """The prompt from the one place where it was given. Raises PromptError."""
    if (text is not None) + (file is not None) + from_stdin != 1:
        raise PromptError(
            "Pass the prompt in one way: --prompt TEXT, --prompt-file FILE or - (standard input)."
        )
    if text is None:
        source = "Standard input" if file in (None, STDIN) else f"The file {file!r}"
        with readable(f"{source} cannot be read", "pass --prompt TEXT", PromptError):
            text = standard_input() if file in (None, STDIN) else read_text(file or "", pipe=True)
    if not text:
        raise PromptError("The prompt is empty; pass at least one character.")
    if not is_whole(text):
        raise PromptError("The prompt is not UTF-8 text; save it as UTF-8 and pass --prompt-file.")
    return text


def decode(
    prompt: str, settings: list[str], on: str | None, on_text: Callable[[str], None]
) -> tuple[Result, str | None]:
    """Decode a prompt on the running cluster of that name, or on one that is started for it and
    ended after it; also the last fault for which it waited. Raises ConfigError, Unreachable before
    any rank starts; RankFailed if one died: the others have been ended."""
    if on is not None:
        running = registry.find(on)
        chosen = RequestSettings.on(running, settings)
        ids = running.served.encode(prompt, chat=chosen.decode.chat)
        with attach(running) as client:
            before = last_fault(running.url, running.namespace)
            result, _ = ask(client, chosen, ids, on_text)
            after = last_fault(running.url, running.namespace)
        return result, None if after == before else after

    config = compose(settings)
    require_room(config)
    deployment = checked(decide(config), stays=False)
    chosen = RequestSettings.of(deployment.config)
    if len(prompt) > CHARACTERS * deployment.context:
        # Almost surely too long: it is refused before anything starts.
        ModelInfo.of(deployment).encode(prompt, chat=chosen.decode.chat)
    deployment = with_weights(deployment)

    with (
        progress(loading(deployment), of_bytes=True) as (on_loaded,),
        session.start_agents(deployment) as agents,
    ):
        served = ModelInfo.of(deployment)
        ids = served.encode(prompt, chat=chosen.decode.chat)
        deployment = fit_context(deployment, len(ids), requests=1)
        with (
            session.start_cluster(deployment, agents, on_loaded) as cluster,
            asking(cluster, served) as client,
        ):
            result, reports = ask(client, chosen, ids, on_text)
            fault = last_fault(cluster.url, cluster.namespace) if cluster.faults else None
    write_trace(deployment, reports)
    return result, fault


def last_fault(url: str, namespace: str) -> str | None:
    """When and why an epoch of a cluster ended last; None: none has, or its Redis is away."""
    with suppress(Unreachable):
        if (status := read_status(url, namespace)) is not None:
            return status.last_fault
    return None


def print_statistics(result: Result, fault: str | None = None, *, full: bool = False) -> None:
    stats = result.stats
    summary = (
        f"{result.completion_tokens} tokens after {result.prompt_tokens} of the prompt, "
        f"ended by {result.finish_reason}{labelled(stats)}"
    )
    waited = "" if fault is None else f"; it stood still after the fault of {fault.rstrip('.')}"
    if not full:
        if stats["tokens_per_step"] is not None:  # there was more than one token
            summary += (
                f": {stats['tbt_ms']['mean']:.1f} ms per token, {stats['tokens_per_step']:.2f} "
                f"tokens per step, {stats['hit_rate']:.0%} of the tokens were accepted draft tokens"
            )
        show(f"{summary}{waited}.", stderr=True)
        return
    table = Table("", "", title=summary + waited, show_header=False, title_justify="left")
    for name, value in stats.items():
        if name == "overruns" and not stats["emulated"]:
            continue  # of the emulated machine
        table.add_row(LABELS.get(name, name.replace("_", " ")), shown(value))
    show(table, stderr=True)
