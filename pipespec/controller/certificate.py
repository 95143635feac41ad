"""TLS certificates: of a private Redis, files of the user or one made for this server, and of hosts
that exchange weights."""

from __future__ import annotations

import os
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Self
from urllib.parse import quote

from pipespec.errors import ConfigError
from pipespec.system.files import write_atomically

# Besides a folder, the values of controller.tls.
AUTO, OFF = "auto", "off"
CERT, KEY, CA = "cert.pem", "key.pem", "ca.pem"
COMMON_NAME = "pipespec-redis"
# The clocks of the hosts need not agree: the certificate ends with the server, not with a date.
FOREVER = datetime(1970, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC)
# As the `ssl` module numbers it, and as the URLs of redis-py name it.
TLS_1_3 = 0x0304
TLS_1_3_NAME = "TLSv1.3"  # to Redis


@dataclass(frozen=True)
class TlsFiles:
    """A server's certificate and key, and what its clients trust, as PEM files. `pinned`: clients
    trust exactly this certificate, at whatever address they find it; otherwise an authority, whose
    certificate for another address is refused."""

    cert: Path
    key: Path
    ca: Path
    pinned: bool = False

    @classmethod
    def of(cls, folder: Path) -> Self:
        """The files cert.pem, key.pem and ca.pem of a folder. Raises ConfigError."""
        here = folder.resolve()
        files = cls(here / CERT, here / KEY, here / CA)
        for file in (files.cert, files.key, files.ca):
            if not os.access(file, os.R_OK):
                raise ConfigError(
                    f"controller.tls is {str(folder)!r}, but {file.name} cannot be read there: "
                    "the folder must hold cert.pem, key.pem and ca.pem, or set controller.tls "
                    "to auto."
                )
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(files.cert, files.key, password="")
            context.load_verify_locations(files.ca)
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise ConfigError(
                f"controller.tls is {str(folder)!r}, whose files TLS cannot use ({reason}): "
                "key.pem must be the key of cert.pem, without a passphrase, and ca.pem the "
                "certificate of its authority."
            ) from None
        return files

    def url_options(self) -> str:
        """The query of a `rediss://` URL whose clients trust this server and no other. Raises
        ConfigError if the authority's file cannot be read any more."""
        try:
            trusted = self.ca.read_text(encoding="ascii")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{str(self.ca)!r} cannot be read as a certificate in PEM ({error})."
            ) from None
        address = "&ssl_check_hostname=false" if self.pinned else ""
        return f"ssl_min_version={TLS_1_3}{address}&ssl_ca_data={quote(trusted, safe='')}"


@dataclass(frozen=True)
class Certificate:
    """A self-signed certificate and its private key, in PEM."""

    cert: str
    key: str = field(repr=False)

    @classmethod
    def make(cls) -> Self:
        """A new one, on the curve P-256. It can vouch for no other certificate."""
        # Not needed on one machine, and its import takes a tenth of a second.
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, COMMON_NAME)])
        known_by = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        # Hosts that exchange weights use it at both ends.
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        extensions: Sequence[tuple[x509.ExtensionType, bool]] = (
            (x509.BasicConstraints(ca=False, path_length=None), True),
            (x509.ExtendedKeyUsage(usages), False),
            (x509.SubjectAlternativeName([x509.DNSName(COMMON_NAME)]), False),
            (known_by, False),
            (x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(known_by), False),
        )
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(FOREVER[0])
            .not_valid_after(FOREVER[1])
        )
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical)
        pem = serialization.Encoding.PEM
        private = key.private_bytes(
            pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        signed = builder.sign(key, hashes.SHA256()).public_bytes(pem)
        return cls(signed.decode("ascii"), private.decode("ascii"))

    def load_into(self, context: ssl.SSLContext) -> None:
        """Let this end of connections have it."""
        # The `ssl` module reads keys from files alone; this one is in memory.
        descriptor = os.memfd_create("certificate")
        try:
            os.write(descriptor, (self.key + self.cert).encode("ascii"))
            context.load_cert_chain(f"/proc/self/fd/{descriptor}")
        finally:
            os.close(descriptor)

    def write(self, folder: Path) -> TlsFiles:
        write_atomically(folder / CERT, self.cert.encode("ascii"))
        write_atomically(folder / KEY, self.key.encode("ascii"))
        return TlsFiles(folder / CERT, folder / KEY, ca=folder / CERT, pinned=True)


def tls_of(setting: str) -> TlsFiles | bool:
    """What `controller.tls` means: files, or whether to make a certificate. Raises ConfigError."""
    if setting in (AUTO, OFF):
        return setting == AUTO
    return TlsFiles.of(Path(setting))
