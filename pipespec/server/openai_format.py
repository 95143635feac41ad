"""From the tokens of answers to the replies of OpenAI's chats and completions, whole or in chunks.

Above 350 lines, as both share what they report of tokens.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from pipespec.core import TokenLogprobs
from pipespec.server.api_errors import ApiError
from pipespec.server.reply_format import BlockDelta, OutputDelta, ReplyFormat, given, sse
from pipespec.text import (
    REPLACEMENT,
    Tokenizer,
    TokenOffsets,
    token_bytes,
    token_text,
)

# JSON has no minus infinity; vLLM writes this instead.
MIN_LOGPROB = -9999.0
# The end of a stream.
DONE = b"data: [DONE]\n\n"
# The fields of messages that have the texts of blocks, by their kinds.
TEXT_FIELDS = {"text": "content", "reasoning": "reasoning_content"}
# A token of a completion's text and its log-probabilities; a prompt's first token has none.
ScoredToken = tuple[int, TokenLogprobs | None]


class OpenAIFormat(ReplyFormat):
    """The replies to one request of OpenAI's own interface: streams have `usage` at their end or
    continuously, and replies token ids, if the request asks for them."""

    id_prefix: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(
        self,
        *answered: Any,
        usage: bool = False,
        continuous: bool = False,
        token_ids: bool = False,
        fingerprint: str = "",
    ):
        super().__init__(*answered)
        self._usage, self._continuous = usage, usage and continuous
        self._with_ids = token_ids
        id_ = f"{self.id_prefix}-{secrets.token_hex(16)}"
        # The fields that all replies and chunks have.
        self.shared = {"id": id_, "created": self.created, "model": self.model}
        if fingerprint:
            self.shared["system_fingerprint"] = fingerprint
        choices = self.request.sampling_params
        self._logprobs: list[list[tuple[int, TokenLogprobs]]] = [[] for _ in choices]
        self._prompt_logprobs: list[list[TokenLogprobs]] = [[] for _ in choices]
        self._token_ids: list[list[int]] = [[] for _ in choices]

    @property
    def usage(self) -> dict[str, Any]:
        prompt = self.request.prompt_tokens
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": self.num_tokens,
            "total_tokens": prompt + self.num_tokens,
        }
        if self.num_cached is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.num_cached}
        if self.num_reasoning:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.num_reasoning}
        return usage

    def add(self, delta: OutputDelta) -> None:
        self.take(delta)
        self._token_ids[delta.index] += delta.token_ids
        self._prompt_logprobs[delta.index] += delta.prompt_logprobs
        self._logprobs[delta.index] += scored_tokens(delta)

    # --- streams ------------------------------------------------------------------------------

    def last_events(self) -> Iterator[bytes]:
        if self._usage:
            yield sse({**self._chunk(), "usage": self.usage})
        yield DONE

    def failed(self, error: ApiError) -> Iterator[bytes]:
        yield sse(error.body)
        yield DONE

    def _chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        usage = self.usage if self._continuous else None
        return {**self.shared, "object": self.chunk_object, "choices": choices, "usage": usage}

    def _part(
        self,
        choice: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        reason: str | None = None,
        **fields: Any,
    ) -> bytes:
        part = {**delta, "logprobs": logprobs, "finish_reason": reason, **fields}
        return sse(self._chunk({"index": choice, **part}))

    def _reason(self, choice: int) -> Any:
        end = self.ends[choice]
        return "length" if end is None else end.finish_reason

    def _ids(self, token_ids: Sequence[int]) -> list[int] | None:
        return [*token_ids] if self._with_ids else None

    def _prompt_ids(self, choice: int) -> dict[str, Any]:
        return given(prompt_token_ids=self._ids(self.request.prompt_of(choice)))

    def _new_ids(self, delta: OutputDelta) -> dict[str, Any]:
        return {"token_ids": delta.token_ids} if self._with_ids and delta.token_ids else {}

    def _prompt_report(self, choice: int) -> list[dict[str, Any] | None] | None:
        most = self.request.prompt_logprobs
        if most is None:
            return None
        report: list[dict[str, Any] | None] = [None]
        ids = self.request.prompt_of(choice)[1:]
        for token, logprobs in zip(ids, self._prompt_logprobs[choice], strict=True):
            ranks = {id_: rank for rank, (id_, _) in enumerate(logprobs.top, 1)}
            reported = {token: logprobs.logprob} | dict(logprobs.top[:most])
            report.append(
                {
                    str(id_): {
                        "logprob": json_logprob(value),
                        "rank": ranks.get(id_),
                        "decoded_token": token_text(self.tokenizer, id_),
                    }
                    for id_, value in reported.items()
                }
            )
        return report


class ChatFormat(OpenAIFormat):
    """The replies of /v1/chat/completions."""

    id_prefix, chunk_object = "chatcmpl", "chat.completion.chunk"

    def response(self) -> dict[str, Any]:
        choices = [
            {
                "index": i,
                "message": self._message(i),
                "logprobs": self._reported(self._logprobs[i]),
                "finish_reason": self._reason(i),
                **given(token_ids=self._ids(self._token_ids[i])),
            }
            for i in range(len(self.answers))
        ]
        reply = {"object": "chat.completion", "choices": choices, "usage": self.usage}
        about_prompt = given(prompt_logprobs=self._prompt_report(0)) | self._prompt_ids(0)
        return {**self.shared, **reply, **about_prompt}

    def first_events(self) -> Iterator[bytes]:
        for i in range(len(self.answers)):
            first = {"delta": {"role": "assistant", "content": ""}, "logprobs": None}
            chunk = self._chunk({"index": i, **first, "finish_reason": None})
            yield sse(chunk if i else chunk | self._prompt_ids(i))

    def events(self, delta: OutputDelta) -> Iterator[bytes]:
        choice, parts = delta.index, self.take(delta)
        extra = self._new_ids(delta)
        if delta.logprobs:
            extra["logprobs"] = self._reported(scored_tokens(delta))
        if extra and not parts:
            yield self._part(choice, {"delta": {"content": ""}}, **extra)
        for part in parts:
            yield self._part(choice, {"delta": _message_delta(part)}, **extra)
            extra = {}  # only the first chunk has them
        if delta.finish_reason:
            yield self._part(choice, {"delta": {}}, reason=self._reason(choice))

    def _message(self, choice: int) -> dict[str, Any]:
        answer = self.answers[choice]
        text, thought = answer.text_of("text"), answer.text_of("reasoning")
        calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.text},
            }
            for call in answer.calls
        ]
        return {
            "role": "assistant",
            "content": text or (None if calls else ""),
            "refusal": None,
            **given(reasoning_content=thought or None, tool_calls=calls or None),
        }

    def _reason(self, choice: int) -> Any:
        """The reason of an answer with calls that ended by itself is "tool_calls", but "stop" if
        the client named the function, as with OpenAI."""
        reason, tool_use = super()._reason(choice), self.request.tool_use
        named = tool_use is not None and tool_use.named
        called = reason == "stop" and not named and self.answers[choice].calls
        return "tool_calls" if called else reason

    def _reported(self, tokens: Sequence[tuple[int, TokenLogprobs]]) -> dict[str, Any] | None:
        if not self.wants_logprobs:
            return None
        content = [token_logprob(self.tokenizer, *each) for each in tokens]
        return {"content": content, "refusal": None}


class CompletionFormat(OpenAIFormat):
    """The replies of /v1/completions."""

    id_prefix, chunk_object = "cmpl", "text_completion"

    def __init__(self, *answered: Any, **options: Any):
        super().__init__(*answered, **options)
        self._offsets = [
            TokenOffsets(self.tokenizer, self.request.prompt_of(i), len(self._echo(i)))
            for i in range(len(self.answers) if self.wants_logprobs else 0)
        ]
        self._begun = [False for _ in self.answers]  # whether a chunk was sent

    def response(self) -> dict[str, Any]:
        choices = [
            {
                "index": i,
                "text": self._echo(i) + answer.text_of("text"),
                "logprobs": self._all_logprobs(i),
                "finish_reason": self._reason(i),
                **given(prompt_logprobs=self._prompt_report(i)),
                **self._prompt_ids(i),
                **given(token_ids=self._ids(self._token_ids[i])),
            }
            for i, answer in enumerate(self.answers)
        ]
        reply = {"object": self.chunk_object, "choices": choices, "usage": self.usage}
        return self.shared | reply

    def first_events(self) -> Iterator[bytes]:
        for i in range(len(self.answers)):
            yield from self._echo_chunks(i)

    def events(self, delta: OutputDelta) -> Iterator[bytes]:
        self.take(delta)
        choice, text = delta.index, delta.text
        if delta.prompt_logprobs:
            self._prompt_logprobs[choice] += delta.prompt_logprobs
            yield from self._echo_chunks(choice)
        ids = self._new_ids(delta)
        if delta.logprobs or delta.finish_reason or ids or text:
            logprobs = None
            if delta.logprobs:
                logprobs = self._report(*self._answer_tokens(choice, scored_tokens(delta)))
            yield self._text(choice, text, logprobs, delta.finish_reason, **ids)

    def _echo(self, choice: int) -> str:
        texts = self.request.echo_texts
        return texts[choice // self.request.n] if texts else ""

    def _echo_chunks(self, choice: int) -> Iterator[bytes]:
        if not self.request.echo_texts:
            return
        if not self.wants_logprobs:
            yield self._text(choice, self._echo(choice))
        elif len(self._prompt_logprobs[choice]) == len(self.request.prompt_of(choice)) - 1:
            logprobs = self._report(*self._prompt_tokens(choice))
            yield self._text(choice, self._echo(choice), logprobs)

    def _text(
        self,
        choice: int,
        text: str,
        logprobs: dict[str, Any] | None = None,
        reason: str | None = None,
        **fields: Any,
    ) -> bytes:
        """A chunk; the first one of an answer has the prompt's token ids too, if they are asked
        for."""
        if not self._begun[choice]:
            fields |= self._prompt_ids(choice)
        self._begun[choice] = True
        return self._part(choice, {"text": text}, logprobs, reason, **fields)

    def _all_logprobs(self, choice: int) -> dict[str, Any] | None:
        if not self.wants_logprobs:
            return None
        offsets, tokens = self._answer_tokens(choice, self._logprobs[choice])
        if self.request.echo_texts:
            prompt_offsets, prompt_tokens = self._prompt_tokens(choice)
            offsets, tokens = prompt_offsets + offsets, prompt_tokens + tokens
        return self._report(offsets, tokens)

    def _answer_tokens(
        self, choice: int, tokens: Sequence[tuple[int, TokenLogprobs]]
    ) -> tuple[list[int], list[ScoredToken]]:
        """The offsets in the text of an answer's next tokens, and these tokens."""
        return [self._offsets[choice].push(token) for token, _ in tokens], [*tokens]

    def _prompt_tokens(self, choice: int) -> tuple[list[int], list[ScoredToken]]:
        """The same for a prompt, with as many top log-probabilities as the answer has."""
        request = self.request
        ids, most = request.prompt_of(choice), request.sampling_params[choice].logprobs
        scored = [replace(each, top=each.top[:most]) for each in self._prompt_logprobs[choice]]
        offsets = TokenOffsets(self.tokenizer, [], 0)
        return [*map(offsets.push, ids)], [*zip(ids, (None, *scored), strict=True)]

    def _report(self, offsets: list[int], tokens: Sequence[ScoredToken]) -> dict[str, Any]:
        names, values = [self._name(token) for token, _ in tokens], []
        top: list[dict[str, float] | None] = []
        for name, (_, scored) in zip(names, tokens, strict=True):
            values.append(None if scored is None else json_logprob(scored.logprob))
            likely = None
            if scored is not None:
                likely = {self._name(id_): json_logprob(other) for id_, other in scored.top}
                likely[name] = json_logprob(scored.logprob)
            top.append(likely)
        columns = {"tokens": names, "token_logprobs": values, "top_logprobs": top}
        return {"text_offset": offsets, **columns}

    def _name(self, token: int) -> str:
        """A token's text; the bytes of one that is part of a character, as OpenAI writes them."""
        text = token_text(self.tokenizer, token)
        if REPLACEMENT not in text:
            return text
        raw = token_bytes(self.tokenizer, token)
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def json_logprob(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)


