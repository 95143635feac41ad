"""The routes."""

from __future__ import annotations

import importlib.metadata
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import FastAPI, Path, Query
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from pipespec.server.dashboard import LARGEST
from pipespec.server.errors import ApiError, ErrorReply, invalid, loading
from pipespec.server.fields import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from pipespec.server.guards import BodyLimit, Keys, check_origin
from pipespec.server.metrics import Metrics
from pipespec.server.options import ServerOptions
from pipespec.server.page_files import page_routes
from pipespec.server.replies import (
    CancelReply,
    ChatReply,
    CompletionReply,
    DetokenizeReply,
    ModelCard,
    ModelList,
    TokenizeReply,
    TokenizerInfo,
)
from pipespec.server.service import Service

STREAM: dict[str, Any] = {"text/event-stream": {}}  # its events are no JSON document
FAILURES: dict[int | str, dict[str, Any]] = {
    400: {"description": "A field is wrong or not supported"},
    401: {"description": "The API key is missing or wrong"},
    404: {"description": "The model is not served here"},
    413: {"description": "The body is too long"},
    429: {"description": "The queue is full"},
    500: {"description": "The cluster failed"},
    503: {"description": "The cluster is not ready"},
}
# FastAPI's word for what is 400 here.
UNPROCESSABLE = "422"


def make_app(service: Service) -> FastAPI:
    """The interface of OpenAI, and what operators want."""
    app = FastAPI(
        title="pipespec",
        version=version(),
        middleware=_guards(service.options),
        responses={code: {"model": ErrorReply, **told} for code, told in FAILURES.items()},
        docs_url=None,  # they load scripts from elsewhere
        redoc_url=None,
    )
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    _refusals(app)
    _texts(app, service)
    _models(app, service)
    _figures(app, service)
    _dashboard(app, service)
    return app


def make_loading_app(options: ServerOptions) -> Starlette:
    """What answers until there is a cluster: 503 on every route but `/metrics`."""
    metrics = Metrics(options.names[0])

    async def figures(_: Request) -> Response:
        return Response(metrics.show(None), media_type=CONTENT_TYPE_LATEST)

    error = loading()
    refusal = JSONResponse(error.reply, error.status, error.headers)
    routes = [*page_routes(), Route("/metrics", figures), Mount("/", refusal)]
    return Starlette(routes=routes, middleware=_guards(options))


def _guards(options: ServerOptions) -> list[Middleware]:
    guards = [Middleware(Keys, options.api_keys), Middleware(BodyLimit, options.max_body_bytes)]
    if options.allowed_origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=list(options.allowed_origins),
            allow_methods=["*"],
            allow_headers=["*"],
        )
        guards.insert(0, cors)
    return guards


def version() -> str:
    """Of the package."""
    return importlib.metadata.version("pipespec")


def _texts(app: FastAPI, service: Service) -> None:
    @app.post(
        "/v1/chat/completions",
        response_model=None,
        responses={200: {"model": ChatReply, "content": STREAM}},
    )
    @app.post("/chat/completions", include_in_schema=False)
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await service.chat(body, request)

    @app.post(
        "/v1/completions",
        response_model=None,
        responses={200: {"model": CompletionReply, "content": STREAM}},
    )
    @app.post("/completions", include_in_schema=False)
    async def complete(body: CompletionRequest, request: Request) -> Response:
        return await service.complete(body, request)


def _models(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models")
    @app.get("/models", include_in_schema=False)
    async def models() -> ModelList:
        return service.models()

    @app.get("/v1/models/{name:path}")
    @app.get("/models/{name:path}", include_in_schema=False)
    async def model(name: str) -> ModelCard:
        return service.model(name)

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> TokenizeReply:
        return await service.tokenize(body)

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> DetokenizeReply:
        return service.detokenize(body)

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> TokenizerInfo:
        return service.tokenizer_info()


def _figures(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        await service.health()
        return {"status": "ok"}

    @app.get("/version")
    async def of_package() -> dict[str, str]:
        return {"version": version()}

    @app.get("/load")
    async def load() -> dict[str, int]:
        return {"server_load": service.metrics.unfinished}

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        return Response(await service.figures(), media_type=CONTENT_TYPE_LATEST)


def _dashboard(app: FastAPI, service: Service) -> None:
    app.router.routes.extend(page_routes())

    @app.get("/events", include_in_schema=False, response_model=None)
    async def events(request: Annotated[int | None, Query(ge=1, le=LARGEST)] = None) -> Response:
        return service.dashboard.watch(request)

    @app.post("/requests/{request}/cancel", responses={403: {"model": ErrorReply}})
    async def cancel(
        request: Annotated[int, Path(ge=1, le=LARGEST)], asked: Request
    ) -> CancelReply:
        check_origin(asked.headers, service.options.allowed_origins)
        await service.dashboard.cancel(request)
        return CancelReply(cancelled=request)


def _refusals(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def refused(_: Request, error: ApiError) -> Response:
        return JSONResponse(error.reply, error.status, error.headers)

    @app.exception_handler(RequestValidationError)
    async def wrong(request: Request, error: RequestValidationError) -> Response:
        return await refused(request, invalid(error.errors()))

    @app.exception_handler(HTTPException)
    async def standard(request: Request, error: HTTPException) -> Response:
        reply = await refused(request, ApiError(error.status_code, _sentence(error)))
        reply.headers.update(error.headers or {})
        return reply

    @app.exception_handler(Exception)
    async def bug(request: Request, _: Exception) -> Response:
        # uvicorn writes the traceback to the log.
        failed = ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, "The server failed; see its log.")
        return await refused(request, failed)


def _sentence(error: HTTPException) -> str:
    known = {
        HTTPStatus.BAD_REQUEST: "The body cannot be read; send JSON in UTF-8.",
        HTTPStatus.NOT_FOUND: "There is no such route; see /openapi.json.",
        HTTPStatus.METHOD_NOT_ALLOWED: "This route takes another method; see /openapi.json.",
    }
    return known.get(HTTPStatus(error.status_code), error.detail)


def _openapi(app: FastAPI) -> dict[str, Any]:
    """What FastAPI tells of the routes, but that bad input is 400."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        for path in schema["paths"].values():
            for operation in path.values():
                operation["responses"].pop(UNPROCESSABLE, None)
        for name in ("HTTPValidationError", "ValidationError"):
            schema["components"]["schemas"].pop(name, None)
        app.openapi_schema = schema
    return app.openapi_schema
