"""One prompt, one cluster, one text: what `pipespec generate` runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pipespec.client import answers, attached
from pipespec.client.registry import Card
from pipespec.clock import monotonic_ns
from pipespec.cluster import deployment, session
from pipespec.config.schema import Config
from pipespec.core import TokenLogprobs
from pipespec.text import Detokenizer, StopStrings


@dataclass(frozen=True)
class Result:
    """A finished request. `stats` is described in `pipespec.stats`.

    `logprobs`, if asked for, has for every token its `token_id` and `logprob` and, as `top`,
    the same two of the most probable tokens: natural logarithms, in the target's own
    distribution.
    """

    text: str
    token_ids: list[int]
    logprobs: list[dict[str, Any]] | None
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str
    stats: dict[str, Any]


def generate(
    config: Config,
    prompt: str,
    on_text: Callable[[str], None] = lambda piece: None,
    on_loaded: Callable[[int, int], None] = lambda ranks, of: None,
    on: Card | None = None,
) -> Result:
    """Decode one prompt on a cluster that is started for it and ended after it.

    Args:
        on: ask this running cluster instead; `config` is then `asking.configure`'s.
        on_text: called with each piece of text as soon as it is final.
        on_loaded: called with how many ranks have loaded their models, and of how many.

    Raises:
        ConfigError, Unreachable: before any rank starts, if anything in the request is wrong.
        RankFailed: a rank died; the others have been ended.
    """
    plan = deployment.plan(config) if on is None else attached.plan_of(on, config)
    tokenizer = deployment.load_tokenizers(plan)
    ids = deployment.encode(plan, tokenizer, prompt)
    with (
        session.start(deployment.fit_context(plan, len(ids)), on_loaded)
        if on is None
        else attached.attach(on, on_loaded)
    ) as cluster:
        sampling = config.verify.sampling(fresh_seed=answers.fresh_seed())
        enqueued = monotonic_ns()
        request = cluster.submit(
            ids,
            sampling,
            max_new_tokens=config.decode.max_new_tokens,
            stop=config.decode.stop,
            eos=() if config.decode.ignore_eos else plan.target.eos,
        )
        answer = answers.gather(
            cluster.events(request),
            Detokenizer(tokenizer, ids),
            StopStrings(config.decode.stop),
            on_text,
        )
        reports = cluster.reports(request)
    answers.write_trace(plan, reports)
    logprobs = [*map(_report, answer.token_ids, answer.logprobs)]
    return Result(
        text=answer.text,
        token_ids=answer.token_ids,
        logprobs=None if sampling.logprobs is None else logprobs,
        prompt_tokens=len(ids),
        completion_tokens=len(answer.token_ids),
        finish_reason=answer.finish_reason,
        stats=answers.statistics(config, enqueued, reports) | answers.labels(config, sampling),
    )


def _report(token: int, logprobs: TokenLogprobs) -> dict[str, Any]:
    return {
        "token_id": token,
        "logprob": logprobs.logprob,
        "top": [{"token_id": id_, "logprob": value} for id_, value in logprobs.top],
    }
