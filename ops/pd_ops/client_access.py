"""How a command gets in at a router's door that asks for it: an API key and certificates, from the environment.

Secrets do not belong on a command line, where every user of the host reads them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc

from pd_engine.errors import InvalidArgument
from pd_engine.service.client import MetadataChannel, connect

API_KEY = "PD_RELAY_API_KEY"
TLS_CA = "PD_RELAY_TLS_CA"
TLS_CERT = "PD_RELAY_TLS_CERT"
TLS_KEY = "PD_RELAY_TLS_KEY"


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientAccess:
    """`api_key`: None, none is sent. `ca`: of the router's certificate, in PEM; None: plain text. `pair`: the client's
    own key and certificate; None: it shows none."""

    api_key: str | None = None
    ca: bytes | None = None
    pair: tuple[bytes, bytes] | None = None

    @staticmethod
    def from_environment(environment: Mapping[str, str] = os.environ) -> ClientAccess:
        """Raises:
        InvalidArgument: a file cannot be read, half a pair is named, or the key cannot be sent.
        """
        api_key, ca, cert, key = (environment.get(name) or None for name in (API_KEY, TLS_CA, TLS_CERT, TLS_KEY))
        if (cert is None) != (key is None) or (cert is not None and ca is None):
            raise InvalidArgument(f"{TLS_CERT} and {TLS_KEY} go together, and with {TLS_CA}")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise InvalidArgument(f"{API_KEY} must be printable ASCII")
        pair = None if cert is None or key is None else (_read(TLS_KEY, key), _read(TLS_CERT, cert))
        return ClientAccess(api_key=api_key, ca=None if ca is None else _read(TLS_CA, ca), pair=pair)

    def connect(self, address: str) -> grpc.aio.Channel:
        """A channel to the router at "host:port"."""
        credentials = None
        if self.ca is not None:
            credentials = grpc.ssl_channel_credentials(self.ca, *(self.pair or (None, None)))
        channel = connect(address, secret=None, credentials=credentials)
        if self.api_key is None:
            return channel
        return MetadataChannel(channel, (("authorization", f"Bearer {self.api_key}"),))


def _read(name: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgument(f"cannot read {path}, which {name} names: {error.strerror}") from None
