"""Many prompts on one cluster: what `pipespec bench` runs and `benchmarks/` build upon."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from pipespec.client import answers
from pipespec.client.local_cluster import asking
from pipespec.client.model_info import ModelInfo
from pipespec.client.request_settings import RequestSettings
from pipespec.client.sync_client import Client
from pipespec.cluster import session
from pipespec.cluster.decide import decide
from pipespec.cluster.deployment.deployment import fit_context
from pipespec.config.schema import Config
from pipespec.controller.log_records import Event, Finished, failure_of
from pipespec.errors import ConfigError, PromptError, RankFailed
from pipespec.extras.bench.dataset import ONE_AT_A_TIME, Load, Sample
from pipespec.extras.bench.figures import BenchResult, RequestResult
from pipespec.limits import MAX_COUNT, check_whole
from pipespec.text import FinalText
from pipespec.timing.clock import monotonic_ns
from pipespec.timing.stats import Report

# Reports are read at the end, when there is nothing to hand in, but while the log keeps them.
READ_REPORTS_S = 600.0


def bench(
    config: Config,
    samples: Sequence[Sample],
    load: Load = ONE_AT_A_TIME,
    prompt_tokens: int | None = None,
    on_done: Callable[[int, int], None] = lambda done, of: None,
    on_loaded: Callable[[int, int], None] = lambda num_bytes, of: None,
) -> BenchResult:
    """Decode all samples on one cluster, started for them.

    Args:
        load: when requests are handed in; the times of one that is held back count from when it is
            handed in. The head decodes `scheduler.max_num_seqs` at once; what the others wait is
            part of their TTFT.
        prompt_tokens: cut every prompt to its first so many tokens.
        on_done: called with how many requests are finished, and of how many.
        on_loaded: called with how many bytes of weights are loaded, and of how many.

    Raises ConfigError and Unreachable before any rank starts, and RankFailed.
    """
    with started(config, samples, prompt_tokens, len(samples), on_loaded) as run:
        return run.measure(load, on_done)


def bench_on(
    client: Client,
    settings: RequestSettings,
    samples: Sequence[Sample],
    load: Load = ONE_AT_A_TIME,
    prompt_tokens: int | None = None,
    on_done: Callable[[int, int], None] = lambda done, of: None,
) -> BenchResult:
    """The same on a cluster that runs. Raises ConfigError, PromptError, RankFailed."""
    check(samples, prompt_tokens)
    prompts = encode(client.served, settings, samples, prompt_tokens)
    return BenchRun(client, settings, samples, prompts).measure(load, on_done)


@contextmanager
def started(
    config: Config,
    samples: Sequence[Sample],
    prompt_tokens: int | None,
    requests: int,
    on_loaded: Callable[[int, int], None],
) -> Iterator[BenchRun]:
    """A cluster for the prompts of all samples, so many of them at once, within the block, which
    ends with the trace. Raises as `bench` does."""
    check(samples, prompt_tokens)
    deployment = decide(config)
    settings = RequestSettings.of(config)
    with session.start_agents(deployment) as agents:
        served = ModelInfo.of(deployment)
        prompts = encode(served, settings, samples, prompt_tokens)
        deployment = fit_context(deployment, max(map(len, prompts)), requests)
        with (
            session.start_cluster(deployment, agents, on_loaded) as cluster,
            asking(cluster, served) as client,
        ):
            run = BenchRun(client, settings, samples, prompts)
            yield run
    answers.write_trace(deployment, run.reports)


def check(samples: Sequence[Sample], prompt_tokens: int | None) -> None:
    """Raise ConfigError unless a bench can be run so."""
    if prompt_tokens is not None:
        check_whole("prompt_tokens", prompt_tokens, 1, MAX_COUNT)
    if not samples:
        raise ConfigError("There is no sample to decode; pass at least one.")


def encode(
    served: ModelInfo,
    settings: RequestSettings,
    samples: Sequence[Sample],
    prompt_tokens: int | None,
) -> list[list[int]]:
    """The token ids of every prompt, cut to `prompt_tokens`. Raises PromptError."""
    prompts = []
    for sample in samples:
        # Cut first and measured then: what is too long may be cut to fit.
        whole = served.encode(sample.prompt, chat=settings.decode.chat, answer=None)
        prompts.append(whole[:prompt_tokens])
        if len(prompts[-1]) >= served.context:
            raise PromptError(
                f"The prompt of {sample.id!r} has {len(prompts[-1])} tokens, but the context holds "
                f"{served.context} and needs room for an answer; pass --prompt-tokens N to cut "
                "prompts, or raise model.context."
            )
    return prompts


@dataclass
class _Submitted:
    """A request of the run: when it was handed in, what came of it."""

    sample: Sample
    prompt: list[int]
    number: int
    enqueued_ns: int
    events: list[Event] = field(default_factory=list)
    ended_ns: int = 0
    reports: list[Report] = field(default_factory=list)

    def result(self, served: ModelInfo, stop: Sequence[str], began_ns: int) -> RequestResult:
        answer = answers.Answer(FinalText(served.tokenizer, self.prompt, stop))
        for event in self.events:
            answer.receive(event)
        head, *stages = sorted(self.reports, key=lambda report: report["rank"])
        scale = served.time_scale or 1.0
        arrivals = [(at - self.enqueued_ns) / 1e6 / scale for at in head["token_ns"]]
        if len(arrivals) != len(answer.token_ids):
            raise RankFailed(
                f"The times of {self.sample.id!r} were lost with the head, which was killed as it "
                "ended; run the benchmark again."
            )
        return RequestResult(
            id=self.sample.id,
            benchmark=self.sample.benchmark,
            prompt_ids=self.prompt,
            token_ids=answer.token_ids,
            text=answer.text,
            finish_reason=answer.finish_reason,
            ttft_ms=arrivals[0],
            token_ms=arrivals,
            stats=answers.statistics(served, self.enqueued_ns, self.reports),
            started_ms=(self.enqueued_ns - began_ns) / 1e6 / scale,
            draft_overruns=head["counts"]["overruns"],
            periods=[stage["period"] for stage in stages],
        )


@dataclass
class BenchRun:
    """A cluster with samples and their prompts; `reports`: what its ranks said of all requests."""

    client: Client
    settings: RequestSettings
    samples: Sequence[Sample]
    prompts: Sequence[list[int]]
    reports: list[Report] = field(default_factory=list)

    def measure(
        self,
        load: Load = ONE_AT_A_TIME,
        on_done: Callable[[int, int], None] = lambda done, of: None,
        *,
        policy: str = "",
        fresh_seed: int | None = None,
    ) -> BenchResult:
        """Decode the prompts of all samples.

        `policy` is one of `Config.request_policies`; `fresh_seed` that of draws whose settings name
        none, None: any.
        """
        client, served = self.client, self.client.served
        settings = replace(self.settings, policy=policy) if policy else self.settings
        seed = answers.fresh_seed() if fresh_seed is None else fresh_seed
        sampling, fields = settings.params(fresh_seed=seed), settings.fields(served)
        count, scale = len(self.samples), served.time_scale or 1.0
        due_s = load.due_s(count)
        asked: list[_Submitted] = []
        unfinished: dict[int, _Submitted] = {}
        finished: deque[_Submitted] = deque()  # whose reports were not read
        began = ended = monotonic_ns()
        on_done(0, count)
        with client.follow() as followed:
            while len(asked) < count or unfinished:
                now = monotonic_ns()
                wait_s = None  # until the next is handed in; None: not before one finishes
                if len(asked) < count and len(unfinished) < (load.concurrency or count):
                    wait_s = max(0.0, due_s[len(asked)] * scale - (now - began) / 1e9)
                if wait_s == 0:
                    sample, prompt = self.samples[len(asked)], self.prompts[len(asked)]
                    number = client.run(followed.submit(prompt, sampling, **fields))
                    asked.append(_Submitted(sample, prompt, number, now))
                    unfinished[number] = asked[-1]
                    continue
                while finished and now - finished[0].ended_ns > READ_REPORTS_S * 1e9:
                    one = finished.popleft()
                    one.reports = client.reports(one.number)
                for number, event in client.run(followed.next(wait_s)):
                    unfinished[number].events.append(event)
                    if isinstance(event, Finished):
                        if failure := failure_of(event.reason):
                            raise failure
                        one = unfinished.pop(number)
                        one.ended_ns = ended = monotonic_ns()
                        finished.append(one)
                        on_done(len(asked) - len(unfinished), count)
        for one in finished:
            one.reports = client.reports(one.number)
        self.reports += [report for one in asked for report in one.reports]
        return BenchResult(
            [one.result(served, settings.decode.stop, began) for one in asked],
            (ended - began) / 1e9 / scale,
            load.concurrency,
            answers.labels(served, sampling),
            load.request_rate,
        )
