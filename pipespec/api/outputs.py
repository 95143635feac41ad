"""What the Python interface returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pipespec.api.prompts import Tokenized
from pipespec.client.answers import Answer, labels, statistics
from pipespec.client.model_info import ModelInfo
from pipespec.controller.log_records import Event, Finished, check_answered
from pipespec.core import SamplingParams as RequestParams
from pipespec.core import TokenLogprobs
from pipespec.text import Tokenizer, token_text
from pipespec.timing.stats import Report


@dataclass(frozen=True)
class Logprob:
    """A token that is or might have been at a place of a text, as in vLLM.

    Attributes:
        logprob: its natural log-probability in the target's own distribution.
        rank: 1 for the most probable token of the place; None for a token that is not among the
            most probable ones that were asked for.
        decoded_token: its text.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


# By token id: the token of the place first, then the most probable ones.
LogprobsAtPlace = dict[int, Logprob]


def logprobs_by_place(
    tokenizer: Tokenizer,
    tokens: Sequence[int],
    reported: Sequence[TokenLogprobs],
    most: int | None,
) -> list[LogprobsAtPlace] | None:
    """Of each of the tokens of a text, and of the `most` most probable ones there; None: not asked
    for."""
    if most is None:
        return None
    places = []
    for token, scored in zip(tokens, reported, strict=True):
        ranks = {id_: rank for rank, (id_, _) in enumerate(scored.top, 1)}
        values = {token: scored.logprob} | dict(scored.top[:most])
        place = {
            id_: Logprob(value, ranks.get(id_), token_text(tokenizer, id_))
            for id_, value in values.items()
        }
        places.append(place)
    return places


@dataclass(frozen=True)
class CompletionOutput:
    """One answer to a prompt.

    Attributes:
        index: its number among the answers to the prompt.
        text: without what ended it.
        token_ids: all tokens, the end token included.
        cumulative_logprob: the sum of the log-probabilities of its tokens, if asked for.
        logprobs: for every token its own `Logprob` and those of the most probable tokens at its
            place, by token id, if asked for.
        finish_reason: "stop" (an end token or a stop text) or "length".
        metrics: times in milliseconds, tokens per step and so on (docs/statistics.md).
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[LogprobsAtPlace] | None
    finish_reason: str
    metrics: dict[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class RequestOutput:
    """The answers to one prompt.

    Attributes:
        request_id: the number of the first answer's request in the cluster, as text.
        prompt: its text; None if it was given as token ids.
        prompt_token_ids: its tokens.
        prompt_logprobs: for each of them as `CompletionOutput.logprobs`, None for the first; None
            if not asked for.
        outputs: one for each of `SamplingParams.n`.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[LogprobsAtPlace | None] | None
    outputs: list[CompletionOutput]

    @property
    def text(self) -> str:
        """The text of the first answer."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """The tokens of the first answer."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str:
        """Why the first answer ended."""
        return self.outputs[0].finish_reason

    @property
    def metrics(self) -> dict[str, Any]:
        """The statistics of the first answer."""
        return self.outputs[0].metrics


@dataclass(frozen=True)
class PendingRequest:
    """A request, submitted at `submitted_ns` as `number`, and what has arrived of its answer."""

    params: RequestParams
    number: int
    submitted_ns: int
    answer: Answer

    def receive(self, event: Event) -> str:
        """The text that an event makes final. Raises what ends the request without an answer."""
        if isinstance(event, Finished):
            check_answered(event)
        return self.answer.receive(event)


def output_of(
    served: ModelInfo, prompt: Tokenized, requests: Sequence[tuple[PendingRequest, list[Report]]]
) -> RequestOutput:
    first = requests[0][0]
    scored = logprobs_by_place(
        served.tokenizer,
        prompt.token_ids[1:],
        first.answer.prompt_logprobs,
        first.params.prompt_logprobs,
    )
    return RequestOutput(
        request_id=str(first.number),
        prompt=prompt.text,
        prompt_token_ids=list(prompt.token_ids),
        prompt_logprobs=None if scored is None else [None, *scored],
        outputs=[
            _completion(served, index, request, reports)
            for index, (request, reports) in enumerate(requests)
        ],
    )


def _completion(
    served: ModelInfo, index: int, request: PendingRequest, reports: list[Report]
) -> CompletionOutput:
    answer, most = request.answer, request.params.logprobs
    return CompletionOutput(
        index=index,
        text=answer.text,
        token_ids=answer.token_ids,
        cumulative_logprob=None if most is None else sum(each.logprob for each in answer.logprobs),
        logprobs=logprobs_by_place(served.tokenizer, answer.token_ids, answer.logprobs, most),
        finish_reason=answer.finish_reason,
        metrics=statistics(served, request.submitted_ns, reports) | labels(served, request.params),
    )
