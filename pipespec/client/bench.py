"""Many prompts on one cluster: what `pipespec bench` runs and `benchmarks/` build upon.

Names and meanings are those of `vllm bench serve --metric-percentiles 50,90,99` where both
know the same thing:

- TTFT: from handing a request in (waiting in the queue included) to its first token.
- TPOT: of one request, the time from its first to its last token, per token after the first;
  requests weigh alike.
- ITL: between two arrivals. vLLM takes it between the chunks that its server streams, however
  many tokens a chunk has; a verdict is our chunk. So tokens of one verdict have one ITL, and
  no ITL is 0.
- E2EL: from handing a request in to its last token.

Beside them stands TBT, of the papers on speculative decoding: between one token and the next,
0 inside a verdict; tokens weigh alike.

Under `pace.scale` all times are divided by it: they are those of the emulated machine.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from pipespec.client import answers, attached
from pipespec.client.dataset import Sample
from pipespec.client.registry import Card
from pipespec.clock import monotonic_ns
from pipespec.cluster import deployment, session
from pipespec.config.compose import compose
from pipespec.config.schema import Config
from pipespec.errors import ConfigError, PipespecError, PromptError, RankFailed
from pipespec.limits import MAX_COUNT, check_whole
from pipespec.stats import Report
from pipespec.text import Detokenizer, StopStrings

PERCENTILES = (50, 90, 99)
# What a truth file holds beyond the answer: a tree reaches further than the text.
TRUTH_MARGIN = 64
# Settings that say what the target answers; all others only say how fast.
ANSWER_SETTINGS = ("model", "decode", "verify", "controller", "transport", "cluster.devices")


@dataclass(frozen=True)
class RequestResult:
    """One decoded prompt.

    `token_ms` are the arrivals of the tokens since the request was handed in, `ttft_ms` the
    first of them; `stats` is described in `pipespec.stats`.
    """

    id: str
    benchmark: str
    prompt_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    ttft_ms: float
    token_ms: list[float]
    stats: dict[str, Any]


@dataclass(frozen=True)
class BenchResult:
    """All requests, in the order of the samples, and how long they took together.

    `labels` (`answers.labels`) say whether times are emulated, guesses synthetic, the text
    lossy.
    """

    requests: list[RequestResult]
    duration_s: float
    concurrency: int
    labels: dict[str, Any]

    def summary(self) -> dict[str, Any]:
        """One figure per name; None where there is nothing to take it from."""
        tokens_in = sum(len(request.prompt_ids) for request in self.requests)
        tokens_out = sum(len(request.token_ids) for request in self.requests)
        return {
            **self.labels,
            "completed": len(self.requests),
            "max_concurrency": self.concurrency,
            "duration": self.duration_s,
            "total_input_tokens": tokens_in,
            "total_output_tokens": tokens_out,
            "request_throughput": len(self.requests) / self.duration_s,
            "output_throughput": tokens_out / self.duration_s,
            "total_token_throughput": (tokens_in + tokens_out) / self.duration_s,
            **_latencies(self.requests),
            **_speculation(self.requests),
        }

    def by_benchmark(self) -> list[dict[str, Any]]:
        """The main figures of every benchmark that the samples are of, in their order."""
        rows = []
        for name in dict.fromkeys(request.benchmark for request in self.requests):
            requests = [request for request in self.requests if request.benchmark == name]
            latencies, speculation = _latencies(requests), _speculation(requests)
            rows.append(
                {
                    "benchmark": name,
                    "completed": len(requests),
                    "total_output_tokens": sum(len(request.token_ids) for request in requests),
                    **{key: latencies[key] for key in ("mean_ttft_ms", "mean_tbt_ms")},
                    **{
                        key: speculation[key]
                        for key in ("tokens_per_step", "hit_rate", "accepted_per_batch")
                    },
                }
            )
        return rows


def bench(
    config: Config,
    samples: Sequence[Sample],
    *,
    concurrency: int = 1,
    prompt_tokens: int | None = None,
    on_done: Callable[[int, int], None] = lambda done, of: None,
    on_loaded: Callable[[int, int], None] = lambda ranks, of: None,
    on: Card | None = None,
) -> BenchResult:
    """Decode all samples on one cluster.

    Args:
        concurrency: requests that are handed in and not yet finished, at most. The head
            decodes one at a time; what the others wait is part of their TTFT.
        prompt_tokens: cut every prompt to its first so many tokens.
        on_done: called with how many requests are finished, and of how many.
        on_loaded: called with how many ranks have loaded their models, and of how many.
        on: ask this running cluster instead; `config` is then `asking.configure`'s.

    Raises:
        ConfigError, Unreachable: before any rank starts, if anything is wrong.
        RankFailed: a rank died; the others have been ended.
    """
    check_whole("concurrency", concurrency, 1, MAX_COUNT)
    if prompt_tokens is not None:
        check_whole("prompt_tokens", prompt_tokens, 1, MAX_COUNT)
    if not samples:
        raise ConfigError("There is no sample to decode; pass at least one.")
    plan = deployment.plan(config) if on is None else attached.plan_of(on, config)
    tokenizer = deployment.load_tokenizers(plan)
    prompts = [encode(plan, tokenizer, sample, prompt_tokens) for sample in samples]
    if on is None:
        plan = deployment.fit_context(plan, max(map(len, prompts)))
    sampling = config.verify.sampling(fresh_seed=answers.fresh_seed())
    eos = () if config.decode.ignore_eos else plan.target.eos
    results: list[RequestResult] = []
    traced: list[Report] = []
    with (
        session.start(plan, on_loaded) if on is None else attached.attach(on, on_loaded)
    ) as cluster:
        waiting = deque(prompts)
        open_requests: deque[tuple[int, int]] = deque()  # number, when it was handed in

        def submit() -> None:
            now = monotonic_ns()
            number = cluster.submit(
                waiting.popleft(),
                sampling,
                max_new_tokens=config.decode.max_new_tokens,
                stop=config.decode.stop,
                eos=eos,
            )
            open_requests.append((number, now))

        began = monotonic_ns()
        while waiting and len(open_requests) < concurrency:
            submit()
        on_done(0, len(samples))
        for sample, prompt in zip(samples, prompts, strict=True):
            number, enqueued = open_requests.popleft()
            answer = answers.gather(
                cluster.events(number),
                Detokenizer(tokenizer, prompt),
                StopStrings(config.decode.stop),
            )
            ended = monotonic_ns()
            if waiting:
                submit()
            reports = cluster.reports(number)
            traced += reports
            results.append(_result(config, sample, prompt, answer, enqueued, reports))
            on_done(len(results), len(samples))
    answers.write_trace(plan, traced)
    return BenchResult(
        results,
        (ended - began) / 1e9 / answers.time_scale(config),
        concurrency,
        answers.labels(config, sampling),
    )


def encode(
    plan: deployment.Plan, tokenizer: Any, sample: Sample, prompt_tokens: int | None
) -> list[int]:
    """The token ids of a sample's prompt, cut to `prompt_tokens`. Raises PromptError."""
    # Cut first and measured then: what is too long may be cut to fit.
    unbounded = replace(plan, context=sys.maxsize)
    ids = deployment.encode(unbounded, tokenizer, sample.prompt)[:prompt_tokens]
    if len(ids) >= plan.context:
        raise PromptError(
            f"The prompt of {sample.id!r} has {len(ids)} tokens, but the context holds "
            f"{plan.context} and needs room for an answer; pass prompt_tokens=N to cut prompts, "
            "or raise model.context."
        )
    return ids


