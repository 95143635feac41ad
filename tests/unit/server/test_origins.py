from typing import Any

import pytest
from starlette.testclient import TestClient

from pipespec.errors import ConfigError
from pipespec.server.app import make_loading_app
from pipespec.server.options import ServerOptions, normal_origin

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
@pytest.mark.parametrize(
    "path", ["/", "/health", "/v1/completions", "/v1/models", "/requests/1/cancel", "/page/x"]
)
@pytest.mark.parametrize("origin", ["null", "http://evil.test", "https://localhost", "", "a b"])
def test_every_route_refuses_a_foreign_origin(path, method, origin):
    assert status(path, method, headers={"Origin": origin}) == REFUSED
    assert status(path, method, headers={"Origin": origin}, api_keys=("key",)) == REFUSED


ALLOWED = {"allowed_origins": ("http://Localhost:3000", "app://obsidian.md")}
NAMED = {"host": "Lab.test", "allowed_hosts": ("gpu", "*.lan")}
KEYED = {"api_keys": ("key",)}


@pytest.mark.parametrize(
    ("origin", "host", "options", "accepted"),
    [
        ("http://localhost", "localhost", {}, True),
        ("http://localhost:8000", "localhost:8000", {}, True),
        ("http://localhost", "LOCALHOST:80", {}, True),
        ("http://[::1]:8000", "[::1]:8000", {}, True),
        ("http://localhost:3000", "localhost", {}, False),
        ("http://127.0.0.1", "localhost", {}, False),
        ("http://localhost.evil.test", "localhost", {}, False),
        ("http://localhost:3000", "localhost", ALLOWED, True),
        ("app://obsidian.md", "localhost", ALLOWED, True),
        ("http://localhost:3001", "localhost", ALLOWED, False),
        ("null", "localhost", {"allowed_origins": ("*",)}, True),
    ],
)
def test_own_and_allowed_origins_are_accepted(origin, host, options, accepted):
    found = status(headers={"Host": host, "Origin": origin}, **options)
    assert found == (SERVED if accepted else REFUSED)


def test_cross_site_images_scripts_and_forms_are_refused_but_links_are_not():
    for mode, expected in (("no-cors", REFUSED), ("cors", REFUSED), ("navigate", SERVED)):
        headers = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": mode}
        assert status(headers=headers) == expected
        assert status("/v1/completions", "POST", headers=headers) == REFUSED
    assert status(headers={"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"}) == SERVED


@pytest.mark.parametrize(
    ("options", "served", "refused"),
    [
        (
            {},
            "localhost:8000 LocalHost. lab.localhost:1 127.0.0.1 10.0.0.7:8000 [::1]:8000",
            "evil.test evil.test:8000 localhost.evil.test 127.0.0.1.evil.test notlocalhost a+b",
        ),
        (NAMED, "lab.test:8000 gpu a.b.lan 127.0.0.1", "lan gpu.evil.test other.test evillan"),
        ({"allowed_hosts": ("*",)}, "evil.test", ""),
        (KEYED, "lab.test", ""),
        (KEYED | {"allowed_hosts": ("gpu",)}, "gpu", "lab.test"),
    ],
)
def test_without_api_key_only_local_and_allowed_host_names_are_accepted(options, served, refused):
    for names, expected in ((served, SERVED), (refused, REFUSED)):
        for host in names.split():
            headers = {"Host": host.replace("+", " "), "X-Api-Key": "key"}
            assert status(headers=headers, **options) == expected, host


NO_ORIGINS = (
    *("evil", "null", "", "//a", "a:80", "http://", "http://a/", "http://a/b", "http://a b"),
    *("http://*.a", "http://ä", "http://u@a", "http://a:0", "http://a:65536"),
)
NO_HOSTS = ("", "a:80", "http://a", "a/b", "*a", "a.*", "a b", "a..b")


@pytest.mark.parametrize(
    ("option", "wrong"),
    [*(("origins", each) for each in NO_ORIGINS), *(("hosts", each) for each in NO_HOSTS)],
)
def test_invalid_allowed_origin_or_host_is_an_error(option, wrong):
    must = {"origins": "an origin", "hosts": "a name"}[option]
    with pytest.raises(ConfigError, match=rf"--allowed-{option} is .*, but must be {must}"):
        ServerOptions(("demo",), **{f"allowed_{option}": (wrong,)})


def test_origins_are_normalized_as_browsers_write_them():
    assert normal_origin("HTTPS://Lab.Example:443") == "https://lab.example"
    assert normal_origin("http://lab.example:443") == "http://lab.example:443"
    assert normal_origin("http://[::1]:80") == "http://[::1]"