def scored_tokens(delta: OutputDelta) -> list[tuple[int, TokenLogprobs]]:
    """The tokens of a delta with their log-probabilities; [] if it has none."""
    return [*zip(delta.token_ids, delta.logprobs, strict=False)]


def token_logprob(tokenizer: Tokenizer, token: int, logprobs: TokenLogprobs) -> dict[str, Any]:
    """What a reply reports of a token: its text, log-probability and bytes, and those of the most
    probable ones."""
    own, *top = (
        {
            "token": token_text(tokenizer, id_),
            "logprob": json_logprob(value),
            "bytes": [*token_bytes(tokenizer, id_)],
        }
        for id_, value in ((token, logprobs.logprob), *logprobs.top)
    )
    return {**own, "top_logprobs": top}


def _message_delta(delta: BlockDelta) -> dict[str, Any]:
    """What a delta adds to its message. The name of a call comes first, with empty arguments."""
    block = delta.block
    if block.kind != "call":
        return {TEXT_FIELDS[block.kind]: delta.text}
    call: dict[str, Any] = {"index": block.number, "function": {"arguments": delta.text}}
    if delta.begins:
        call |= {"id": block.id, "type": "function"}
        call["function"] = {"name": block.name, "arguments": ""}
    return {"tool_calls": [call]}
