"""What the server does for each of its routes: those that generate text, in every dialect, vLLM's
for tokens, and monitoring."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from collections import deque
from concurrent.futures import Future
from contextlib import AsyncExitStack, closing
from dataclasses import replace
from http import HTTPStatus
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from pipespec.client.async_client import AsyncClient
from pipespec.controller.cluster_status import ClusterStatus
from pipespec.errors import UnknownRequest, Unreachable
from pipespec.server.answer_record import AnswerRecord
from pipespec.server.api_errors import (
    ApiError,
    ServerShuttingDown,
    cluster_unavailable,
)
from pipespec.server.dialect import body_routes
from pipespec.server.http_protocol import network_of
from pipespec.server.metrics import Metrics
from pipespec.server.options import ServerOptions, body_limit
from pipespec.server.preparation import (
    PreparationPool,
    PreparedRequest,
    Preparer,
    check_model,
)
from pipespec.server.response_stream import (
    AdmissionQueue,
    CompletionEvents,
    RequestOrigin,
    ResponseStream,
    full_response,
    kept_name,
)
from pipespec.text import token_text

JSON = "application/json"
# The header of replies that names the request: its number in the cluster's log, and of several
# answers that of the first. `/events?request=` and `/requests/{request}/cancel` take it.
REQUEST_NUMBER = "X-Pipespec-Request"
MAX_AGENT = 120  # characters of a client's name for itself
# What is kept of the past, for pages that open later: an hour.
MOMENT_S, MAX_MOMENTS = 5.0, 720


class Moment(NamedTuple):
    """The counters of the cluster at a time of this process's clock, in seconds; None where it did
    not answer."""

    at: float
    tokens: int | None = None
    steps: int | None = None
    epoch: int | None = None
    last_fault: str | None = None


class OpenAIServing:
    """Answers the requests to one server with one cluster. Between requests it keeps only metrics,
    and `history`, what they were in the last hour.

    The methods that are routes raise ApiError, and PipespecError where the cluster does; their
    docstrings are in /openapi.json.

    With `private_prefixes`, only requests with the same API key share prefix-cache entries: cached
    tokens and times would reveal what others have sent. Their cache salt is an HMAC of the key and
    the client's own salt, and their tenant one of the key, under a secret of this process: the
    request log reveals nothing of a key, however short, and cannot be compared with what another
    server has written there. Without keys each address (`network_of`) is a tenant.
    """

    def __init__(self, client: AsyncClient, options: ServerOptions, pool: PreparationPool):
        self.client = client
        self.options = options
        self.queue = AdmissionQueue(options.max_queued_requests, options.max_queued_tokens)
        self.metrics = Metrics(options.names[0])
        self.history: deque[Moment] = deque(maxlen=MAX_MOMENTS)
        self._secret = secrets.token_bytes(32)
        self._pool = pool
        self._running = client.running
        self._newest_preparer = pool.warm_up(Preparer(client.running, options))
        self.open: set[ResponseStream] = set()  # those that are answered now
        self._record: AnswerRecord | None = None
        if options.answers:
            self._record = AnswerRecord(options.answers, client.served.target)
        self.ending = False  # whether streams without an end should end

    def fail_open_requests(self) -> None:
        """End all requests that have no complete answer with an error."""
        for stream in [*self.open]:
            stream.fail(ServerShuttingDown())

    # --- text ---------------------------------------------------------------------------------

    async def generate(self, path: str, request: Request) -> Response:
        """Answer a request to a route with a body, whole or as a stream."""
        prepared = await self._prepare(path, request)
        if isinstance(prepared, bytes):
            return Response(prepared, media_type=JSON)
        if self.client.away:
            raise cluster_unavailable()
        make_format = body_routes()[path].format
        assert make_format is not None, "it generates text"
        formatter = make_format(
            prepared.parsed,
            self.client.served.tokenizer,
            prepared.model or self.options.names[0],
            **prepared.options,
        )
        stream = await self._submit(prepared, request)
        if prepared.stream:
            reply: Response = CompletionEvents(stream, formatter)
        else:
            reply = await full_response(stream, formatter, request)
        reply.headers[REQUEST_NUMBER] = str(stream.numbers[0])
        return reply

    async def _prepare(self, path: str, request: Request) -> PreparedRequest | bytes:
        """Let a thread prepare the body, which has a place in the queue meanwhile. Raises
        ApiError."""
        body = await self._body(request)
        tenant = self._tenant(request)
        with closing(self.queue.admit(1, tenant=tenant)):
            prepared = await self._pool.prepare(self._preparer, path, body, tenant=tenant)
            if isinstance(prepared, str):
                kept = await self.kept(request, prepared) or b""
                prepared = await self._pool.prepare(self._preparer, path, body, kept, tenant=tenant)
                assert not isinstance(prepared, str)
            return prepared

    async def _body(self, request: Request) -> bytes:
        """A body up to its limit, by its declared and its real length. Raises ApiError."""
        most = self.options.max_body_bytes or body_limit(self.client.served.context)
        declared = request.headers.get("content-length", "")
        too_long = declared.isdigit() and int(declared) > most
        body = bytearray()
        if not too_long:
            async for chunk in request.stream():
                body += chunk
                if too_long := len(body) > most:
                    break
        if too_long:
            raise ApiError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"The body has more than {most} bytes; send less, or start the server with "
                "--limit max_body_bytes.",
            )
        return bytes(body)

    async def _submit(self, prepared: PreparedRequest, request: Request) -> ResponseStream:
        parsed = prepared.parsed
        # A client that gives a salt shares its text with no other.
        record = None if parsed.cache_salt else self._record
        parsed = replace(parsed, cache_salt=self._cache_salt(request, parsed.cache_salt))
        stream = ResponseStream(
            self.client,
            parsed,
            self.queue.admit(
                len(parsed.sampling_params),
                parsed.prompt_tokens * parsed.n,
                self._tenant(request),
            ),
            self.metrics,
            self.open.discard,
            RequestOrigin(
                request.client.host if request.client else "",
                request.headers.get("user-agent", "")[:MAX_AGENT],
                prepared.preview,
                request.state.api_key_digest,
            ),
            record,
        )
        self.open.add(stream)
        request.state.text = stream  # for the access log
        async with AsyncExitStack() as unless_submitted:
            unless_submitted.push_async_callback(stream.close)
            await stream.submit()
            unless_submitted.pop_all()
        return stream

    def _cache_salt(self, request: Request, cache_salt: str) -> str:
        """The salt under which a request shares prefix-cache entries; "": the common one."""
        if not self.options.private_prefixes:
            return cache_salt
        digest: bytes = request.state.api_key_digest  # of fixed length (`ApiKeyCheck`)
        return hmac.new(self._secret, digest + cache_salt.encode(), hashlib.sha256).hexdigest()

    def _tenant(self, request: Request) -> str:
        """Whose request it is: requests of different tenants are served fairly."""
        whose: bytes = request.state.api_key_digest
        whose = whose or network_of(request.client.host if request.client else "").encode()
        return hmac.new(self._secret, whose, hashlib.sha256).hexdigest()

    @property
    def _preparer(self) -> Future[Preparer]:
        if self._running is not self.client.running:
            self._running = self.client.running
            self._newest_preparer = self._pool.warm_up(Preparer(self._running, self.options))
        return self._newest_preparer

    # --- requests from before -----------------------------------------------------------------

    async def kept(self, request: Request, reply: str, *, forget: bool = False) -> Any:
        """What is kept (`ReplyFormat.kept`) under an id and the request's API key, or None; with
        `forget` it is kept no longer, and the result is whether it was. Raises Unreachable."""
        log = self.client.log
        look = log.forget_conversation if forget else log.conversation
        return await look(kept_name(reply, request.state.api_key_digest))

    async def cancel(self, number: int) -> None:
        if self.client.away:
            raise cluster_unavailable()
        try:
            await self.client.log.cancel(number)
        except UnknownRequest:
            message = f"There is no request {number}."
            raise ApiError(HTTPStatus.NOT_FOUND, message, param="request") from None

    # --- models and tokens --------------------------------------------------------------------

    async def models(self) -> dict[str, Any]:
        """The names under which the model is served."""
        return {"object": "list", "data": [self._model_card(name) for name in self.options.names]}

    async def model(self, name: str) -> dict[str, Any]:
        """The model of this name; `max_model_len` counts tokens of prompt and answer."""
        check_model(self.options.names, name)
        return self._model_card(name)

    def _model_card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": int(self.client.running.started),
            "owned_by": "pipespec",
            "root": self.options.names[0],
            "parent": None,
            "max_model_len": self.client.served.context,
        }

    async def tokenizer_info(self) -> dict[str, Any]:
        """The vocabulary, special tokens and chat template of the model."""
        served = self.client.served
        return {
            "vocab_size": served.vocab_size,
            "model_max_length": served.context,
            "eos_token_ids": served.eos,
            "eos_tokens": [token_text(served.tokenizer, token) for token in served.eos],
            "chat_template": served.chat_template(),
            "special_tokens": dict(served.tokenizer.special_tokens),
        }

    # --- monitoring ---------------------------------------------------------------------------

    async def cluster_status(self) -> ClusterStatus | None:
        """The state of the cluster; None if it does not answer."""
        if self.client.away:
            return None
        try:
            return await self.client.log.look()
        except Unreachable:
            return None

    async def keep_history(self) -> None:
        """Look at the cluster every `MOMENT_S`, until this is cancelled."""
        while True:
            moment = Moment(self.metrics.clock())
            if (seen := await self.cluster_status()) is not None:
                counts = (seen.totals["tokens"], seen.totals["steps"], seen.epoch, seen.last_fault)
                moment = Moment(moment.at, *counts)
            self.history.append(moment)
            await asyncio.sleep(MOMENT_S)

    async def health(self) -> dict[str, str]:
        """Whether the cluster answers requests, and its log can be written: 200 or 503."""
        if await self.cluster_status() is None:
            raise cluster_unavailable()
        await self.client.log.check_writable()
        return {"status": "ok"}
