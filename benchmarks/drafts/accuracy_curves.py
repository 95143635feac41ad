"""How often the target's token is among a draft's k best, per data set: SpecPipe's Figure 7.

python -m benchmarks.drafts.accuracy_curves --json benchmarks/results/curves.json
"""

from __future__ import annotations

from benchmarks.common import comparison, experiment, run_options
from benchmarks.common.comparison import ALL
from pipespec.cluster.decide import decide
from pipespec.config.compose import compose
from pipespec.extras.bench.profiling import read_answers
from pipespec.extras.emulation.synthetic_proposer import Accuracy
from pipespec.extras.plan.pipeline_times import DraftRecord

SHOWN = (1, 2, 4, 8, 16)
RANKS = 16  # whose hit rate is measured


def curve(record: DraftRecord) -> list[tuple[int, float]]:
    """(k, share of tokens among the k best), k from 1."""
    return [*Accuracy.parse(record.curve(), record.spread()).curve.items()]


def main() -> None:
    parser = experiment.parser(__doc__)
    run_options.add_prompts(parser, prompts=48, tokens=64, prompt_tokens=128)
    options = experiment.parse(parser, num_prompts=8, tokens=32)

    plain = ["cluster.stages=1", "cluster.devices=[cpu]", "policy=root", "proposer=suffix"]
    case_run = comparison.run(
        "the target's answers",
        [*plain, *run_options.answer(options.tokens)],
        run_options.samples(options),
        prompt_tokens=options.prompt_tokens,
    )
    whole = read_answers(decide(compose()), case_run.requests, RANKS)
    records = {
        name: DraftRecord([text for text in whole.texts if name in (text.benchmark, ALL)])
        for name in dict.fromkeys([*(text.benchmark for text in whole.texts), ALL])
    }
    rows = []
    for name, record in records.items():
        found = dict(curve(record))
        rows.append(
            {
                "data_set": run_options.short(name),
                "tokens": sum(len(text.ranks) for text in record.texts),
            }
            | {f"top_{k}": found[k] for k in SHOWN}
            | {"confidence": record.confidence(), "spread": record.spread()}
        )
    title = (
        f"Draft accuracy of the demo pair, {len(case_run.requests)} prompts × "
        f"{options.tokens} greedy tokens"
    )
    curves = {name: curve(record) for name, record in records.items()}
    experiment.publish(
        options,
        title,
        rows,
        curves=curves,
        overrides=case_run.overrides,
        settings=case_run.settings,
    )


if __name__ == "__main__":
    main()
