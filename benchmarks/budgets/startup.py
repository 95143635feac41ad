"""From the command to the first token, and where that time goes.

    python -m benchmarks.budgets.startup [--stages 1,2,4,8] [--repeats 3] [--quick] [--json FILE]

`imports` is the yardstick: the time of Python for `import torch, transformers` and the class of the
model. `generate` is a whole command with the demo pair on this machine, the page cache and
pipespec's own cache warm: from its start to the first piece of text, and to its end. `--on` uses a
running cluster: the whole command without the time of decoding its tokens.

The phases are those of one process that does the same as `generate`, in milliseconds from its
start: read (settings and checkpoints are known), agents (their processes run), tokenizer (the
prompt is encoded), asked (Redis runs, the ranks have their configuration), loaded (every rank has
its weights), first (the first token), finished, ended (no process is left). Medians.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.common import experiment

PROMPT = "Once upon a time there was a little girl who"
TOKENS = 16
IMPORTS = "import torch, transformers; from transformers import LlamaForCausalLM"
NAME = "startup"


def seconds(run: Callable[[], object]) -> float:
    began = time.monotonic()
    run()
    return time.monotonic() - began


def python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]


def command(*arguments: str) -> list[str]:
    return python("-m", "pipespec", *arguments)


def run_command(argv: Sequence[str]) -> str:
    """The output of a command. Ends the benchmark if it fails."""
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(argv)} failed: {done.stderr}")
    return done.stdout


def time_generate(stages: int) -> tuple[float, float]:
    """Seconds from the start of `generate` to its first text and to its end."""
    settings = (f"cluster.stages={stages}", f"decode.max_new_tokens={TOKENS}")
    began = time.monotonic()
    with subprocess.Popen(
        command("generate", "--prompt", PROMPT, *settings),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        first = time.monotonic() - began
        process.stdout.read()
    if process.returncode:
        raise SystemExit(f"generate with {stages} stages failed.")
    return first, time.monotonic() - began


def seconds_on_running_cluster() -> float:
    """Seconds of `generate --on` beyond the decoding of its tokens."""
    argv = command("generate", "--on", NAME, "--json", "--prompt", PROMPT)
    began = time.monotonic()
    stats = json.loads(run_command(argv))["stats"]
    whole = time.monotonic() - began
    later = (TOKENS - 1) * (stats["tbt_ms"] or {"mean": 0.0})["mean"]
    return whole - (stats["ttft_ms"] + later) / 1e3


# --- phases -----------------------------------------------------------------------------------


def phases(stages: int) -> dict[str, float]:
    """Milliseconds from the start of a process to the end of each phase."""
    began = time.time()
    ends = json.loads(
        run_command(python("-m", "benchmarks.budgets.startup", "--phases-of", str(stages)))
    )
    return {name: (at - began) * 1e3 for name, at in ends.items()}


def run_phases(stages: int) -> dict[str, float]:
    """Do the same as `generate`; the end of each part, in seconds since 1970."""
    from pipespec.client import answers as client
    from pipespec.client.local_cluster import asking
    from pipespec.client.model_info import ModelInfo
    from pipespec.client.request_settings import RequestSettings
    from pipespec.cluster import session
    from pipespec.cluster.decide import decide
    from pipespec.cluster.deployment.deployment import fit_context
    from pipespec.config.compose import compose

    at: dict[str, float] = {}

    def mark(name: str) -> None:
        at.setdefault(name, time.time())

    def loaded(ranks: int, of: int) -> None:
        mark("asked")
        if ranks == of:
            mark("loaded")

    config = compose([f"cluster.stages={stages}", f"decode.max_new_tokens={TOKENS}"])
    deployment = decide(config)
    mark("read")
    with session.start_agents(deployment) as agents:
        mark("agents")
        served = ModelInfo.of(deployment)
        prompt = served.encode(PROMPT)
        mark("tokenizer")
        fitted = fit_context(deployment, len(prompt), requests=1)
        with (
            session.start_cluster(fitted, agents, loaded) as cluster,
            asking(cluster, served) as asker,
        ):
            settings = RequestSettings.of(config)
            client.ask(asker, settings, prompt, lambda piece: mark("first") if piece else None)
            mark("finished")
    mark("ended")
    return at


# --- the command ------------------------------------------------------------------------------


def main() -> None:
    parser = experiment.parser(__doc__)
    parser.add_argument("--stages", type=experiment.numbers, default=[1, 2, 4, 8])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--phases-of", type=int, help="run the phases once and print them as JSON")
    options = experiment.parse(parser, stages=[1], repeats=1)
    if options.phases_of:
        print(json.dumps(run_phases(options.phases_of)))
        return
    rows: list[dict[str, Any]] = []
    yardstick: list[float] = []
    times: dict[int, list[tuple[float, float]]] = {stages: [] for stages in options.stages}
    run_command(python("-c", IMPORTS))
    time_generate(options.stages[0])  # warms the caches
    for _ in range(options.repeats):  # in turns, as the machine's speed changes
        yardstick.append(seconds(lambda: run_command(python("-c", IMPORTS))))
        for stages in options.stages:
            times[stages].append(time_generate(stages))
    imports = statistics.median(yardstick)
    rows.append({"what": "imports", "first_s": imports, "ratio": 1.0, "whole_s": imports})
    for stages, found in times.items():
        first, whole = (statistics.median(part) for part in zip(*found, strict=True))
        rows.append(
            {
                "what": f"generate, {stages} stages",
                "first_s": first,
                "ratio": first / imports,
                "whole_s": whole,
            }
        )
    rows.append(
        {
            "what": "generate --on, without decoding",
            **row_on_running_cluster(options.repeats, imports),
        }
    )
    where = [
        {"stages": stages, **{name: round(ms) for name, ms in phases(stages).items()}}
        for stages in options.stages
    ]
    experiment.show("Phases, ms from the start of the process", where)
    experiment.publish(options, "From the command to the first token", rows, phases_ms=where)


def row_on_running_cluster(repeats: int, imports: float) -> dict[str, float]:
    """The row of a running cluster."""
    with tempfile.TemporaryDirectory() as state:
        os.environ["XDG_STATE_HOME"] = state
        run_command(command("up", "--detach", "--name", NAME, f"decode.max_new_tokens={TOKENS}"))
        try:
            found = statistics.median([seconds_on_running_cluster() for _ in range(repeats)])
        finally:
            run_command(command("down", NAME))
    return {"first_s": found, "ratio": found / imports, "whole_s": found}


if __name__ == "__main__":
    main()
