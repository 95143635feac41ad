"""From the tokens of answers to OpenAI's replies, whole or in chunks, and those of chats."""

from __future__ import annotations

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pydantic import BaseModel

from pipespec.core import TokenLogprobs
from pipespec.server.request_parsing import ParsedRequest
from pipespec.server.response_schema import (
    ChatChoice,
    ChatChunk,
    ChatLogprobs,
    ChatMessage,
    ChatReply,
    ChunkChoice,
    Delta,
    FinishReason,
    PromptLogprob,
    PromptLogprobs,
    PromptTokensDetails,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from pipespec.text import Tokenizer, token_bytes, token_text

# JSON has no minus infinity; vLLM writes this instead.
MIN_LOGPROB = -9999.0
# A text that no model generates, and its JSON.
MARK = "\0"
MARK_JSON = json.dumps(MARK)


@dataclass(frozen=True)
class OutputDelta:
    """What the cluster adds to one answer: text that is final, and the tokens behind it.

    `prompt_logprobs` are those of the prompt's next tokens, from the second on, if the request
    asks for them. Only the last delta of an answer has a `finish_reason` and, if it is known, the
    number of prompt tokens that were in the prefix cache.
    """

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    num_cached_tokens: int | None = None


class OpenAIFormat(ABC):
    """The replies to one request, and what it has to remember of the answers for them.

    Args:
        request: the request.
        tokenizer: of the model.
        model: the name that the client used for it.
        usage: whether a stream reports token counts at its end.
        continuous: whether every chunk does, too.
    """

    id_prefix: str

    def __init__(
        self,
        request: ParsedRequest,
        tokenizer: Tokenizer,
        model: str,
        *,
        usage: bool = False,
        continuous: bool = False,
    ):
        self.request = request
        self.tokenizer = tokenizer
        self.model = model
        self.id = f"{self.id_prefix}-{secrets.token_hex(16)}"
        self.created = int(time.time())
        self._usage, self._continuous = usage, usage and continuous
        self._num_tokens = 0
        self._num_cached: int | None = None
        choices = request.sampling_params
        self._texts: list[list[str]] = [[] for _ in choices]
        self._logprobs: list[list[tuple[int, TokenLogprobs]]] = [[] for _ in choices]
        self._prompt_logprobs: list[list[TokenLogprobs]] = [[] for _ in choices]
        self._finish_reasons: list[FinishReason] = ["length" for _ in choices]
        # A chunk's JSON before and after its text, by choice.
        self._chunk_frames: dict[int, tuple[str, str]] = {}

    @property
    def usage(self) -> Usage:
        """Token counts so far."""
        prompt, cached = self.request.prompt_tokens, self._num_cached
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=self._num_tokens,
            total_tokens=prompt + self._num_tokens,
            prompt_tokens_details=None
            if cached is None
            else PromptTokensDetails(cached_tokens=cached),
        )

    @property
    def has_logprobs(self) -> bool:
        """Whether the request asks for log-probabilities of any tokens."""
        choices = range(len(self.request.sampling_params))
        return self.request.prompt_logprobs is not None or any(map(self.wants_logprobs, choices))

    def wants_logprobs(self, choice: int) -> bool:
        """Whether the request asks for log-probabilities of the answer's tokens."""
        return self.request.sampling_params[choice].logprobs is not None

    def count_tokens(self, delta: OutputDelta) -> None:
        """Add the tokens of a delta to `usage`.

        A prompt with several answers counts once, and so do its cached tokens: those of its first
        answer.
        """
        self._num_tokens += len(delta.token_ids)
        if delta.num_cached_tokens is not None and not delta.index % self.request.n:
            self._num_cached = (self._num_cached or 0) + delta.num_cached_tokens

    def add(self, delta: OutputDelta) -> None:
        """Keep a delta for the whole reply."""
        self.count_tokens(delta)
        self._texts[delta.index].append(delta.text)
        self._prompt_logprobs[delta.index] += delta.prompt_logprobs
        if delta.logprobs:
            self._logprobs[delta.index] += zip(delta.token_ids, delta.logprobs, strict=True)
        if delta.finish_reason:
            self._finish_reasons[delta.index] = delta.finish_reason

    def stream_events(self, delta: OutputDelta) -> Iterator[str]:
        """What a delta adds to a stream, as JSON.

        Nearly all chunks hold text and nothing else. They differ in the text alone, so the JSON
        around it is written once.
        """
        only_text = delta.text and not (
            delta.logprobs or delta.prompt_logprobs or delta.finish_reason
        )
        if self._continuous or not only_text:
            for chunk in self.chunks(delta):
                yield chunk.model_dump_json()
            return
        self.count_tokens(delta)
        if delta.index not in self._chunk_frames:
            (example,) = self.chunks(OutputDelta(delta.index, MARK))
            before, _, after = example.model_dump_json().partition(MARK_JSON)
            self._chunk_frames[delta.index] = before, after
        before, after = self._chunk_frames[delta.index]
        yield before + json.dumps(delta.text, ensure_ascii=False) + after

    @abstractmethod
    def response(self) -> BaseModel:
        """The whole reply, of all deltas that were added."""

    @abstractmethod
    def first_chunks(self) -> Iterator[BaseModel]:
        """The beginning of a stream."""

    @abstractmethod
    def chunks(self, delta: OutputDelta) -> Iterator[BaseModel]:
        """What a delta adds to a stream."""

    @abstractmethod
    def last_chunks(self) -> Iterator[BaseModel]:
        """The end of a stream."""

    def _continuous_usage(self) -> Usage | None:
        return self.usage if self._continuous else None

    def _prompt_report(self, choice: int) -> PromptLogprobs | None:
        """What the request asks for with `prompt_logprobs`."""
        most = self.request.prompt_logprobs
        if most is None:
            return None
        report: PromptLogprobs = [None]
        ids = self.request.prompt_of(choice)[1:]
        for token, logprobs in zip(ids, self._prompt_logprobs[choice], strict=True):
            ranks = {id_: rank for rank, (id_, _) in enumerate(logprobs.top, 1)}
            reported = {token: logprobs.logprob} | dict(logprobs.top[:most])
            report.append(
                {
                    str(id_): PromptLogprob(
                        logprob=json_logprob(value),
                        rank=ranks.get(id_),
                        decoded_token=token_text(self.tokenizer, id_),
                    )
                    for id_, value in reported.items()
                }
            )
        return report


