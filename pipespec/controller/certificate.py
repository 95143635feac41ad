"""TLS certificates, made for one server each: for a private Redis, and for hosts that exchange
weights."""

from __future__ import annotations

import os
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Self
from urllib.parse import quote

from pipespec.system.files import write_atomically

CERT, KEY = "cert.pem", "key.pem"
COMMON_NAME = "pipespec-redis"
# The clocks of the hosts need not agree: the certificate ends with the server, not with a date.
FOREVER = datetime(1970, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC)
# As the `ssl` module numbers it, and as the URLs of redis-py name it.
TLS_1_3 = 0x0304
TLS_1_3_NAME = "TLSv1.3"  # to Redis


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

    def write(self, folder: Path) -> None:
        """As the files CERT and KEY of a folder."""
        write_atomically(folder / CERT, self.cert.encode("ascii"))
        write_atomically(folder / KEY, self.key.encode("ascii"))

    def url_options(self) -> str:
        """The query of a `rediss://` URL whose clients trust this certificate, at whatever address
        they find it, and no other."""
        trusted = quote(self.cert, safe="")
        return f"ssl_min_version={TLS_1_3}&ssl_check_hostname=false&ssl_ca_data={trusted}"
