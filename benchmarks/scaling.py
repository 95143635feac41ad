"""One model over more and more stages: PipeDec's section 4.3.2.

    python -m benchmarks.scaling --json benchmarks/results/scaling.json \\
        --plot benchmarks/results/scaling

The whole model takes the same time however it is cut, so a plain pipeline gains nothing from
more stages, and guesses gain more the more stages there are to fill. The demo target has 16
layers; for more stages it is inflated by layers that change nothing (`benchmarks.inflate`).
EMULATED; by default everything three times slower (`--scale`), because 22 ranks share few cores.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks import emulated, inflate
from benchmarks.emulated import Ran
from benchmarks.report import publish_table
from benchmarks.tbt import ALL, table
from pipespec.system.resources import resource_dir

TARGET = resource_dir("demo") / "target"
# Of the whole model: plain pipeline parallelism of a 70B over RTX 3090, as in SpecPipe.
MODEL_MS = 302.4
# Of the plain pipeline, whose tokens all take the same time.
ROOT_PROMPTS, ROOT_TOKENS = 1, 6


def stage_ms(stages: int, model_ms: float = MODEL_MS) -> float:
    """A stage's share of the model's time."""
    return model_ms / stages


def target(stages: int, folder: Path) -> list[str]:
    """The overrides that name a model with a layer for every stage; inflated if need be."""
    shape = inflate.Shape.of(inflate.read_config(TARGET))
    if stages <= shape.layers:
        return []
    larger = folder / f"target_{stages}"
    if not larger.exists():
        new = shape.grow(shape.hidden, stages, shape.intermediate)
        inflate.write(TARGET, larger, new, torch.float32)
    return [f"model.target={larger}"]


def draw(title: str, note: str, rows: list[dict[str, Any]], path: Path) -> None:
    from benchmarks import plot

    methods = list(dict.fromkeys(row["method"] for row in rows))

    def of(figure: str) -> dict[str, list[tuple[float, float]]]:
        return {m: [(r["stages"], r[figure]) for r in rows if r["method"] == m] for m in methods}

    with plot.figure(path, title, columns=2, size=(8.4, 3.5), note=note) as (left, right):
        ideal = [(row["stages"], row["model_ms"]) for row in rows if row["method"] == "root"]
        plot.lines(
            left,
            of("tbt_ms") | {"the model alone": ideal},
            xlabel="stages",
            ylabel="time between tokens, ms",
            colours=plot.METHODS,
            dashed=["the model alone"],
        )
        plot.lines(
            right,
            of("speed_up"),
            xlabel="stages",
            ylabel="speed-up over root",
            colours=plot.METHODS,
            legend=False,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    emulated.add_output(parser)
    emulated.add_draft(parser)
    emulated.add_prompts(parser, prompts=4, tokens=16, prompt_tokens=48)
    parser.add_argument("--stages", type=emulated.numbers, default=[1, 2, 4, 8, 14, 16, 21])
    parser.add_argument("--methods", type=emulated.names, default=["root", "best_first"])
    parser.add_argument("--model-ms", type=float, default=MODEL_MS, help=f"({MODEL_MS})")
    parser.add_argument("--draft-ms", type=float, default=17.0, help="a draft round (17)")
    parser.add_argument("--scale", type=float, default=3.0, help="emulate so much slower (3)")
    parser.add_argument("--sync", default="lockstep", help="lockstep or free (lockstep)")
    parser.add_argument("--width", type=int, default=32, help="(32)")
    parser.add_argument("--children", type=int, default=16, help="(16)")
    options = parser.parse_args()
    if options.quick:
        options.stages, options.num_prompts, options.tokens = [1, 4, 16], 2, 10
    if options.methods[0] != "root":
        parser.error("--methods must begin with root, with which the others are compared.")

    prompts = emulated.samples(options)
    rows: list[dict[str, Any]] = []
    done: dict[str, Ran] = {}
    differing: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        truth = emulated.record(options, folder, prompts)
        for stages in options.stages:
            runs: dict[str, Ran] = {}
            for method in options.methods:
                tokens = min(options.tokens, ROOT_TOKENS) if method == "root" else options.tokens
                runs[method] = emulated.run(
                    f"{stages} stages, {method}",
                    [
                        *target(stages, folder),
                        f"cluster.stages={stages}",
                        "cluster.devices=[cpu]",
                        f"cluster.sync={options.sync}",
                        "pace=fixed",
                        f"pace.stage_ms={stage_ms(stages, options.model_ms):.6g}",
                        f"pace.draft_ms={options.draft_ms:g}",
                        f"pace.scale={options.scale:g}",
                        *emulated.draft(options, truth),
                        *emulated.method(method, options.width, options.children),
                        f"decode.max_new_tokens={tokens}",
                        "decode.ignore_eos=true",
                    ],
                    prompts[:ROOT_PROMPTS] if method == "root" else prompts,
                    prompt_tokens=options.prompt_tokens,
                    temporary=[folder],
                )
                done[f"{stages} stages, {method}"] = runs[method]
            for row in table(runs):
                if row["data_set"] == ALL:
                    del row["data_set"]
                    pace = stage_ms(stages, options.model_ms)
                    rows.append(
                        {"stages": stages, "stage_ms": pace, "model_ms": options.model_ms} | row
                    )
            # However the model is cut, it says the same.
            first = done[f"{options.stages[0]} stages, {options.methods[-1]}"]
            for method, ran in runs.items():
                differing[f"{stages} stages, {method}"] = ran.differing(first)
    synthetic = f", SYNTHETIC draft ({options.curve})" if options.source == "synthetic" else ""
    title = (
        f"EMULATED{synthetic}: one model of {options.model_ms:g} ms over 1 to "
        f"{max(options.stages)} stages, width {options.width}"
    )
    note = (
        f"Draft round {options.draft_ms:g} ms; emulated {options.scale:g} times slower; "
        f"{len(prompts)} prompts × {options.tokens} tokens, {options.sync}."
    )
    publish_table(
        title,
        rows,
        path=options.json,
        note=note,
        differing_answers=differing,
        overrides={name: ran.given for name, ran in done.items()},
        settings={name: ran.settings for name, ran in done.items()},
    )
    if options.plot:
        draw(title, note, rows, options.plot)
    if any(differing.values()):
        sys.exit(f"Answers differ: {differing}.")
    print("The answers are equal, token for token, whatever the stages and the method.")


if __name__ == "__main__":
    main()