def _result(
    config: Config,
    sample: Sample,
    prompt: list[int],
    answer: answers.Answer,
    enqueued: int,
    reports: list[Report],
) -> RequestResult:
    (head,) = (report for report in reports if report["rank"] == 0)
    scale = answers.time_scale(config)
    arrivals = [(at - enqueued) / 1e6 / scale for at in head["token_ns"]]
    if len(arrivals) != len(answer.token_ids):
        raise RankFailed(
            f"The times of {sample.id!r} were lost with the head, which was killed as it ended; "
            "run the benchmark again."
        )
    return RequestResult(
        id=sample.id,
        benchmark=sample.benchmark,
        prompt_ids=prompt,
        token_ids=answer.token_ids,
        text=answer.text,
        finish_reason=answer.finish_reason,
        ttft_ms=arrivals[0],
        token_ms=arrivals,
        stats=answers.statistics(config, enqueued, reports),
    )


# --- truth ------------------------------------------------------------------------------------


def record_truth(
    samples: Sequence[Sample],
    path: str | Path,
    *overrides: str,
    prompt_tokens: int | None = None,
    on_done: Callable[[int, int], None] = lambda done, of: None,
) -> None:
    """Write what the target says after every prompt: the truth of `source=synthetic`.

    One plain stage without guesses and without a pace decodes `decode.max_new_tokens` and a
    margin beyond, whatever the end of text is. Each line of the file is a JSON list of token
    ids, prompt and answer.

    Args:
        overrides: settings of the run that will use the file; those that do not say what the
            target answers are left out. Greedy unless they choose another verifier.
        prompt_tokens: as in that run.

    Raises ConfigError as `bench` does, and PipespecError if the file cannot be written.
    """
    kept = [text for text in overrides if text.partition("=")[0].startswith(ANSWER_SETTINGS)]
    config = compose([*kept, "cluster.stages=1", "feed=root", "source=ngram"])
    decode = replace(
        config.decode,
        max_new_tokens=config.decode.max_new_tokens + TRUTH_MARGIN,
        ignore_eos=True,
        stop=[],
    )
    done = bench(
        replace(config, decode=decode), samples, prompt_tokens=prompt_tokens, on_done=on_done
    )
    # The source takes the first text that begins with a prompt. Where one prompt begins
    # another, the shorter one must not find the text of the longer.
    texts = sorted((request.prompt_ids, request.token_ids) for request in done.requests)
    lines = [json.dumps(prompt + answer) + "\n" for prompt, answer in texts]
    try:
        Path(path).write_text("".join(lines), encoding="utf-8")
    except OSError as error:
        raise PipespecError(f"{str(path)!r} cannot be written: {error.strerror}.") from error


