"""One prompt, one text, on a cluster that runs: what `pipespec generate` returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pipespec.client import answers
from pipespec.client.request_settings import RequestSettings
from pipespec.client.sync_client import Client
from pipespec.core import TokenLogprobs
from pipespec.text import FinalText
from pipespec.timing.clock import monotonic_ns
from pipespec.timing.stats import Report


@dataclass(frozen=True)
class Result:
    """A finished request. `stats` is described in `pipespec.timing.stats`.

    `logprobs`, if asked for, has for every token its `token_id` and `logprob` and, as `top`,
    the same two of the most probable tokens: natural logarithms, in the target's own
    distribution. `prompt_logprobs` is the same of the prompt's tokens, None for the first.
    """

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
    """Decode one prompt; what its ranks say of it, too. Raises Unreachable, RankFailed."""
    served = client.served
    sampling = settings.params(fresh_seed=answers.fresh_seed())
    enqueued = monotonic_ns()
    request = client.submit(prompt, sampling, **settings.fields(served))
    answer = answers.gather(
        client.events(request),
        FinalText(served.tokenizer, prompt, settings.decode.stop),
        on_text,
    )
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
        stats=answers.statistics(served, enqueued, reports) | answers.labels(served, sampling),
    )
    return result, reports


def _report(token: int, logprobs: TokenLogprobs) -> dict[str, Any]:
    return {
        "token_id": token,
        "logprob": logprobs.logprob,
        "top": [{"token_id": id_, "logprob": value} for id_, value in logprobs.top],
    }
