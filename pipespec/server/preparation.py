"""From the body of a request to a `ParsedRequest`: validated fields, token ids, a grammar.

A client decides how long this takes, so it runs in threads of its own (`PreparationPool`), and the
event loop, which serves every stream, only receives the result. Tokenizers release the GIL, and
grammars are checked in a process; templates and validators take turns with the loop. Parsing JSON
does not, and is bounded by `MAX_VALUES`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from http import HTTPStatus
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json, to_json

from pipespec.client.registry import RunningCluster
from pipespec.server.api_errors import ApiError, validation_failed
from pipespec.server.chat_prompt import render_chat
from pipespec.server.dialect import DialectBody, Translation, body_routes
from pipespec.server.options import ServerOptions
from pipespec.server.request_parsing import ParsedRequest, RequestParser
from pipespec.server.request_schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
)
from pipespec.text import decode

Body = TypeVar("Body", bound=BaseModel)
# Commas and brackets of a body, and brackets that open something, beside so many per token of the
# context: a call that parses JSON lets no other thread run.
MAX_VALUES, MAX_CONTAINERS = 2**18, 2**15
TOO_COMPLEX = "request_too_complex"
# Characters, and tokens of a prompt without text, that a preview has at most.
PREVIEW_LENGTH = 120
PREVIEW_TOKENS = 40


@dataclass(frozen=True)
class PreparedRequest:
    """A request for text, and how it is to be answered: under which name of the model, whether as a
    stream, and with what options of the format. `preview` is the beginning of the last message of
    the user, or of the prompt."""

    parsed: ParsedRequest
    model: str | None
    stream: bool
    options: Mapping[str, Any] = field(default_factory=dict)
    preview: str = ""


# A text: the request cannot be prepared without what was kept under this id; bytes: the reply.
Prepared = PreparedRequest | str | bytes


class PreparationPool:
    """Up to `most` threads, each of which prepares one request at a time; if they are three or
    more, one tenant leaves one to others.

    A request that takes more than `limit_s` seconds is refused. Its thread goes on to its end.
    """

    def __init__(self, most: int, limit_s: float):
        self._limit_s = limit_s
        self._threads = ThreadPoolExecutor(most, thread_name_prefix="preparation")
        self._free = asyncio.Semaphore(most)
        self._most_of_one = max(most - 1, min(most, 2))
        self._gates: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    def warm_up(self, preparer: Preparer) -> Future[Preparer]:
        return self._threads.submit(preparer.warmed_up)

    async def prepare(
        self,
        preparer: Future[Preparer],
        path: str,
        body: bytes,
        kept: bytes | None = None,
        *,
        tenant: str = "",
    ) -> Prepared:
        ready = await asyncio.shield(asyncio.wrap_future(preparer))
        gate = self._gates.setdefault(tenant, asyncio.Semaphore(self._most_of_one))
        async with AsyncExitStack() as unless_begun:
            await gate.acquire()
            unless_begun.callback(gate.release)
            await self._free.acquire()
            unless_begun.pop_all()
        work = asyncio.get_running_loop().run_in_executor(
            self._threads, ready.prepare, path, body, kept
        )
        work.add_done_callback(partial(self._finished, gate))
        if not (await asyncio.wait({work}, timeout=self._limit_s))[0]:
            why = (
                f"The request takes more than {self._limit_s:g} s to prepare; shorten it, or "
                "simplify the structured output."
            )
            raise ApiError(HTTPStatus.BAD_REQUEST, why, code=TOO_COMPLEX)
        return work.result()

    def close(self) -> None:
        """End the threads once they are done; requests that no thread has begun fail."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _finished(self, gate: asyncio.Semaphore, work: asyncio.Future[Prepared]) -> None:
        self._free.release()
        gate.release()
        if not work.cancelled():
            work.exception()  # no longer awaited, if it took too long


