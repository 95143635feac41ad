"""From the tokens of answers to OpenAI's replies, whole or in chunks, and those of chats."""

from __future__ import annotations

import json
import secrets
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel

from pipespec.core import TokenLogprobs
from pipespec.server.answer_blocks import AnswerBlocks, BlockDelta
from pipespec.server.api_errors import ApiError
from pipespec.server.request_parsing import ParsedRequest
from pipespec.server.response_schema import (
    ChatChoice,
    ChatChunk,
    ChatLogprobs,
    ChatMessage,
    ChatReply,
    ChunkChoice,
    CompletionTokensDetails,
    Delta,
    FinishReason,
    FunctionCall,
    FunctionDelta,
    PromptLogprob,
    PromptLogprobs,
    PromptTokensDetails,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    TopLogprob,
    Usage,
)
from pipespec.server.response_stream import OutputDelta, ReplyFormat
from pipespec.text import Tokenizer, token_bytes, token_text

# JSON has no minus infinity; vLLM writes this instead.
MIN_LOGPROB = -9999.0
# The end of a stream.
DONE = b"data: [DONE]\n\n"
# A text that no model generates, and its JSON.
MARK = "\0"
MARK_JSON = json.dumps(MARK)


class OpenAIFormat(ReplyFormat):
    """The replies to one request of OpenAI's own interface.

    Args:
        usage: whether a stream reports token counts at its end.
        continuous: whether every chunk does, too.
        token_ids: whether replies have the token ids of prompts and answers.
        fingerprint: of the cluster's model and settings.
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
        token_ids: bool = False,
        fingerprint: str = "",
    ):
        super().__init__(request, tokenizer, model)
        self.id = f"{self.id_prefix}-{secrets.token_hex(16)}"
        self._usage, self._continuous = usage, usage and continuous
        self._with_ids = token_ids
        self._fingerprint = fingerprint or None
        # Whether the text of a delta is all that it adds to its message.
        self._only_text = not token_ids
        choices = request.sampling_params
        self._logprobs: list[list[tuple[int, TokenLogprobs]]] = [[] for _ in choices]
        self._prompt_logprobs: list[list[TokenLogprobs]] = [[] for _ in choices]
        self._token_ids: list[list[int]] = [[] for _ in choices]
        self._finish_reasons: list[FinishReason] = ["length" for _ in choices]
        # A chunk's JSON before and after its text, by choice.
        self._chunk_frames: dict[int, tuple[str, str]] = {}

    @property
    def shared(self) -> dict[str, Any]:
        """The fields that all replies and chunks have."""
        return {
            "id": self.id,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self._fingerprint,
        }

    @property
    def usage(self) -> Usage:
        """Token counts so far."""
        prompt, cached = self.request.prompt_tokens, self.num_cached
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=self.num_tokens,
            total_tokens=prompt + self.num_tokens,
            prompt_tokens_details=None
            if cached is None
            else PromptTokensDetails(cached_tokens=cached),
            completion_tokens_details=CompletionTokensDetails(reasoning_tokens=self.num_reasoning)
            if self.num_reasoning
            else None,
        )

    def add(self, delta: OutputDelta) -> None:
        self.count_tokens(delta)
        self._token_ids[delta.index] += delta.token_ids
        self._prompt_logprobs[delta.index] += delta.prompt_logprobs
        if delta.logprobs:
            self._logprobs[delta.index] += zip(delta.token_ids, delta.logprobs, strict=True)
        if delta.finish_reason:
            self._finish_reasons[delta.index] = delta.finish_reason

    # --- streams ------------------------------------------------------------------------------

    def first_events(self) -> Iterator[bytes]:
        for chunk in self.first_chunks():
            yield _event(chunk.model_dump_json())

    def events(self, delta: OutputDelta) -> Iterator[bytes]:
        for event in self.stream_events(delta):
            yield _event(event)

    def last_events(self) -> Iterator[bytes]:
        for chunk in self.last_chunks():
            yield _event(chunk.model_dump_json())
        yield DONE

    def failed(self, error: ApiError) -> Iterator[bytes]:
        yield _event(json.dumps(error.body))
        yield DONE

    def stream_events(self, delta: OutputDelta) -> Iterator[str]:
        """What a delta adds to a stream, as JSON.

        Nearly all chunks hold text and nothing else. They differ in the text alone, so the JSON
        around it is written once.
        """
        more = delta.logprobs or delta.prompt_logprobs or delta.finish_reason
        if self._continuous or more or not (delta.text and self._only_text):
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
    def first_chunks(self) -> Iterator[BaseModel]:
        """The beginning of a stream."""

    @abstractmethod
    def chunks(self, delta: OutputDelta) -> Iterator[BaseModel]:
        """What a delta adds to a stream."""

    @abstractmethod
    def last_chunks(self) -> Iterator[BaseModel]:
        """The end of a stream."""

    def _ids(self, token_ids: Sequence[int]) -> list[int] | None:
        """Token ids, if the request asks for them."""
        return [*token_ids] if self._with_ids else None

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

    def __init__(self, request: ParsedRequest, tokenizer: Tokenizer, model: str, **options: Any):
        super().__init__(request, tokenizer, model, **options)
        self._tool_use = request.tool_use
        plain = self._tool_use is None and request.reasoning is None
        self._only_text = self._only_text and plain
        self._answers = [
            AnswerBlocks(self._tool_use, request.reasoning) for _ in request.sampling_params
        ]

    def response(self) -> BaseModel:
        choices = [
            ChatChoice(
                index=i,
                message=self._message(i),
                logprobs=self._chat_logprobs(i, self._logprobs[i]),
                finish_reason=self._reason(i, self._finish_reasons[i]),
                token_ids=self._ids(self._token_ids[i]),
            )
            for i in range(len(self.request.sampling_params))
        ]
        return ChatReply(
            **self.shared,
            choices=choices,
            usage=self.usage,
            prompt_logprobs=self._prompt_report(0),
            prompt_token_ids=self._ids(self.request.prompts[0]),
        )

    def add(self, delta: OutputDelta) -> None:
        super().add(delta)
        self._push(delta)

    def _push(self, delta: OutputDelta) -> list[BlockDelta]:
        """What a delta adds to the blocks of its answer."""
        answer = self._answers[delta.index]
        added = answer.push(delta.text, last=delta.finish_reason is not None)
        if self.request.reasoning is not None and answer.thinking:
            self.num_reasoning += len(delta.token_ids)
        return added

    def first_chunks(self) -> Iterator[BaseModel]:
        for i in range(len(self.request.sampling_params)):
            prompt = self._ids(self.request.prompts[0]) if i == 0 else None
            yield self._chunk(i, Delta(role="assistant", content=""), prompt_token_ids=prompt)

    def chunks(self, delta: OutputDelta) -> Iterator[BaseModel]:
        self.count_tokens(delta)
        choice, reason = delta.index, delta.finish_reason
        parts = [_message_delta(each) for each in self._push(delta)]
        logprobs = self._delta_logprobs(delta)
        token_ids = self._ids(delta.token_ids) if delta.token_ids else None
        if (delta.logprobs or token_ids) and not parts:
            parts = [Delta(content="")]
        for part in parts:
            yield self._chunk(choice, part, logprobs, token_ids=token_ids)
            logprobs = token_ids = None  # only the first chunk has them
        if reason:
            yield self._chunk(choice, Delta(), reason=self._reason(choice, reason))

    def last_chunks(self) -> Iterator[BaseModel]:
        if self._usage:
            yield ChatChunk(**self.shared, choices=[], usage=self.usage)

    def _message(self, choice: int) -> ChatMessage:
        answer = self._answers[choice]
        calls, text = answer.calls, answer.text_of("text")
        thought = answer.text_of("reasoning") or None
        if not calls:
            return ChatMessage(content=text, reasoning_content=thought)
        tool_calls = [
            ToolCall(id=call.id, function=FunctionCall(name=call.name, arguments=call.text))
            for call in calls
        ]
        return ChatMessage(content=text or None, reasoning_content=thought, tool_calls=tool_calls)

    def _reason(self, choice: int, reason: FinishReason) -> FinishReason:
        """The reason of an answer with calls that ended by itself is "tool_calls", but "stop" if
        the client named the function, as with OpenAI."""
        named = self._tool_use is not None and self._tool_use.named
        if reason == "stop" and not named and self._answers[choice].calls:
            return "tool_calls"
        return reason

    def _chunk(
        self,
        choice: int,
        delta: Delta,
        logprobs: ChatLogprobs | None = None,
        reason: FinishReason | None = None,
        token_ids: list[int] | None = None,
        prompt_token_ids: list[int] | None = None,
    ) -> BaseModel:
        part = ChunkChoice(
            index=choice,
            delta=delta,
            logprobs=logprobs,
            finish_reason=reason,
            token_ids=token_ids,
        )
        return ChatChunk(
            **self.shared,
            choices=[part],
            usage=self._continuous_usage(),
            prompt_token_ids=prompt_token_ids,
        )

    def _delta_logprobs(self, delta: OutputDelta) -> ChatLogprobs | None:
        tokens = zip(delta.token_ids, delta.logprobs, strict=False)
        return self._chat_logprobs(delta.index, [*tokens]) if delta.logprobs else None

    def _chat_logprobs(
        self, choice: int, tokens: Sequence[tuple[int, TokenLogprobs]]
    ) -> ChatLogprobs | None:
        if not self.wants_logprobs(choice):
            return None
        return ChatLogprobs(content=[token_logprob(self.tokenizer, *each) for each in tokens])


def token_logprob(tokenizer: Tokenizer, token: int, logprobs: TokenLogprobs) -> TokenLogprob:
    """What a reply reports of a token."""
    return TokenLogprob(
        **_top_logprob(tokenizer, token, logprobs.logprob).model_dump(),
        top_logprobs=[_top_logprob(tokenizer, *pair) for pair in logprobs.top],
    )


def _top_logprob(tokenizer: Tokenizer, token: int, logprob: float) -> TopLogprob:
    return TopLogprob(
        token=token_text(tokenizer, token),
        logprob=json_logprob(logprob),
        bytes=list(token_bytes(tokenizer, token)),
    )


def _message_delta(delta: BlockDelta) -> Delta:
    """What a delta adds to its message. The name of a call comes first, with empty arguments."""
    block = delta.block
    if block.kind == "text":
        return Delta(content=delta.text)
    if block.kind == "reasoning":
        return Delta(reasoning_content=delta.text)
    if delta.begins:
        call = ToolCallDelta(
            index=block.number,
            id=block.id,
            type="function",
            function=FunctionDelta(name=block.name, arguments=""),
        )
    else:
        call = ToolCallDelta(index=block.number, function=FunctionDelta(arguments=delta.text))
    return Delta(tool_calls=[call])


def _event(data: str) -> bytes:
    return f"data: {data}\n\n".encode()
