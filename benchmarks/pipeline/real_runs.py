"""The default policy beside simple ones, without emulation: real ranks on this machine's cores.

    python -m benchmarks.pipeline.real_runs --json FILE
    python -m benchmarks.pipeline.real_runs --stages 1,2 --models TARGET.gguf:DRAFT.gguf \
        --proposers draft_model,suffix,hybrid --json FILE

For each pair of models, proposer and number of stages one cluster decodes the same prompt by every
policy in turn, `--repeats` times over. Measured ms a token are those after the first `--warm-up`
tokens of an answer, the median of the repeats. `over_best` is the default's time as a multiple of
the best simple policy's; `over_member`, with `hybrid`, as one of the better of its members'.
Answers are compared token for token.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from statistics import median
from typing import Any

from benchmarks.common import experiment, run_options
from pipespec.extras.bench import dataset
from pipespec.extras.bench.comparison import composed
from pipespec.extras.bench.measurement import started

DEFAULT = "policy=best_first"
DEMO = f"{run_options.TARGET}:{run_options.DEMO / 'draft'}"
PROMPT_TOKENS = 256


def main() -> None:
    parser = experiment.parser(__doc__)
    parser.add_argument("--models", type=experiment.names, default=[DEMO], help="TARGET:DRAFT,...")
    parser.add_argument("--proposers", type=experiment.names, default=["draft_model"])
    parser.add_argument("--stages", type=experiment.numbers, default=[1, 2, 4, 8])
    parser.add_argument("--widths", type=experiment.numbers, default=[4, 16, 64], help="of level")
    parser.add_argument("--tokens", type=int, default=300, help="of an answer")
    parser.add_argument("--warm-up", type=int, default=100, help="tokens that are left out")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=0, help="which of the prompts")
    parser.add_argument("settings", nargs="*", default=[], help="further settings")
    options = experiment.parse(parser, stages=[1], tokens=24, warm_up=8, repeats=1, widths=[4])
    levels = [f"policy=level policy.width={width}" for width in options.widths]
    policies = [DEFAULT, "policy=root", "policy=static_tree", *levels]
    rows: list[dict[str, Any]] = []
    for models in options.models:
        for stages in options.stages:
            for proposer in options.proposers:
                rows += cells(options, policies, models, proposer, stages)
    members = defaultdict(list)
    for row in rows:
        if row["policy"] == DEFAULT:
            members[row["target"], row["stages"]].append(row)
    for of_cell in members.values():
        ms = {row["proposer"]: row["ms_per_token"] for row in of_cell}
        if (own := ms.pop("hybrid", None)) and ms:
            of_cell[-1]["over_member"] = own / min(ms.values())
    experiment.publish(options, "measured ms a token, without emulation", rows)


def cells(
    options: argparse.Namespace, policies: list[str], models: str, proposer: str, stages: int
) -> list[dict[str, Any]]:
    """The rows of one cluster, one for each policy."""
    target, _, draft = models.partition(":")
    named = [f"model.draft={draft}"] if draft and proposer != "suffix" else []
    config = composed(
        [
            *(f"model.target={target}", *named, f"proposer={proposer}"),
            *(f"cluster.stages={stages}", f"decode.max_new_tokens={options.tokens}"),
            *("decode.ignore_eos=true", *options.settings),
        ],
        policies,
    )
    samples = dataset.load(run_options.DATA, options.prompt + 1)[options.prompt :]
    runs = defaultdict(list)
    with started(config, samples, PROMPT_TOKENS, 1, lambda ranks, of: None) as run:
        for _ in range(options.repeats):
            for policy in policies:
                runs[policy].append(run.measure(policy=policy, fresh_seed=0))
    rows: list[dict[str, Any]] = []
    for policy, results in runs.items():
        took = [later_ms(result.requests[0].token_ms, options.warm_up) for result in results]
        figures = results[took.index(sorted(took)[len(took) // 2])].summary()
        rows.append(
            {
                "target": target.rpartition("/")[2],
                "proposer": proposer,
                "stages": stages,
                "policy": policy,
                "ms_per_token": median(took),
                "runs": took,
                **{name: figures[name] for name in ("tokens_per_step", "rows_per_step")},
                "answers_differ": any(
                    result.requests[0].token_ids != runs[DEFAULT][0].requests[0].token_ids
                    for result in results
                ),
            }
        )
    rows[0]["over_best"] = rows[0]["ms_per_token"] / min(row["ms_per_token"] for row in rows[1:])
    for row in rows:
        print({name: row[name] for name in row if name != "target"}, flush=True)
    return rows


def later_ms(token_ms: list[float], warm_up: int) -> float:
    """Milliseconds a token after the first `warm_up`, by the times at which tokens arrived."""
    later = token_ms[warm_up:]
    return (later[-1] - later[0]) / (len(later) - 1)


if __name__ == "__main__":
    main()
