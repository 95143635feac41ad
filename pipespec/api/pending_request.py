"""A submitted request: from the events of its answer to what the user gets."""

from __future__ import annotations

from collections.abc import Sequence

from pipespec.api.outputs import CompletionOutput, RequestOutput, logprobs_by_place
from pipespec.api.prompts import Tokenized
from pipespec.client.answers import Answer, AnswerBuilder, labels, statistics
from pipespec.client.model_info import ModelInfo
from pipespec.controller.log_records import Event, Finished, check_answered
from pipespec.core import SamplingParams
from pipespec.stats import Report
from pipespec.text import FinalText


class PendingRequest:
    """A request, submitted at `submitted_ns` as `number`, and what has arrived of its answer."""

    def __init__(
        self,
        served: ModelInfo,
        prompt: Tokenized,
        params: SamplingParams,
        number: int,
        submitted_ns: int,
        stop: Sequence[str],
    ):
        self.params = params
        self.number = number
        self.submitted_ns = submitted_ns
        self._builder = AnswerBuilder(
            FinalText(served.tokenizer, prompt.token_ids, stop, params.min_tokens)
        )

    @property
    def answer(self) -> Answer:
        return self._builder.answer

    def receive(self, event: Event) -> str:
        """The text that an event makes final. Raises what ends the request without an answer."""
        if isinstance(event, Finished):
            check_answered(event)
        return self._builder.receive(event)


def output_of(
    served: ModelInfo, prompt: Tokenized, requests: Sequence[tuple[PendingRequest, list[Report]]]
) -> RequestOutput:
    """What the user gets for a prompt, from its finished requests with what the ranks reported."""
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
