"""How often the target's token is among a draft's k best, per data set: SpecPipe's Figure 7.

    python -m benchmarks.drafts.accuracy_curves --json benchmarks/results/curves.json
    python -m benchmarks.drafts.accuracy_curves --target QWEN_1.5B.gguf --draft QWEN_0.5B.gguf \\
        --chat --prompt-tokens 512 --tokens 96 --json benchmarks/results/curves_real.json

Of the demo pair unless another one is named. With `--chat` prompts are messages in the template of
the target, and answers end where it ends them.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.common import comparison, experiment, run_options
from benchmarks.common.comparison import ALL
from pipespec.cluster.decide import decide
from pipespec.config.compose import compose
from pipespec.engine.checkpoint import tokenizer
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
    parser.add_argument("--target", type=Path, default=run_options.TARGET, help="(the demo's)")
    parser.add_argument("--draft", type=Path, default=run_options.DRAFT, help="(the demo's)")
    parser.add_argument("--chat", action="store_true", help="prompts are messages of a chat")
    options = experiment.parse(parser, num_prompts=8, tokens=32)

    pair = [f"model.{name}={vars(options)[name].resolve()}" for name in ("target", "draft")]
    samples = run_options.samples(options)
    answer = run_options.answer(options.tokens)
    if options.chat:
        encoder = tokenizer.load(options.target)
        samples = [run_options.as_chat(sample, encoder) for sample in samples]
        answer = [f"decode.max_new_tokens={options.tokens}"]
    plain = ["cluster.stages=1", "cluster.devices=[cpu]", "policy=root", "proposer=suffix"]
    case_run = comparison.run(
        "the target's answers",
        [*plain, pair[0], *answer],
        samples,
        prompt_tokens=options.prompt_tokens,
        temporary=[options.target.resolve().parent],
    )
    whole = read_answers(decide(compose(pair)), case_run.requests, RANKS)
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
        f"Accuracy of {options.draft.stem} before {options.target.stem}, "
        f"{len(case_run.requests)} prompts × {options.tokens} greedy tokens"
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
