"""Certificates for tests of doors: a CA, what it signed, and a stranger's."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import trustme


class Files:
    """Paths of a CA's certificate, and of a server's and a client's pair that it signed."""

    def __init__(self, folder: Path) -> None:
        self.ca = str(folder / "ca.pem")
        authority = trustme.CA()
        authority.cert_pem.write_to_path(self.ca)
        self.cert, self.key = _pair(authority.issue_cert("127.0.0.1", "localhost"), folder, "server")
        self.client_cert, self.client_key = _pair(authority.issue_cert("client"), folder, "client")
        stranger = trustme.CA().issue_cert("client")
        self.strange_cert, self.strange_key = _pair(stranger, folder, "stranger")

    def router(self, *, mutual: bool) -> dict[str, Any]:
        return {"tls_cert": self.cert, "tls_key": self.key, "tls_client_ca": self.ca if mutual else None}

    def environment(self, monkeypatch: pytest.MonkeyPatch, *, cert: str = "", key: str = "") -> None:
        for name, value in (("CA", self.ca), ("CERT", cert), ("KEY", key)):
            monkeypatch.setenv(f"PD_RELAY_TLS_{name}", value)

    def credentials(self, *pair: str) -> grpc.ChannelCredentials:
        """`pair`: certificate and key, or nothing."""
        ca, *own = [Path(path).read_bytes() for path in (self.ca, *reversed(pair))]
        return grpc.ssl_channel_credentials(ca, *own)

    def ssl_context(self, *pair: str) -> ssl.SSLContext:
        """Of a client."""
        context = ssl.create_default_context(cafile=self.ca)
        if pair:
            context.load_cert_chain(*pair)
        return context

    def http(self, base_url: httpx.URL, *pair: str) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=str(base_url).replace("http:", "https:"), verify=self.ssl_context(*pair))


def _pair(leaf: trustme.LeafCert, folder: Path, name: str) -> tuple[str, str]:
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    leaf.cert_chain_pems[0].write_to_path(str(cert))
    leaf.private_key_pem.write_to_path(str(key))
    return str(cert), str(key)
