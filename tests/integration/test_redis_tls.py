"""The private server with certificates of the user's (`controller.tls=FOLDER`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from pipespec.controller import epoch_control
from pipespec.controller.certificate import TlsFiles
from pipespec.controller.embedded_redis import EmbeddedRedis
from pipespec.controller.rank_controller import Controller
from pipespec.controller.redis_connection import check_server
from pipespec.errors import ConfigError, Unreachable
from tests.helpers.log import accept
from tests.helpers.redis_tls import redis_server

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


@pytest.fixture(scope="module", params=[True, False], ids=["built_with_tls", "built_without"])
def server(request: pytest.FixtureRequest, certificates: Path) -> Iterator[EmbeddedRedis]:
    secure = EmbeddedRedis(addresses=[HOST], tls=TlsFiles.of(certificates))
    with redis_server(with_tls=request.param), secure:
        yield secure


def test_another_host_connects_with_nothing_but_the_url(server: EmbeddedRedis) -> None:
    url = server.url_at(HOST)
    assert url.startswith("rediss://")
    epoch = epoch_control.begin_epoch(url, "tls")
    with Controller(url, namespace="tls", epoch=epoch, rank=0) as controller:
        request = controller.enqueue(prompt=(1,), max_new_tokens=5)
        accept(controller, request, 1, [7])
        assert controller.tokens(request) == (7,)


def test_the_tcp_port_speaks_nothing_but_tls(server: EmbeddedRedis) -> None:
    plain = f"redis://:{server.url.partition('password=')[2]}@{HOST}:{server.port}"
    with pytest.raises(Unreachable, match="use rediss://"):
        check_server(plain, timeout=1)


def test_a_client_trusts_only_the_named_authority(
    server: EmbeddedRedis, certificates: Path
) -> None:
    with pytest.raises(Unreachable, match="certificate"):
        check_server(server.url_at(HOST).partition("?")[0])
    url = f"{server.url_at(HOST).partition('?')[0]}?ssl_ca_certs={certificates}/ca.pem"
    assert check_server(url)


def test_a_certificate_for_another_address_is_refused(server: EmbeddedRedis) -> None:
    with pytest.raises(Unreachable, match="certificate"):
        check_server(server.url_at(LOOPBACK))


def test_files_that_do_not_belong_together_are_named(certificates: Path, tmp_path: Path) -> None:
    for name in ("cert.pem", "key.pem", "ca.pem"):
        (tmp_path / name).write_bytes((certificates / name).read_bytes())
    TlsFiles.of(tmp_path)
    trustme.CA().issue_cert(HOST).private_key_pem.write_to_path(tmp_path / "key.pem")
    with pytest.raises(ConfigError, match=r"controller\.tls is .*: key\.pem must be the key"):
        TlsFiles.of(tmp_path)
    (tmp_path / "ca.pem").write_text("no certificate")
    with pytest.raises(ConfigError, match=r"controller\.tls is .*key\.pem must be"):
        TlsFiles.of(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "cert.pem").touch()
    with pytest.raises(ConfigError, match=r"key\.pem cannot be read there"):
        TlsFiles.of(tmp_path)
