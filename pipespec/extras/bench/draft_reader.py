"""Reads answers of a target with its draft: what the draft would have proposed at each token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from pipespec.cluster.deployment.deployment import Deployment
from pipespec.core import Batch, Verdict
from pipespec.engine.slice.model_slice import ModelSlice
from pipespec.engine.slice.runner import SliceRunner
from pipespec.errors import ConfigError
from pipespec.extras.bench.figures import RequestResult
from pipespec.extras.plan.recorded_draft import MISSED, DraftRecord, TextRecord
from pipespec.head.proposer import Context
from pipespec.system.devices import num_cuda

# Rows of a text that the draft computes at once.
CHUNK = 256
# Digits of the probabilities that are kept.
DIGITS = 4


def read_answers(
    deployment: Deployment,
    requests: Sequence[RequestResult],
    candidates: int,
    on_done: Callable[[int, int], None] = lambda done, of: None,
) -> DraftRecord:
    """What the deployment's draft proposes along answers of its target, `candidates` a token.

    Answers of a single token say nothing and are left out. Raises ConfigError.
    """
    read = [request for request in requests if len(request.token_ids) > 1]
    if not read:
        raise ConfigError(
            "Every answer ended after its first token, so there is nothing to measure; pass other "
            "prompts, or decode.ignore_eos=true."
        )
    info = deployment.draft
    assert info is not None, "the proposer has no draft model"
    longest = max(len(request.prompt_ids) + len(request.token_ids) for request in read)
    model = ModelSlice.load(
        info.path,
        range(info.num_layers),
        dtype=getattr(torch, deployment.dtype_of(info)),
        quantization=deployment.weight_format(info),
        device=torch.device("cuda:0" if num_cuda() else "cpu"),
        num_slots=longest,
    )
    vocabulary = min(deployment.target.vocab_size, info.vocab_size)
    texts = []
    for done, request in enumerate(read, 1):
        first, text = len(request.prompt_ids), [*request.prompt_ids, *request.token_ids]
        ranks: list[int] = []
        probabilities: list[list[float]] = []
        for start, logits in _logits(model, text):
            # A row's logits are of the token after it.
            mine = logits[max(first - 1 - start, 0) :, :vocabulary]
            if len(mine):
                top = mine.softmax(-1).topk(min(candidates, vocabulary))
                tokens = np.array(request.token_ids[len(ranks) : len(ranks) + len(mine)])
                found = top.indices.numpy() == tokens[:, None]
                ranks += np.where(found.any(1), found.argmax(1) + 1, MISSED).tolist()
                probabilities += np.round(top.values.double().numpy(), DIGITS).tolist()
        texts.append(TextRecord(request.id, request.benchmark, ranks, probabilities))
        on_done(done, len(read))
    return DraftRecord(texts)


def _logits(model: ModelSlice, text: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """After each token of a text but the last, float32 `[rows, vocab]`, chunk by chunk with the
    position at which it starts."""
    runner = SliceRunner(model, model.num_slots)
    context = Context(1, list(text), list(range(len(text))), prompt_len=len(text))
    runner.start_sequence(1)
    runner.apply([Verdict(1, 0, tuple(text))])
    for start in range(0, len(text) - 1, CHUNK):
        rows = context.rows(start, min(start + CHUNK, len(text) - 1))
        hidden = runner.compute(Batch(step=0, rows=rows)).hidden
        assert hidden is not None
        yield start, model.logits(hidden).float().cpu()
