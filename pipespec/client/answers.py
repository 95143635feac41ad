"""An answer, from the events of its request; what is said of it: statistics, labels, a trace."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipespec.client.model_info import ModelInfo
from pipespec.client.request_settings import RequestSettings
from pipespec.client.sync_client import Client
from pipespec.cluster.deployment.deployment import Deployment
from pipespec.controller.log_records import Accepted, Event, Finished, failure_of
from pipespec.core import SamplingParams, TokenLogprobs
from pipespec.sampling.params import MAX_SEED, MIN_SEED
from pipespec.text import FinalText
from pipespec.timing.batch_times import BatchTimes
from pipespec.timing.clock import monotonic_ns
from pipespec.timing.stats import Report, summarise
from pipespec.timing.trace import write_chrome_trace

# A random seed is short enough to type again, and exact in every JSON parser.
SEED_BITS = 32


def fresh_seed() -> int:
    return secrets.randbits(SEED_BITS)


def seeds_from(first: int, count: int) -> list[int]:
    """Seeds of as many answers that differ; the smallest one follows the largest."""
    span = MAX_SEED - MIN_SEED + 1
    return [MIN_SEED + (first - MIN_SEED + i) % span for i in range(count)]


@dataclass
class Answer:
    """The answer to a request, put together from its events: the pieces of its text before a
    stop string, its tokens, its end. `prompt_logprobs`, if asked for, are those of the
    prompt's tokens from the second on."""

    final_text: FinalText
    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str = ""

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def receive(self, event: Event) -> str:
        """The text that an event makes final. Raises what ends the request without an answer."""
        piece = ""
        if isinstance(event, Accepted):
            self.token_ids += event.tokens
            self.logprobs += event.logprobs
            piece = self.final_text.push(event.tokens)
        elif isinstance(event, Finished):
            if failure := failure_of(event.reason):
                raise failure
            self.finish_reason = event.reason
            piece = self.final_text.flush()
        else:
            self.prompt_logprobs += event.logprobs
        self.pieces.append(piece)
        return piece


# Statistics that are milliseconds; `tokens_per_s` is the inverse of one.
TIMES = ("ttft_ms", "tbt_ms", "step_ms", "control_ms_per_step", "features_ms_per_step")


def statistics(served: ModelInfo, enqueued_ns: int, reports: list[Report]) -> dict[str, Any]:
    """`pipespec.timing.stats.summarise`, in the reported time (`ModelInfo.time_scale`)."""
    stats = summarise(enqueued_ns, reports)
    scale = served.time_scale or 1.0
    if scale == 1:
        return stats

    def scaled(value: Any, factor: float) -> Any:
        if isinstance(value, dict):
            return {name: scaled(part, factor) for name, part in value.items()}
        return None if value is None else value * factor

    times = {name: scaled(stats[name], 1 / scale) for name in TIMES}
    batches = [BatchTimes(**each).scaled(1 / scale)._asdict() for each in stats["stage_times"]]
    rounds = BatchTimes(stats["round_times"]).scaled(1 / scale).points
    tokens_per_s = scaled(stats["tokens_per_s"], scale)
    times |= {"stage_times": batches, "round_times": rounds, "tokens_per_s": tokens_per_s}
    return stats | times


def labels(served: ModelInfo, sampling: SamplingParams) -> dict[str, Any]:
    """What every output must say of its figures and text, and the seed to repeat them."""
    return {
        "emulated": served.time_scale is not None,
        "synthetic": served.synthetic,
        "lossy": sampling.lossy,
        "seed": sampling.seed if sampling.temperature else None,
    }


def write_trace(deployment: Deployment, reports: Iterable[Report]) -> None:
    if deployment.config.trace is None:
        return
    names = ["head: draft and tree"]
    names += [
        f"stage {i}: layers {s.start}..{s.stop - 1}" for i, s in enumerate(deployment.layers, 1)
    ]
    ranks = [(r["rank"], names[r["rank"]], [tuple(e) for e in r["events"]]) for r in reports]
    write_chrome_trace(Path(deployment.config.trace), ranks)


@dataclass(frozen=True)
class Result:
    """A finished request. `stats` is described in `pipespec.timing.stats`. `logprobs`, if asked
    for, has for every token its `token_id` and `logprob` and, as `top`, the same two of the most
    probable tokens: natural logarithms, in the target's own distribution. `prompt_logprobs` is the
    same of the prompt's tokens, None for the first."""

    text: str
    token_ids: list[int]
    logprobs: list[dict[str, Any]] | None
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str
    stats: dict[str, Any]
    prompt_logprobs: list[dict[str, Any] | None] | None = None


def ask(
    client: Client,
    settings: RequestSettings,
    prompt: Sequence[int],
    on_text: Callable[[str], None] = lambda piece: None,
) -> tuple[Result, list[Report]]:
    """Decode one prompt; what its ranks say of it, too. It is cancelled if this is interrupted.
    Raises Unreachable, RankFailed."""
    served = client.served
    sampling = settings.params(fresh_seed=fresh_seed())
    enqueued = monotonic_ns()
    answer = Answer(FinalText(served.tokenizer, prompt, settings.decode.stop))
    with client.follow() as followed:
        request = client.run(followed.submit(prompt, sampling, **settings.fields(served)))
        while len(followed):
            for _, event in client.run(followed.next()):
                on_text(answer.receive(event))
    reports = client.reports(request)
    logprobs = [*map(_report, answer.token_ids, answer.logprobs)]
    of_prompt = [None, *map(_report, prompt[1:], answer.prompt_logprobs)]
    result = Result(
        text=answer.text,
        token_ids=answer.token_ids,
        logprobs=None if sampling.logprobs is None else logprobs,
        prompt_logprobs=None if sampling.prompt_logprobs is None else of_prompt,
        prompt_tokens=len(prompt),
        completion_tokens=len(answer.token_ids),
        finish_reason=answer.finish_reason,
        stats=statistics(served, enqueued, reports) | labels(served, sampling),
    )
    return result, reports


def _report(token: int, logprobs: TokenLogprobs) -> dict[str, Any]:
    return {
        "token_id": token,
        "logprob": logprobs.logprob,
        "top": [{"token_id": id_, "logprob": value} for id_, value in logprobs.top],
    }