class Preparer:
    """Prepares the requests to one server, also several at a time."""

    def __init__(self, running: RunningCluster, options: ServerOptions):
        self._names = options.names
        self._served = running.served
        # It changes when the model or settings of the cluster do.
        parts = json.dumps([running.served.target, *running.overrides]).encode()
        self._fingerprint = f"fp_{hashlib.sha256(parts).hexdigest()[:10]}"
        self._parser = RequestParser(running, options.tool_call_parser)

    def warmed_up(self) -> Preparer:
        """The same, with its tokenizer built before any request is timed."""
        self._served.tokenizer.encode("a")
        return self

    def prepare(self, path: str, body: bytes, kept: bytes | None = None) -> Prepared:
        """Prepare the body of a request to a route; if nothing is to be generated, the result is
        the whole reply, as JSON. `kept` is what was kept of the reply that it continues, empty if
        nothing was, None before that was looked up. Raises ApiError."""
        fields = self._fields(body_routes()[path].body, body)
        if isinstance(fields, GenerationRequest):
            return self._prepared(fields, self._of_openai(fields))
        if isinstance(fields, DialectBody):
            fields.resolve_model(self._names)
        check_model(self._names, fields.model)
        if isinstance(fields, TokenizeRequest):
            return self._tokenize(fields)
        if isinstance(fields, DetokenizeRequest):
            return self._detokenize(fields)
        assert isinstance(fields, DialectBody)
        if fields.continues is not None and kept is None:
            return fields.continues
        made = fields.translated(kept or b"")
        if made.reply is not None:
            return made.reply(self._served)
        kind = CompletionRequest if "prompt" in made.fields else ChatRequest
        try:
            return self._prepared(validated(kind, made.fields), made)
        except ApiError as error:
            raise fields.explained(error) from None

    def _of_openai(self, fields: GenerationRequest) -> Translation:
        """What a request says of its reply that is in OpenAI's words already."""
        wanted = fields.stream_options
        options = {
            "usage": bool(wanted and wanted.include_usage),
            "continuous": bool(wanted and wanted.continuous_usage_stats),
            "token_ids": bool(fields.return_token_ids),
            "fingerprint": self._fingerprint,
        }
        return Translation(stream=bool(fields.stream), options=options)

    def _prepared(self, fields: GenerationRequest, made: Translation) -> PreparedRequest | bytes:
        check_model(self._names, fields.model)
        if made.counts:
            assert isinstance(fields, ChatRequest)
            return made.counts(self._parser.count_tokens(fields))
        parsed = self._parser.parse(fields, clamps=made.clamps)
        if made.stream and parsed.reasoning is not None:
            parsed = replace(parsed, reasoning=parsed.reasoning.for_stream())
        preview = self._preview(fields)
        return PreparedRequest(parsed, fields.model, made.stream, made.options, preview)

    def _preview(self, fields: GenerationRequest) -> str:
        text: str | list[int] = ""
        if isinstance(fields, CompletionRequest):
            text = fields.prompt[0]
        elif isinstance(fields, ChatRequest):
            asked = (each.text for each in reversed(fields.messages) if each.role == "user")
            text = next(filter(None, asked), "")
        if not isinstance(text, str):
            text = decode(self._served.tokenizer, text[:PREVIEW_TOKENS], special=True)
        return text[:PREVIEW_LENGTH]

    def _fields(self, kind: type[Body], body: bytes) -> Body:
        if not body:
            raise ApiError(HTTPStatus.BAD_REQUEST, "The body is empty; send a JSON object.")
        context = self._served.context
        num_containers = body.count(b"{") + body.count(b"[")
        num_values = body.count(b",") + num_containers
        if num_values > MAX_VALUES + 2 * context or num_containers > MAX_CONTAINERS + context // 4:
            why = f"The body holds too many values: {num_values} commas and brackets; send less."
            raise ApiError(HTTPStatus.BAD_REQUEST, why, code=TOO_COMPLEX)
        try:
            fields = from_json(body)
        except ValueError as error:  # also where it is no UTF-8, or holds half a character
            why = f"The body is no JSON in UTF-8: {error}."
            raise ApiError(HTTPStatus.BAD_REQUEST, why) from None
        return validated(kind, fields)

    def _tokenize(self, fields: TokenizeRequest) -> bytes:
        served = self._served
        special = fields.add_special_tokens is not False
        text = fields.content if fields.prompt is None else fields.prompt
        if fields.messages is not None:
            text = render_chat(served, fields, fields.tools or ())
            special = bool(fields.add_special_tokens)  # the template writes its own
        ids = served.tokenizer.encode(text or "", add_special_tokens=special)
        strings = None
        if fields.return_token_strs:
            strings = [served.tokenizer.convert_ids_to_tokens(token) or "" for token in ids]
        counts = {"count": len(ids), "max_model_len": served.context}
        return to_json({**counts, "tokens": ids, "token_strs": strings})

    def _detokenize(self, fields: DetokenizeRequest) -> bytes:
        self._parser.check_tokens(fields.tokens, "tokens")
        text = decode(self._served.tokenizer, fields.tokens, special=True)
        return to_json({"prompt": text, "content": text})  # vLLM's name and llama.cpp's


def check_model(names: Sequence[str], name: str | None) -> None:
    """Raise ApiError unless a model is served under this name; None: the request names none."""
    if name is not None and name not in names:
        raise ApiError(
            HTTPStatus.NOT_FOUND,
            f"The model {name[:100]!r} is not served here; ask for {', '.join(names)}.",
            param="model",
            code="model_not_found",
        )


def validated(kind: type[Body], fields: Any) -> Body:
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise validation_failed([{**first, "loc": _place(first["loc"], fields)}]) from None


def _place(place: tuple[int | str, ...], value: Any) -> tuple[int | str, ...]:
    """Where an error is in a body, without the names of alternatives that pydantic tried there."""
    found: list[int | str] = []
    for number, part in enumerate(place, 1):
        if isinstance(value, dict) and (part in value or number == len(place)):
            found.append(part)
            value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int):
            found.append(part)
            value = value[part]
    return tuple(found)
