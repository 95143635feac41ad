"""What a server does for each of its routes."""

from __future__ import annotations

from contextlib import AsyncExitStack
from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import Response

from pipespec.client.aio import AsyncClient
from pipespec.controller.overview import Overview
from pipespec.engine.grammar import Grammars
from pipespec.errors import PipespecError, Unreachable
from pipespec.server import asking, prompts
from pipespec.server.answering import Answering
from pipespec.server.asking import Ask, Defaults
from pipespec.server.chat import Chat
from pipespec.server.completion import Completion
from pipespec.server.dashboard import Dashboard
from pipespec.server.errors import ApiError, Ending, away, of, refused
from pipespec.server.fields import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
)
from pipespec.server.metrics import Metrics
from pipespec.server.options import ServerOptions
from pipespec.server.queueing import Place, Queue
from pipespec.server.replies import (
    DetokenizeReply,
    ModelCard,
    ModelList,
    TokenizeReply,
    TokenizerInfo,
)
from pipespec.server.sending import EventStream, whole
from pipespec.server.shaping import Shape
from pipespec.server.tool_chat import ToolChat
from pipespec.text import token_text


class Service:
    """One server's requests to one cluster. Nothing is kept between requests but figures."""

    def __init__(self, client: AsyncClient, options: ServerOptions):
        self.client = client
        self.options = options
        self.queue = Queue(options.max_queued_requests, options.max_queued_tokens)
        self.metrics = Metrics(options.names[0])
        self._running = client.running
        self._defaults = Defaults.of(client.running)
        self._grammars = client.served.grammars()
        self._open: set[Answering] = set()
        self.dashboard = Dashboard(client, self.metrics, self.look)

    @property
    def defaults(self) -> Defaults:
        """Of the cluster that is asked now."""
        self._look_who_runs()
        return self._defaults

    @property
    def grammars(self) -> Grammars:
        """Of the model that is asked now."""
        self._look_who_runs()
        return self._grammars

    def _look_who_runs(self) -> None:
        if self._running is not self.client.running:
            self._running = self.client.running
            self._defaults = Defaults.of(self._running)
            self._grammars = self._running.served.grammars()

    # --- text ---------------------------------------------------------------------------------

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """POST /v1/chat/completions. Raises ApiError."""
        with self._place(body) as place:
            parser = self.options.tool_call_parser
            served, defaults = self.client.served, self.defaults
            ask = await asking.chat(body, served, defaults, self.grammars, parser)
            kind = Chat if ask.tools is None else ToolChat
            return await self._answer(ask, self._shape(kind, ask, body), place, body, request)

    async def complete(self, body: CompletionRequest, request: Request) -> Response:
        """POST /v1/completions. Raises ApiError."""
        with self._place(body) as place:
            served, defaults = self.client.served, self.defaults
            ask = await asking.completion(body, served, defaults, self.grammars)
            return await self._answer(ask, self._shape(Completion, ask, body), place, body, request)

    def drain(self) -> None:
        """The server is about to end: whoever watches is let go."""
        self.dashboard.end()

    def end(self) -> None:
        """Whoever still waits for an answer is told that there will be none."""
        for answering in self._open:
            answering.interrupt(Ending())

    def _place(self, body: GenerationRequest) -> Place:
        self.check_model(body.model)
        asking.check_supported(body)
        if self.client.away:
            raise away()
        return self.queue.take(asking.num_choices(body))

    def _shape(self, kind: type[Shape], ask: Ask, body: GenerationRequest) -> Shape:
        options = body.stream_options
        return kind(
            ask,
            self.client.served.tokenizer,
            body.model or self.options.names[0],
            usage=bool(options and options.include_usage),
            continuous=bool(options and options.continuous_usage_stats),
        )

    async def _answer(
        self, ask: Ask, shape: Shape, place: Place, body: GenerationRequest, request: Request
    ) -> Response:
        place.hold(ask.prompt_tokens * ask.n)
        answering = Answering(self.client, ask, place.handed_on(), self.metrics, self._open.discard)
        self._open.add(answering)
        async with AsyncExitStack() as unless_begun:
            unless_begun.push_async_callback(answering.close)
            try:
                await answering.begin()
            except PipespecError as error:
                raise of(error) from error
            unless_begun.pop_all()
        if body.stream:
            return EventStream(answering, shape)
        return await whole(answering, shape, request)

    # --- models and tokens --------------------------------------------------------------------

    def check_model(self, name: str | None) -> None:
        """Raise ApiError unless this model is served."""
        if name is not None and name not in self.options.names:
            names = ", ".join(self.options.names)
            raise ApiError(
                HTTPStatus.NOT_FOUND,
                f"The model {name[:100]!r} is not served here; ask for {names}.",
                param="model",
                code="model_not_found",
            )

    def models(self) -> ModelList:
        """GET /v1/models."""
        return ModelList(data=[self.card(name) for name in self.options.names])

    def model(self, name: str) -> ModelCard:
        """GET /v1/models/{name}. Raises ApiError."""
        self.check_model(name)
        return self.card(name)

    def card(self, name: str) -> ModelCard:
        """What is told of a model."""
        return ModelCard(
            id=name,
            created=int(self.client.running.started),
            owned_by="pipespec",
            root=self.options.names[0],
            max_model_len=self.client.served.context,
        )

    async def tokenize(self, body: TokenizeRequest) -> TokenizeReply:
        """POST /tokenize. Raises ApiError."""
        self.check_model(body.model)
        served = self.client.served
        given = [n for n in ("prompt", "content", "messages") if getattr(body, n) is not None]
        if len(given) != 1:
            raise refused("prompt", "prompt, content or messages must be given, one of them.")
        special = body.add_special_tokens is not False
        text = body.content if body.prompt is None else body.prompt
        if body.messages is not None:
            answering = body.add_generation_prompt is not False
            tools = body.tools or ()
            text = prompts.conversation(served, body.messages, tools, answering=answering)
            special = bool(body.add_special_tokens)  # the template writes its own
        ids = await prompts.tokens(served, text or "", special=special)
        names = None
        if body.return_token_strs:
            names = [served.tokenizer.convert_ids_to_tokens(token) or "" for token in ids]
        return TokenizeReply(
            count=len(ids), max_model_len=served.context, tokens=ids, token_strs=names
        )

    def detokenize(self, body: DetokenizeRequest) -> DetokenizeReply:
        """POST /detokenize. Raises ApiError."""
        self.check_model(body.model)
        served = self.client.served
        for token in body.tokens:
            prompts.check_token(served, token, "tokens")
        text = prompts.decoded(served, body.tokens)
        return DetokenizeReply(prompt=text, content=text)

    def tokenizer_info(self) -> TokenizerInfo:
        """GET /tokenizer_info."""
        served = self.client.served
        backend = served.backend
        return TokenizerInfo(
            vocab_size=served.vocab_size,
            model_max_length=served.context,
            eos_token_ids=list(served.eos),
            eos_tokens=[token_text(served.tokenizer, token) for token in served.eos],
            chat_template=served.tokenizer.chat_template,
            special_tokens=dict(backend.special_tokens) if backend else {},
        )

    # --- how it is doing ----------------------------------------------------------------------

    async def look(self) -> Overview | None:
        """How the cluster is doing; None if it does not answer."""
        if self.client.away:
            return None
        try:
            return await self.client.look()
        except Unreachable:
            return None

    async def health(self) -> None:
        """GET /health. Raises ApiError unless requests are answered."""
        if await self.look() is None:
            raise away()

    async def figures(self) -> bytes:
        """GET /metrics."""
        return self.metrics.show(await self.look())