# --- arithmetic -------------------------------------------------------------------------------


def _latencies(requests: Sequence[RequestResult]) -> dict[str, float | None]:
    """Mean, median, standard deviation and percentiles of every kind of latency."""
    several = [request.token_ms for request in requests if len(request.token_ms) > 1]
    kinds = {
        "ttft": [request.ttft_ms for request in requests],
        "tpot": [(times[-1] - times[0]) / (len(times) - 1) for times in several],
        "itl": [gap for times in several for gap in gaps(arrivals(times))],
        "tbt": [gap for times in several for gap in gaps(times)],
        "e2el": [request.token_ms[-1] for request in requests],
    }
    figures: dict[str, float | None] = {}
    for kind, values in kinds.items():
        figures[f"mean_{kind}_ms"] = float(np.mean(values)) if values else None
        figures[f"median_{kind}_ms"] = float(np.median(values)) if values else None
        figures[f"std_{kind}_ms"] = float(np.std(values)) if values else None
        for percent in PERCENTILES:
            figures[f"p{percent}_{kind}_ms"] = (
                float(np.percentile(values, percent)) if values else None
            )
    return figures


def _speculation(requests: Sequence[RequestResult]) -> dict[str, Any]:
    """What guessing brought, over all requests.

    `tokens_per_step` counts tokens and steps after a request's first verdict with a token, as
    `pipespec.stats` does; `accepted_per_batch` is how many tokens a verdict decided that
    decided any. `stage_busy` and `rows_per_step` are means that weigh every step alike.
    """
    later = [sum(at > r.token_ms[0] for at in r.token_ms) for r in requests]
    rates = [r.stats["tokens_per_step"] for r in requests]
    steps = sum(count / rate for count, rate in zip(later, rates, strict=True) if rate)
    tokens = sum(len(r.token_ms) for r in requests)
    weights = [r.stats["steps"] for r in requests]
    rows = [(r.stats["rows_per_step"], w) for r, w in zip(requests, weights, strict=True)]
    known = [(value, weight) for value, weight in rows if value is not None]
    stages = zip(*(r.stats["stage_busy"] for r in requests), strict=True)
    return {
        "tokens_per_step": sum(later) / steps if steps else None,
        "hit_rate": sum(r.stats["hit_rate"] * len(r.token_ms) for r in requests) / tokens,
        "accepted_per_batch": tokens / sum(len(arrivals(r.token_ms)) for r in requests),
        "rows_per_step": _weighted(known),
        "stage_busy": [_weighted([*zip(busy, weights, strict=True)]) for busy in stages],
        "overruns": sum(r.stats["overruns"] for r in requests),
    }


def _weighted(pairs: Sequence[tuple[float, float]]) -> float | None:
    """The mean of values that each come with a weight; None without any."""
    whole = sum(weight for _, weight in pairs)
    return sum(value * weight for value, weight in pairs) / whole if pairs else None


def arrivals(times: Sequence[float]) -> list[float]:
    """The different moments at which tokens came: tokens of one verdict come at once."""
    return list(dict.fromkeys(times))


def gaps(times: Sequence[float]) -> list[float]:
    """From each moment to the next."""
    return [b - a for a, b in pairwise(times)]
