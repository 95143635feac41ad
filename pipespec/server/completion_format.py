"""The replies of /v1/completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from pydantic import BaseModel

from pipespec.core import TokenLogprobs
from pipespec.server.openai_format import OpenAIFormat, json_logprob
from pipespec.server.request_parsing import ParsedRequest
from pipespec.server.response_schema import (
    CompletionAnswer,
    CompletionChoice,
    CompletionChunk,
    CompletionLogprobs,
    CompletionReply,
    FinishReason,
)
from pipespec.server.response_stream import OutputDelta
from pipespec.text import REPLACEMENT, Tokenizer, token_bytes, token_offsets, token_text

# A token of a completion's text and its log-probabilities; a prompt's first token has none.
ScoredToken = tuple[int, TokenLogprobs | None]


class CompletionFormat(OpenAIFormat):
    """The replies of /v1/completions."""

    id_prefix = "cmpl"

    def __init__(self, request: ParsedRequest, tokenizer: Tokenizer, model: str, **options: Any):
        super().__init__(request, tokenizer, model, **options)
        # Where the next token begins in each answer's text.
        self._offsets = [len(self._echo(i)) for i in range(len(request.sampling_params))]
        self._begun = [False for _ in request.sampling_params]  # whether a chunk was sent
        self._texts: list[list[str]] = [[] for _ in request.sampling_params]

    def response(self) -> BaseModel:
        choices = [
            CompletionAnswer(
                index=i,
                text=self._echo(i) + "".join(texts),
                logprobs=self._all_logprobs(i),
                finish_reason=self._finish_reasons[i],
                prompt_logprobs=self._prompt_report(i),
                prompt_token_ids=self._ids(self.request.prompt_of(i)),
                token_ids=self._ids(self._token_ids[i]),
            )
            for i, texts in enumerate(self._texts)
        ]
        return CompletionReply(**self.shared, choices=choices, usage=self.usage)

    def add(self, delta: OutputDelta) -> None:
        super().add(delta)
        self._texts[delta.index].append(delta.text)

    def first_chunks(self) -> Iterator[BaseModel]:
        for i in range(len(self.request.sampling_params)):
            yield from self._echo_chunks(i)

    def chunks(self, delta: OutputDelta) -> Iterator[BaseModel]:
        self.count_tokens(delta)
        if delta.prompt_logprobs:
            self._prompt_logprobs[delta.index] += delta.prompt_logprobs
            yield from self._echo_chunks(delta.index)
        token_ids = self._ids(delta.token_ids) if delta.token_ids else None
        if delta.text or delta.logprobs or delta.finish_reason or token_ids:
            logprobs = None
            if delta.logprobs:
                tokens = [*zip(delta.token_ids, delta.logprobs, strict=False)]
                logprobs = self._report(*self._answer_tokens(delta.index, tokens))
            yield self._choice_chunk(
                delta.index, delta.text, logprobs, delta.finish_reason, token_ids
            )

    def last_chunks(self) -> Iterator[BaseModel]:
        if self._usage:
            yield CompletionChunk(**self.shared, choices=[], usage=self.usage)

    def _echo(self, choice: int) -> str:
        texts = self.request.echo_texts
        return texts[choice // self.request.n] if texts else ""

    def _echo_chunks(self, choice: int) -> Iterator[BaseModel]:
        """The prompt, if the request wants it echoed, once all its log-probabilities are known."""
        if not self.request.echo_texts:
            return
        if not self.wants_logprobs(choice):
            yield self._choice_chunk(choice, self._echo(choice))
        elif len(self._prompt_logprobs[choice]) == len(self.request.prompt_of(choice)) - 1:
            logprobs = self._report(*self._prompt_tokens(choice))
            yield self._choice_chunk(choice, self._echo(choice), logprobs)

    def _choice_chunk(
        self,
        choice: int,
        text: str,
        logprobs: CompletionLogprobs | None = None,
        reason: FinishReason | None = None,
        token_ids: list[int] | None = None,
    ) -> BaseModel:
        """A chunk; the first one of an answer has the prompt's token ids too, if they are asked
        for."""
        prompt = None if self._begun[choice] else self._ids(self.request.prompt_of(choice))
        self._begun[choice] = True
        part = CompletionChoice(
            index=choice,
            text=text,
            logprobs=logprobs,
            finish_reason=reason,
            prompt_token_ids=prompt,
            token_ids=token_ids,
        )
        return CompletionChunk(**self.shared, choices=[part], usage=self._continuous_usage())

    def _all_logprobs(self, choice: int) -> CompletionLogprobs | None:
        if not self.wants_logprobs(choice):
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
        offsets = []
        for token, _ in tokens:
            offsets.append(self._offsets[choice])
            self._offsets[choice] += len(token_text(self.tokenizer, token))
        return offsets, [*tokens]

    def _prompt_tokens(self, choice: int) -> tuple[list[int], list[ScoredToken]]:
        """The same for a prompt, with as many top log-probabilities as the answer has."""
        request = self.request
        ids, most = request.prompt_of(choice), request.sampling_params[choice].logprobs
        scored = [replace(each, top=each.top[:most]) for each in self._prompt_logprobs[choice]]
        offsets = token_offsets(self.tokenizer, ids, self._echo(choice))
        return offsets, [*zip(ids, (None, *scored), strict=True)]

    def _report(self, offsets: list[int], tokens: Sequence[ScoredToken]) -> CompletionLogprobs:
        names = [self._name(token) for token, _ in tokens]
        values = [None if scored is None else json_logprob(scored.logprob) for _, scored in tokens]
        top: list[dict[str, float] | None] = []
        for name, value, (_, scored) in zip(names, values, tokens, strict=True):
            if scored is None or value is None:
                top.append(None)
            else:
                likely = {self._name(id_): json_logprob(other) for id_, other in scored.top}
                top.append(likely | {name: value})
        return CompletionLogprobs(
            text_offset=offsets, token_logprobs=values, tokens=names, top_logprobs=top
        )

    def _name(self, token: int) -> str:
        """A token's text; the bytes of one that is part of a character, as OpenAI writes them."""
        text = token_text(self.tokenizer, token)
        if REPLACEMENT not in text:
            return text
        raw = token_bytes(self.tokenizer, token)
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