def json_logprob(logprob: float) -> float:
    """A log-probability that JSON can represent."""
    return max(logprob, MIN_LOGPROB)


class ChatFormat(OpenAIFormat):
    """The replies of /v1/chat/completions."""

    id_prefix = "chatcmpl"

    def response(self) -> BaseModel:
        choices = [
            ChatChoice(
                index=i,
                message=self._message(i),
                logprobs=self._chat_logprobs(i, self._logprobs[i]),
                finish_reason=self._finish_reasons[i],
            )
            for i in range(len(self.request.sampling_params))
        ]
        return ChatReply(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=self.usage,
            prompt_logprobs=self._prompt_report(0),
        )

    def first_chunks(self) -> Iterator[BaseModel]:
        for i in range(len(self.request.sampling_params)):
            yield self._chunk(i, Delta(role="assistant", content=""))

    def chunks(self, delta: OutputDelta) -> Iterator[BaseModel]:
        self.count_tokens(delta)
        if delta.text or delta.logprobs:
            yield self._chunk(delta.index, Delta(content=delta.text), self._delta_logprobs(delta))
        if delta.finish_reason:
            yield self._chunk(delta.index, Delta(), reason=delta.finish_reason)

    def last_chunks(self) -> Iterator[BaseModel]:
        if self._usage:
            yield ChatChunk(
                id=self.id, created=self.created, model=self.model, choices=[], usage=self.usage
            )

    def _message(self, choice: int) -> ChatMessage:
        return ChatMessage(content="".join(self._texts[choice]))

    def _chunk(
        self,
        choice: int,
        delta: Delta,
        logprobs: ChatLogprobs | None = None,
        reason: FinishReason | None = None,
    ) -> BaseModel:
        return ChatChunk(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=[
                ChunkChoice(index=choice, delta=delta, logprobs=logprobs, finish_reason=reason)
            ],
            usage=self._continuous_usage(),
        )

    def _delta_logprobs(self, delta: OutputDelta) -> ChatLogprobs | None:
        tokens = zip(delta.token_ids, delta.logprobs, strict=False)
        return self._chat_logprobs(delta.index, [*tokens]) if delta.logprobs else None

    def _chat_logprobs(
        self, choice: int, tokens: Sequence[tuple[int, TokenLogprobs]]
    ) -> ChatLogprobs | None:
        if not self.wants_logprobs(choice):
            return None
        content = [
            TokenLogprob(
                **self._top_logprob(token, logprobs.logprob).model_dump(),
                top_logprobs=[self._top_logprob(*pair) for pair in logprobs.top],
            )
            for token, logprobs in tokens
        ]
        return ChatLogprobs(content=content)

    def _top_logprob(self, token: int, logprob: float) -> TopLogprob:
        return TopLogprob(
            token=token_text(self.tokenizer, token),
            logprob=json_logprob(logprob),
            bytes=list(token_bytes(self.tokenizer, token)),
        )
