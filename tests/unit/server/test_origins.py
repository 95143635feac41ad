"""Checks of Origin and Host, and of the options for them."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from pipespec.errors import ConfigError
from pipespec.server.app import make_loading_app
from pipespec.server.host_names import normal_origin
from pipespec.server.options import ServerOptions

SERVED, REFUSED = 503, 403  # the cluster of these tests is never ready


def status(
    path: str = "/v1/models", method: str = "GET", *, headers: Any = None, **options: Any
) -> int:
    """How a request is answered by a server with such options; the Host is localhost unless the
    headers say otherwise."""
    app = make_loading_app(ServerOptions(("demo",), **options))
    with TestClient(app, base_url="http://localhost") as http:
        reply = http.request(method, path, headers=headers)
    assert reply.status_code == 401 or reply.json()["error"]["message"].endswith(".")
    return reply.status_code


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "DELETE"])
@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/requests/1/cancel", "/page/x"])
@pytest.mark.parametrize("origin", ["null", "http://evil.test", "https://localhost", "", "a b"])
def test_every_route_refuses_a_foreign_origin(path: str, method: str, origin: str) -> None:
    assert status(path, method, headers={"Origin": origin}) == REFUSED
    assert status(path, method, headers={"Origin": origin}, api_keys=("key",)) == REFUSED


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("localhost", "http://localhost"),
        ("localhost:8000", "http://localhost:8000"),
        ("LOCALHOST:80", "http://localhost"),
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_own_origin_is_accepted(host: str, origin: str) -> None:
    assert status(headers={"Host": host, "Origin": origin}) == SERVED


def test_other_port_or_name_of_the_same_host_is_a_foreign_origin() -> None:
    for origin in ("http://localhost:3000", "http://127.0.0.1", "http://localhost.evil.test"):
        assert status(headers={"Origin": origin}) == REFUSED


def test_allowed_origins_are_accepted() -> None:
    allowed = {"allowed_origins": ("http://Localhost:3000", "app://obsidian.md")}
    for origin in ("http://localhost:3000", "app://obsidian.md"):
        assert status(headers={"Origin": origin}, **allowed) == SERVED
    assert status(headers={"Origin": "http://localhost:3001"}, **allowed) == REFUSED
    assert status(headers={"Origin": "null"}, allowed_origins=("*",)) == SERVED


def test_cross_site_images_and_scripts_are_refused_but_links_are_not() -> None:
    for mode, expected in (("no-cors", REFUSED), ("cors", REFUSED), ("navigate", SERVED)):
        headers = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": mode}
        assert status(headers=headers) == expected
    assert status(headers={"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"}) == SERVED


HOSTS = [
    ("localhost:8000", True),
    ("LocalHost.", True),
    ("lab.localhost:1", True),
    ("127.0.0.1", True),
    ("10.0.0.7:8000", True),
    ("[::1]:8000", True),
    ("[fe80::1]", True),
    ("evil.test", False),
    ("evil.test:8000", False),
    ("localhost.evil.test", False),
    ("127.0.0.1.evil.test", False),
    ("notlocalhost", False),
    ("a b", False),
]


@pytest.mark.parametrize(("host", "served"), HOSTS)
def test_without_api_key_only_local_host_names_are_accepted(host: str, served: bool) -> None:
    assert status(headers={"Host": host}) == (SERVED if served else REFUSED)


def test_host_option_and_allowed_hosts_are_accepted() -> None:
    options = {"host": "Lab.test", "allowed_hosts": ("gpu", "*.lan")}
    for host in ("lab.test:8000", "gpu", "a.b.lan", "127.0.0.1"):
        assert status(headers={"Host": host}, **options) == SERVED
    for host in ("lan", "gpu.evil.test", "other.test", "evillan"):
        assert status(headers={"Host": host}, **options) == REFUSED
    assert status(headers={"Host": "evil.test"}, allowed_hosts=("*",)) == SERVED


def test_with_api_key_any_host_is_accepted_unless_allowed_hosts_is_set() -> None:
    headers = {"Host": "lab.test", "X-Api-Key": "key"}
    assert status(headers=headers, api_keys=("key",)) == SERVED
    assert status(headers=headers, api_keys=("key",), allowed_hosts=("gpu",)) == REFUSED


@pytest.mark.parametrize(
    "origin",
    [
        *("evil", "null", "", "//a", "a:80", "http://", "http://a/", "http://a/b", "http://a b"),
        *("http://*.a", "http://ä", "http://u@a", "http://a:0", "http://a:65536"),
    ],
)
def test_invalid_allowed_origins_option_is_an_error(origin: str) -> None:
    with pytest.raises(ConfigError, match=r"--allowed-origins is .*, but must be an origin"):
        ServerOptions(("demo",), allowed_origins=(origin,))


@pytest.mark.parametrize("host", ["", "a:80", "http://a", "a/b", "*a", "a.*", "a b", "a..b"])
def test_invalid_allowed_hosts_option_is_an_error(host: str) -> None:
    with pytest.raises(ConfigError, match=r"--allowed-hosts is .*, but must be a name"):
        ServerOptions(("demo",), allowed_hosts=(host,))


def test_origins_are_normalized_as_browsers_write_them() -> None:
    assert normal_origin("HTTPS://Lab.Example:443") == "https://lab.example"
    assert normal_origin("http://lab.example:443") == "http://lab.example:443"
    assert normal_origin("http://[::1]:80") == "http://[::1]"
