"""The routes, and what surrounds them: middleware, error replies and /openapi.json."""

from __future__ import annotations

import importlib.metadata
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import FastAPI, Path
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic.json_schema import models_json_schema
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Mount, Route
from starlette.types import Receive, Scope, Send

from pipespec.errors import PipespecError
from pipespec.server.api_errors import (
    ApiError,
    api_error_of,
    cluster_unavailable,
    validation_failed,
)
from pipespec.server.dialect import body_routes, dialects, error_reply, public_routes
from pipespec.server.metrics import Metrics
from pipespec.server.middleware import REQUEST_ID, ApiKeyCheck, Check, HostCheck, OriginCheck
from pipespec.server.openai_serving import JSON, REQUEST_NUMBER, OpenAIServing
from pipespec.server.options import ANY, ServerOptions, normal_origin
from pipespec.server.response_stream import CLIENT_CLOSED_REQUEST

# What /openapi.json says of the statuses that every route may have.
FAILURES = {
    400: "A field is wrong or not supported",
    401: "The API key is missing or wrong",
    403: "The request is from a web page of another origin, or for another host",
    404: "The model is not served here",
    413: "The body is too long",
    429: "The queue is full",
    500: "The cluster failed",
    503: "The cluster is not ready",
}
# The largest number of a request: integers in JSON are exact up to here.
MAX_REQUEST = 2**53 - 1
# The status that FastAPI documents for invalid requests, which get 400 here.
UNPROCESSABLE = "422"


def make_app(serving: OpenAIServing) -> FastAPI:
    """The routes of a server whose cluster is ready: OpenAI's, and those for operators."""
    app = FastAPI(
        title="pipespec",
        version=importlib.metadata.version("pipespec"),
        middleware=_middleware(serving.options),
        responses={status: {"description": why} for status, why in FAILURES.items()},
        docs_url=None,  # they load scripts from elsewhere
        redoc_url=None,
    )
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    _add_error_handlers(app)
    _add_body_routes(app, serving)
    _add_other_routes(app, serving)
    app.router.routes.extend(public_routes())
    for dialect in dialects():
        if dialect.mount is not None:
            dialect.mount(app, serving)
    return app


def make_loading_app(options: ServerOptions) -> Starlette:
    """The app until the cluster is ready: 503 on every route but `/metrics` and the page."""
    metrics = Metrics(options.names[0])

    async def metrics_text(_: Request) -> Response:
        return Response(metrics.prometheus_text(None), media_type=CONTENT_TYPE_LATEST)

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        await error_reply(scope["path"], cluster_unavailable("loads"))(scope, receive, send)

    routes = [*public_routes(), Route("/metrics", metrics_text), Mount("/", refuse)]
    return Starlette(routes=routes, middleware=_middleware(options))


def _middleware(options: ServerOptions) -> list[Middleware]:
    """The checks of a request, in the order in which it passes them. None reads its body."""
    checks = []
    if options.allowed_hosts or not options.api_keys:
        checks.append(Middleware(Check, HostCheck(options.host, options.allowed_hosts)))
    checks.append(Middleware(Check, OriginCheck(options.allowed_origins)))
    if options.allowed_origins:
        cors: dict[str, Any] = {
            "allow_origins": [normal_origin(each) or ANY for each in options.allowed_origins],
            "expose_headers": [REQUEST_ID, REQUEST_NUMBER, "Retry-After"],
        }
        checks.append(Middleware(CORSMiddleware, allow_methods="*", allow_headers="*", **cors))
    return [*checks, Middleware(Check, ApiKeyCheck(options.api_keys, options.key_names))]


def _add_body_routes(app: FastAPI, serving: OpenAIServing) -> None:
    for path, route in body_routes().items():
        endpoint = _endpoint(serving, path)
        content: dict[str, Any] = {route.format.media_type: {}} if route.format else {}
        app.post(path, response_model=None, responses={200: {"content": content}})(endpoint)
        if path.endswith("/completions"):  # some clients leave the version out
            app.post(path.removeprefix("/v1"), include_in_schema=False, response_model=None)(
                endpoint
            )


def _endpoint(serving: OpenAIServing, path: str) -> Any:
    async def answer(request: Request) -> Response:
        return await serving.generate(path, request)

    answer.__doc__ = body_routes()[path].body.__doc__
    return answer


def _add_other_routes(app: FastAPI, serving: OpenAIServing) -> None:
    for prefix in ("/v1", ""):
        app.get(f"{prefix}/models", include_in_schema=bool(prefix))(serving.models)
        app.get(f"{prefix}/models/{{name:path}}", include_in_schema=bool(prefix))(serving.model)
    app.get("/tokenizer_info")(serving.tokenizer_info)
    app.get("/health")(serving.health)

    @app.get("/version")
    async def of_package() -> dict[str, str]:
        return {"version": app.version}

    @app.get("/load")
    async def load() -> dict[str, int]:
        return {"server_load": serving.metrics.unfinished}

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        text = serving.metrics.prometheus_text(await serving.cluster_status())
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    @app.post("/requests/{request}/cancel")
    async def cancel(request: Annotated[int, Path(ge=1, le=MAX_REQUEST)]) -> dict[str, int]:
        """Cancel a request, which ends once the head is notified."""
        await serving.cancel(request)
        return {"cancelled": request}


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        return error_reply(request.url.path, error)

    @app.exception_handler(PipespecError)
    async def failed(request: Request, error: PipespecError) -> Response:
        return error_reply(request.url.path, api_error_of(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return await refused(request, validation_failed(error.errors()))

    @app.exception_handler(ClientDisconnect)
    async def disconnected(_request: Request, _: ClientDisconnect) -> Response:
        # The client has left in the middle of its body, and does not read the reply.
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        reply = await refused(request, ApiError(error.status_code, _sentence(error)))
        reply.headers.update(error.headers or {})
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            reply.headers["Allow"] = _allowed_methods(request)
        return reply

    @app.exception_handler(Exception)
    async def internal_error(request: Request, _: Exception) -> Response:
        # uvicorn writes the traceback to the log.
        why = "The server failed; see its log."
        return await refused(request, ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, why))


def _allowed_methods(request: Request) -> str:
    """Those of all routes of the path; Starlette names the ones of the first route alone."""
    matching = (
        route
        for route in request.app.routes
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE
    )
    return ", ".join(sorted({method for route in matching for method in route.methods or ()}))


def _sentence(error: HTTPException) -> str:
    known = {
        HTTPStatus.BAD_REQUEST: "The body cannot be read; send JSON in UTF-8.",
        HTTPStatus.NOT_FOUND: "There is no such route; see /openapi.json.",
        HTTPStatus.METHOD_NOT_ALLOWED: "This route takes another method; see /openapi.json.",
    }
    return known.get(HTTPStatus(error.status_code), error.detail)


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's document of the routes, with their bodies, and 400 for invalid requests."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        _add_bodies(schema)
        for operation in (each for path in schema["paths"].values() for each in path.values()):
            operation["responses"].pop(UNPROCESSABLE, None)
        for name in ("HTTPValidationError", "ValidationError"):
            schema["components"]["schemas"].pop(name, None)
        app.openapi_schema = schema
    return app.openapi_schema


def _add_bodies(schema: dict[str, Any]) -> None:
    keys, definitions = models_json_schema(
        [(route.body, "validation") for route in body_routes().values()],
        ref_template="#/components/schemas/{model}",
    )
    schema["components"]["schemas"] |= definitions["$defs"]
    for path, route in body_routes().items():
        content = {JSON: {"schema": keys[route.body, "validation"]}}
        schema["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
