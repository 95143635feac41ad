"""Hugging Face `generate`, and the types of every engine's input and output;
`benchmarks.peers.server_engines` has the other engines."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from pipespec.errors import PipespecError
from pipespec.extras.bench.dataset import Sample
from pipespec.system.device_copy import make_current


class PeerFailed(PipespecError):
    """An engine ended, or said nothing sensible."""


@dataclass(frozen=True)
class Job:
    """What every engine does.

    Attributes:
        target, draft: folders of checkpoints, or GGUF files; None: there is no draft.
        samples: the prompts, of which the first is for warming up; their `benchmark` is the kind
            of prompt, by which figures are told apart.
        prompts: their token ids.
        prompt_tokens: of a prompt at most.
        tokens: of an answer at most.
        dtype: of weights and KV; None: as the files and each engine have it.
        device: as torch names it.
        temperature, concurrency: of pipespec alone: how tokens are drawn, 0: not at all, and
            requests at a time.
        cache: the folder in which pipespec keeps what it learns; None: the user's.
    """

    target: Path
    draft: Path | None
    samples: list[Sample]
    prompts: list[list[int]]
    prompt_tokens: int
    tokens: int
    cores: list[int]
    dtype: str | None
    device: str = "cpu"
    temperature: float = 0.0
    concurrency: int = 1
    cache: Path | None = None


@dataclass(frozen=True)
class Answer:
    """One answer: its token ids, and the milliseconds until the first and the last of them."""

    tokens: list[int]
    first_ms: float
    last_ms: float


@dataclass(frozen=True)
class Run:
    """One engine, once.

    Attributes:
        load_s: seconds until it could take a prompt.
        answers: one per prompt.
        tokens_per_step: that each pass over the target, or each step of the pipeline, decided;
            None: the engine does not say.
        memory_mib: of all processes of the engine together behind the last answer, a page that
            several of them map once; None: it was not read.
    """

    load_s: float
    answers: list[Answer]
    tokens_per_step: float | None = None
    memory_mib: float | None = None

    def of(self, places: Sequence[int]) -> Run:
        """The run with these of its answers, beside the first, which does not count."""
        return replace(self, answers=[self.answers[0], *(self.answers[at] for at in places)])

    @property
    def ttft_ms(self) -> float:
        """The mean over the prompts that count."""
        return statistics.fmean(answer.first_ms for answer in self.answers[1:])

    @property
    def tbt_ms(self) -> float:
        """Per token after the first: tokens weigh alike."""
        counted = self.answers[1:]
        spent = sum(answer.last_ms - answer.first_ms for answer in counted)
        return spent / sum(len(answer.tokens) - 1 for answer in counted)


Engine = Callable[[Job], Run]


# --- Hugging Face -----------------------------------------------------------------------------


class Clock(BaseStreamer):
    """When tokens came, in seconds; several may come at once."""

    def __init__(self) -> None:
        self.arrivals: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.arrivals.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is held back."""


def hugging_face(job: Job, assisted: bool, began: float) -> Run:
    """`generate`, with the draft as `assistant_model` if assisted. Runs in a child that was
    started at `began` of the clock that all processes share.
    """
    assert job.dtype is not None
    torch.set_num_threads(len(job.cores))
    make_current(job.device)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    load = partial(AutoModelForCausalLM.from_pretrained, dtype=getattr(torch, job.dtype))
    model = load(job.target).to(job.device)
    assistant = load(job.draft).to(job.device) if assisted and job.draft else None
    load_s = time.perf_counter() - began
    answers = []
    for prompt in job.prompts:
        ids = torch.tensor([prompt], device=job.device)
        clock = Clock()
        began = time.perf_counter()
        text = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            assistant_model=assistant,
            do_sample=False,
            max_new_tokens=job.tokens,
            streamer=clock,
        )
        _, first, *_, last = [*clock.arrivals, clock.arrivals[-1]]  # the prompt comes first
        ids = text[0, len(prompt) :].tolist()
        answers.append(Answer(ids, (first - began) * 1e3, (last - began) * 1e3))
    return Run(load_s, answers)


def in_child(function: Callable[..., Run], job: Job, **options: Any) -> Run:
    """`function` in a fresh process, which never outlives the call. Raises PeerFailed."""
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    call = partial(function, job, began=time.perf_counter(), **options)
    child = context.Process(target=_send, args=(sender, call), daemon=True)
    child.start()
    sender.close()
    try:
        run: Run = receiver.recv()
        return run
    except EOFError as error:
        raise PeerFailed(f"{function.__name__} ended without an answer; see above.") from error
    finally:
        child.kill()
        child.join()


def _send(sender: Connection, call: Callable[[], Run]) -> None:
    sender.send(call())
