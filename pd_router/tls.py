"""Certificates of the doors, read once at start."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from pd_engine.bounded_file import read_bounded
from pd_engine.errors import InvalidArgument
from pd_engine.settings import RouterSettings

MAX_FILE_BYTES = 1024 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Tls:
    """Paths of PEM files. With `client_ca` a client needs a certificate that was signed by it (mTLS)."""

    cert: str
    key: str
    client_ca: str | None

    @staticmethod
    def of(settings: RouterSettings) -> Tls | None:
        """None: the doors speak plain text.

        Raises:
            InvalidArgument: files are missing, or are no certificate and its key.
        """
        if settings.tls_cert is None and settings.tls_key is None and settings.tls_client_ca is None:
            return None
        if settings.tls_cert is None or settings.tls_key is None:
            raise InvalidArgument("router.tls_cert and router.tls_key are needed, both, for TLS")
        tls = Tls(cert=settings.tls_cert, key=settings.tls_key, client_ca=settings.tls_client_ca)
        tls._check()
        return tls

    def grpc_credentials(self) -> grpc.ServerCredentials:
        pair = (_read(self.key), _read(self.cert))
        roots = None if self.client_ca is None else _read(self.client_ca)
        return grpc.ssl_server_credentials([pair], roots, require_client_auth=roots is not None)

    def _check(self) -> None:
        for path in (self.cert, self.key, self.client_ca):
            if path is not None:
                _read(path)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # A password prompt would hang the router.
            context.load_cert_chain(self.cert, self.key, password=lambda: b"")
            if self.client_ca is not None:
                context.load_verify_locations(self.client_ca)
        except (ssl.SSLError, OSError, ValueError) as error:
            raise InvalidArgument(
                f"router.tls_cert, tls_key and tls_client_ca must be PEM files, key and certificate a pair: {error}"
            ) from None


def _read(path: str) -> bytes:
    try:
        return read_bounded(Path(path), MAX_FILE_BYTES)
    except OSError as error:
        raise InvalidArgument(f"cannot read {path}, named for TLS: {error.strerror}") from None
