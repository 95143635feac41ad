"""Many prompts on one cluster: what `pipespec bench` runs and `benchmarks/` build upon."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from pipespec.client import answers
from pipespec.client.client import Client
from pipespec.client.dataset import Sample
from pipespec.client.figures import BenchResult, RequestResult
from pipespec.client.own import asking
from pipespec.client.served import ServedModel
from pipespec.client.settings import RequestSettings
from pipespec.clock import monotonic_ns
from pipespec.cluster import session
from pipespec.cluster.deployment import decide, fit_context
from pipespec.config.schema import Config
from pipespec.errors import ConfigError, PromptError, RankFailed
from pipespec.limits import MAX_COUNT, check_whole
from pipespec.stats import Report
from pipespec.text import Detokenizer, StopStrings


def bench(
    config: Config,
    samples: Sequence[Sample],
    *,
    concurrency: int = 1,
    prompt_tokens: int | None = None,
    on_done: Callable[[int, int], None] = lambda done, of: None,
    on_loaded: Callable[[int, int], None] = lambda ranks, of: None,
) -> BenchResult:
    """Decode all samples on one cluster, started for them.

    Args:
        concurrency: requests that are handed in and not yet finished, at most. The head
            decodes `scheduler.max_num_seqs` at once; what the others wait is part of their TTFT.
        prompt_tokens: cut every prompt to its first so many tokens.
        on_done: called with how many requests are finished, and of how many.
        on_loaded: called with how many ranks have loaded their models, and of how many.

    Raises:
        ConfigError, Unreachable: before any rank starts, if anything is wrong.
        RankFailed: a rank died; the others have been ended.
    """
    check(samples, concurrency, prompt_tokens)
    deployment = decide(config)
    settings = RequestSettings.of(config)
    with session.prepare(deployment) as agents:
        served = ServedModel.of(deployment)
        prompts = encode(served, settings, samples, prompt_tokens)
        deployment = fit_context(deployment, max(map(len, prompts)), len(prompts))
        with (
            session.start(deployment, agents, on_loaded) as cluster,
            asking(cluster, served) as client,
        ):
            result, reports = measure(client, settings, samples, prompts, concurrency, on_done)
    answers.write_trace(deployment, reports)
    return result


def bench_on(
    client: Client,
    settings: RequestSettings,
    samples: Sequence[Sample],
    *,
    concurrency: int = 1,
    prompt_tokens: int | None = None,
    on_done: Callable[[int, int], None] = lambda done, of: None,
) -> BenchResult:
    """The same on a cluster that runs. Raises ConfigError, PromptError, RankFailed."""
    check(samples, concurrency, prompt_tokens)
    prompts = encode(client.served, settings, samples, prompt_tokens)
    return measure(client, settings, samples, prompts, concurrency, on_done)[0]


def check(samples: Sequence[Sample], concurrency: int, prompt_tokens: int | None) -> None:
    """Raise ConfigError unless a bench can be run so."""
    check_whole("concurrency", concurrency, 1, MAX_COUNT)
    if prompt_tokens is not None:
        check_whole("prompt_tokens", prompt_tokens, 1, MAX_COUNT)
    if not samples:
        raise ConfigError("There is no sample to decode; pass at least one.")


def encode(
    served: ServedModel,
    settings: RequestSettings,
    samples: Sequence[Sample],
    prompt_tokens: int | None,
) -> list[list[int]]:
    """The token ids of every prompt, cut to `prompt_tokens`. Raises PromptError."""
    prompts = []
    for sample in samples:
        # Cut first and measured then: what is too long may be cut to fit.
        whole = served.encode(sample.prompt, chat=settings.decode.chat, bounded=False)
        prompts.append(whole[:prompt_tokens])
        if len(prompts[-1]) >= served.context:
            raise PromptError(
                f"The prompt of {sample.id!r} has {len(prompts[-1])} tokens, but the context holds "
                f"{served.context} and needs room for an answer; pass prompt_tokens=N to cut "
                "prompts, or raise model.context."
            )
    return prompts


def measure(
    client: Client,
    settings: RequestSettings,
    samples: Sequence[Sample],
    prompts: Sequence[list[int]],
    concurrency: int,
    on_done: Callable[[int, int], None],
) -> tuple[BenchResult, list[Report]]:
    """Decode the prompts of all samples, and what the ranks say of all requests."""
    served, decode = client.served, settings.decode
    sampling = settings.verify.sampling(fresh_seed=answers.fresh_seed())
    results: list[RequestResult] = []
    told: list[Report] = []
    waiting = deque(prompts)
    open_requests: deque[tuple[int, int]] = deque()  # number, when it was handed in

    def submit() -> None:
        now = monotonic_ns()
        number = client.submit(
            waiting.popleft(),
            sampling,
            max_new_tokens=decode.max_new_tokens,
            stop=decode.stop,
            eos=() if decode.ignore_eos else served.eos,
        )
        open_requests.append((number, now))

    began = ended = monotonic_ns()
    while waiting and len(open_requests) < concurrency:
        submit()
    on_done(0, len(samples))
    for sample, prompt in zip(samples, prompts, strict=True):
        number, enqueued = open_requests.popleft()
        answer = answers.gather(
            client.events(number),
            Detokenizer(served.tokenizer, prompt),
            StopStrings(decode.stop),
        )
        ended = monotonic_ns()
        if waiting:
            submit()
        reports = client.reports(number)
        told += reports
        results.append(_result(served, sample, prompt, answer, enqueued, reports))
        on_done(len(results), len(samples))
    duration_s = (ended - began) / 1e9 / (served.time_scale or 1.0)
    return BenchResult(results, duration_s, concurrency, answers.labels(served, sampling)), told


def _result(
    served: ServedModel,
    sample: Sample,
    prompt: list[int],
    answer: answers.Answer,
    enqueued: int,
    reports: list[Report],
) -> RequestResult:
    (head,) = (report for report in reports if report["rank"] == 0)
    scale = served.time_scale or 1.0
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
        stats=answers.statistics(served, enqueued, reports),
    )
