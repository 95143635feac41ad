"""What the dashboard says when a request cannot be cancelled."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

import pytest

from pipespec.controller.lua_scripts import WritesRefused
from pipespec.errors import ControllerError, UnknownRequest, Unreachable
from pipespec.server.api_errors import ApiError
from pipespec.server.dashboard import Dashboard


class Client:
    away = False

    def __init__(self, error: ControllerError):
        self._error = error

    async def cancel(self, request: int) -> None:
        raise self._error


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (UnknownRequest(), HTTPStatus.NOT_FOUND, "There is no request 7."),
        (Unreachable("gone"), HTTPStatus.SERVICE_UNAVAILABLE, "The cluster is not ready"),
        (WritesRefused("Redis is full."), HTTPStatus.INTERNAL_SERVER_ERROR, "Redis is full."),
    ],
)
def test_why_a_request_is_not_cancelled_is_told_apart(
    error: ControllerError, status: HTTPStatus, said: str
) -> None:
    unused: Any = None
    client: Any = Client(error)
    dashboard = Dashboard(client, unused, unused, unused)
    with pytest.raises(ApiError) as refused:
        asyncio.run(dashboard.cancel(7))
    assert refused.value.status == status
    assert str(refused.value).startswith(said)
