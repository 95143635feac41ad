"""Measures a pair of models on a cluster and a user's prompts, for `pipespec bench --profile`."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import reduce
from itertools import accumulate
from operator import add
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipespec.cluster.decide import decide
from pipespec.cluster.deployment.deployment import Deployment
from pipespec.cluster.diagnostics.measure_hosts import measure_hosts
from pipespec.config.compose import compose
from pipespec.config.hosts import load_hosts
from pipespec.config.schema import Config
from pipespec.core import Batch, Verdict
from pipespec.engine.precision import ITEM_BYTES
from pipespec.engine.slice.model_slice import ModelSlice
from pipespec.engine.slice.runner import SliceRunner
from pipespec.errors import ConfigError
from pipespec.extras.bench.dataset import Sample
from pipespec.extras.bench.figures import BenchResult, RequestResult
from pipespec.extras.bench.measurement import bench
from pipespec.extras.emulation.link import EmulatedLink
from pipespec.extras.plan.pipeline_times import MISSED, DraftRecord, Profile, TextRecord
from pipespec.extras.plan.simulation import simulate_texts
from pipespec.head.proposer import Context
from pipespec.head.proposers.draft_model import DraftModelConfig
from pipespec.head.proposers.token_map import ProposedTokens, ReadText, token_map
from pipespec.placement.host_figures import Figures
from pipespec.system.devices import num_cuda
from pipespec.system.versions import package_version
from pipespec.timing.batch_times import BatchTimes

# Candidates that are recorded of each token, unless a policy takes more.
CANDIDATES = 16
# Rows of a text that the draft computes at once.
CHUNK = 256
# Digits of the probabilities that are kept.
DIGITS = 4

Progress = Callable[[int, int], None]
# Of what progress is shown, after that of measuring hosts if there are any.
BARS = ("loading", "plain decoding", "speculative decoding", "reading")
NOTHING_SHOWN: Sequence[Progress] = (lambda done, of: None,) * len(BARS)


def profile(
    settings: Sequence[str],
    samples: Sequence[Sample],
    *,
    prompt_tokens: int | None = None,
    shown: Sequence[Progress] = NOTHING_SHOWN,
) -> Profile:
    """Measure a pair; `settings` are those of the cluster, `shown` has what shows the progress of
    BARS. Raises as `bench` does."""
    config = compose(settings)
    check(config)
    *on_host, on_loaded, on_plain, on_speculating, on_read = shown
    figures = None
    if config.cluster.hosts is not None:
        figures = measure_hosts(load_hosts(config.cluster.hosts), config, *on_host)
    plain, speculating = (
        bench(each, samples, prompt_tokens=prompt_tokens, on_loaded=on_loaded, on_done=on_done)
        for each, on_done in ((plain_config(settings), on_plain), (config, on_speculating))
    )
    candidates = max(CANDIDATES, *(each.children for each in config.policies))
    deployment = decide(config)
    record = read_answers(deployment, speculating.requests, candidates, on_read)
    found = combine(config, plain, speculating, record)
    found = replace(found, row_ms=row_ms(deployment, figures))
    if figures is not None:
        found = replace(found, figures=asdict(figures))
    return with_wide_hop(found, config, speculating)


def plain_config(settings: Sequence[str]) -> Config:
    # root drafts nothing, so proposer.overlap=no is refused with it.
    of_draft = ("policy", "proposer.overlap")
    return compose([*(each for each in settings if not each.startswith(of_draft)), "policy=root"])


def check(config: Config) -> None:
    """Raise ConfigError unless the pair can be measured so."""
    wrong = {
        "measures a draft model, but the proposer has none; pass proposer=draft_model": (
            not config.proposer.needs_draft
        ),
        "measures what a draft model proposes by itself; pass proposer=draft_model": (
            type(config.proposer) is not DraftModelConfig
        ),
        "decodes with draft tokens, but this policy schedules one row a step; leave policy out": (
            config.policy.max_rows == 1
        ),
        "measures greedy decoding; leave sampling.temperature out": config.sampling.temperature,
    }
    for what, is_so in wrong.items():
        if is_so:
            raise ConfigError(f"`pipespec bench --profile` {what}.")


def combine(
    config: Config, plain: BenchResult, speculating: BenchResult, record: DraftRecord
) -> Profile:
    """A profile from what was measured, with the hop of one row."""
    before, after = _stage_times(plain), _stage_times(speculating)
    stages = [stage_points(one, wide) for one, wide in zip(before, after, strict=True)]
    count = len(stages)
    plain_ms = plain.summary()["mean_tbt_ms"] or 0.0
    hop_ms = max(plain_ms - sum(points[0][1] for points in stages), 0.0) / count
    of_draft = speculating.requests[-1].stats
    rounds = of_draft["round_times"]
    return Profile(
        stages=count,
        stage_ms=tuple(_texts(points) for points in stages),
        hop_ms=_texts([(1, hop_ms)]),
        draft_ms=_texts(rounds) or (0.0,),
        curve=record.curve(),
        spread=record.spread(),
        slot_ms=tuple(each.slot_ms for each in after),
        slots=tuple(each.slots for each in after),
        overlap=of_draft["overlap"],
        texts=record.texts,
        about={
            "target": str(config.model.target),
            "draft": str(config.model.draft),
            "pipespec": package_version("pipespec"),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "emulated": bool(speculating.labels["emulated"]),
            "confidence": record.confidence(),
            "measured": measured(plain, speculating),
        },
    )


def measured(plain: BenchResult, speculating: BenchResult) -> list[dict[str, Any]]:
    """The times between tokens of the two runs, by benchmark."""
    return [
        {
            "benchmark": one["benchmark"],
            "tokens": one["total_output_tokens"],
            "plain_tbt_ms": one["mean_tbt_ms"],
            "tbt_ms": other["mean_tbt_ms"],
            "tokens_per_step": other["tokens_per_step"],
            "hit_rate": other["hit_rate"],
        }
        for one, other in zip(plain.by_benchmark(), speculating.by_benchmark(), strict=True)
    ]


def stage_points(plain: BatchTimes, wide: BatchTimes) -> list[tuple[int, float]]:
    """The times of one stage by rows, at the context that was measured: of one row from the plain
    run, of more from the other; more rows never take less time."""
    one = next(ms for _, ms in plain.with_slots())
    points = [(1, one), *((rows, ms) for rows, ms in wide.with_slots() if rows > 1)]
    rows, times = zip(*points, strict=True)
    return [*zip(rows, accumulate(times, max), strict=True)]


def with_wide_hop(found: Profile, config: Config, speculating: BenchResult) -> Profile:
    """The profile with the hop of a wide batch: what a step of the speculating run took longer than
    simulation says. It holds what more rows take on links, and what the head does between a verdict
    and the next batch. Over long links a step is as long as the batches that the head had in
    flight made it, and says nothing of a hop."""
    machine = found.machine()
    if len(machine.windows()) > 1:
        return found
    simulated = reduce(
        add, simulate_texts(config.policy, machine, found.texts, rounds=config.proposer.rounds)
    )
    more_ms = step_ms(speculating) - simulated.ms / simulated.steps
    rows = round(simulated.rows / simulated.steps)
    if more_ms <= 0 or rows < 2:
        return found
    hop = machine.hop.ms(1)
    return replace(found, hop_ms=_texts([(1, hop), (rows, hop + more_ms)]))


def row_ms(deployment: Deployment, figures: Figures | None) -> float:
    """What the hidden states of a row take on the slowest link; within a machine, nothing."""
    target, link = deployment.target, deployment.config.emulate_link
    row_bytes = target.hidden_size * ITEM_BYTES[deployment.dtype_of(target)]
    speeds = [each["gbit_s"] for each in figures.links] if figures is not None else []
    if isinstance(link, EmulatedLink) and link.gbit_per_s:
        row_bytes, speeds = link.row_bytes, [link.gbit_per_s]
    return EmulatedLink(gbit_per_s=min(speeds), row_bytes=row_bytes).ms(1) if speeds else 0.0


def step_ms(result: BenchResult) -> float:
    """The mean time of a step between the first and the last token of requests."""
    counted = [
        (request.token_ms[-1] - request.token_ms[0], request.stats["step_ms"])
        for request in result.requests
        if request.stats["step_ms"]
    ]
    return sum(ms for ms, _ in counted) / sum(ms / step for ms, step in counted)


def _stage_times(result: BenchResult) -> list[BatchTimes]:
    return [BatchTimes(**each) for each in result.requests[-1].stats["stage_times"]]


def _texts(points: Sequence[tuple[float, float]]) -> tuple[str, ...]:
    return tuple(f"{rows}:{ms:.5g}" for rows, ms in points)


def read_answers(
    deployment: Deployment,
    requests: Sequence[RequestResult],
    candidates: int,
    on_done: Callable[[int, int], None] = lambda done, of: None,
) -> DraftRecord:
    """What the deployment's draft proposes along answers of its target, `candidates` a token.

    Answers of a single token say nothing and are left out. Raises ConfigError.
    """
    long = [request for request in requests if len(request.token_ids) > 1]
    if not long:
        raise ConfigError(
            "Every answer ended after its first token, so there is nothing to measure; pass other "
            "prompts, or decode.ignore_eos=true."
        )
    info = deployment.draft
    assert info is not None, "the proposer has no draft model"
    tokens = token_map(deployment.target, info)
    read = []
    for request in long:
        ids = [*request.prompt_ids, *request.token_ids]
        context = Context(1, ids, list(range(len(ids))), prompt_len=len(ids))
        read.append(ReadText(context, tokens))
    model = ModelSlice.load(
        info.path,
        range(info.num_layers),
        dtype=getattr(torch, deployment.dtype_of(info)),
        quantization=deployment.weight_format(info),
        device=torch.device("cuda:0" if num_cuda() else "cpu"),
        num_slots=max(len(each.own.tokens) for each in read),
        context=deployment.longest,
    )
    vocabulary = min(deployment.target.vocab_size, info.vocab_size)
    proposed = None if tokens is None else ProposedTokens(tokens)
    texts = []
    for done, (request, text) in enumerate(zip(long, read, strict=True), 1):
        # Rows after which the tokens of the answer come.
        lengths = np.array(text.lengths)
        before = lengths[len(request.prompt_ids) : -1] - 1
        ranks: list[int] = []
        probabilities: list[list[float]] = []
        if proposed is not None:
            proposed.learn(request.prompt_ids)
        for start, logits in _logits(model, text.own):
            rows = before[(before >= start) & (before < start + len(logits))] - start
            for row in rows.tolist():
                decided = request.token_ids[len(ranks)]
                mine = logits[row, :vocabulary]
                if proposed is not None:
                    mine = proposed.logits(logits[row : row + 1])[0]
                top = mine.softmax(-1).topk(min(candidates, len(mine)))
                best = top.indices.numpy()
                if proposed is not None:
                    best = proposed.known[best]
                    proposed.learn([decided])
                found = np.flatnonzero(best == decided)
                ranks.append(int(found[0]) + 1 if len(found) else MISSED)
                probabilities.append(np.round(top.values.double().numpy(), DIGITS).tolist())
        texts.append(TextRecord(request.id, request.benchmark, ranks, probabilities))
        on_done(done, len(long))
    return DraftRecord(texts)


def _logits(model: ModelSlice, context: Context) -> Iterator[tuple[int, Tensor]]:
    """After each token of a text but the last, float32 `[rows, vocab]`, chunk by chunk with the
    position at which it starts."""
    runner = SliceRunner(model, model.num_slots)
    text = context.tokens
    runner.start_sequence(1)
    runner.apply([Verdict(1, 0, tuple(text))])
    for start in range(0, len(text) - 1, CHUNK):
        rows = context.rows(start, min(start + CHUNK, len(text) - 1))
        hidden = runner.compute(Batch(step=0, rows=rows)).hidden
        assert hidden is not None
        yield start, model.logits(hidden).float().cpu()
