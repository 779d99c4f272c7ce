"""TLS and mTLS at both doors."""

from __future__ import annotations

import grpc
import httpx
import pytest

from pd_engine.errors import InvalidArgument
from pd_engine.settings import RouterSettings
from pd_ops.client import router_client
from pd_router.tls import Tls
from support.certificates import Files
from support.router_lab import PROMPT, RouterLab, router_lab, settings
from support.toy_model import toy_generate

BODY = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("tls"))


async def submit(lab: RouterLab) -> list[int]:
    """As commands do it."""
    async with router_client(lab.grpc_address) as client:
        return list((await client.complete(lab.request())).complete.output_ids)


async def test_tls_at_both_doors(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    async with router_lab(settings(router=files.router(mutual=False))) as lab:
        files.environment(monkeypatch)
        assert await submit(lab) == toy_generate(PROMPT, 8)
        async with files.http(lab.http.base_url) as http:
            [choice] = (await http.post("/v1/completions", json=BODY)).json()["choices"]
            assert choice["token_ids"] == toy_generate(PROMPT, 8)
        with pytest.raises(grpc.aio.AioRpcError):  # plain text
            [_ async for _ in lab.api.Generate(lab.request(), timeout=5)]
        with pytest.raises(httpx.HTTPError):
            await lab.http.get("/live")


async def test_mutual_tls_wants_a_certificate_of_the_ca(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    async with router_lab(settings(router=files.router(mutual=True))) as lab:
        files.environment(monkeypatch, cert=files.client_cert, key=files.client_key)
        assert await submit(lab) == toy_generate(PROMPT, 8)
        async with files.http(lab.http.base_url, files.client_cert, files.client_key) as http:
            assert (await http.post("/v1/completions", json=BODY)).status_code == 200
        for pair in ((), (files.strange_cert, files.strange_key)):
            async with files.http(lab.http.base_url, *pair) as http:
                with pytest.raises(httpx.HTTPError):
                    await http.get("/live")
            async with grpc.aio.secure_channel(lab.grpc_address, files.credentials(*pair)) as channel:
                call = channel.unary_unary("/pdrelay.v1.PdRelay/GetModelInfo")
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call(b"", timeout=10)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_files_that_are_no_pair(files: Files) -> None:
    for fields, message in (
        ({"tls_cert": files.cert}, "router.tls_cert and router.tls_key are needed, both"),
        ({"tls_client_ca": files.ca}, "router.tls_cert and router.tls_key are needed, both"),
        ({"tls_cert": files.cert, "tls_key": "/absent"}, "cannot read /absent, named for TLS: No such file"),
        ({"tls_cert": files.cert, "tls_key": files.client_key}, "must be PEM files, key and certificate a pair"),
        ({"tls_cert": files.key, "tls_key": files.key}, "must be PEM files"),
        ({"tls_cert": files.cert, "tls_key": files.key, "tls_client_ca": files.key}, "must be PEM files"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            Tls.of(RouterSettings(**fields))
    assert Tls.of(RouterSettings()) is None


async def test_what_the_environment_says_wrong(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    files.environment(monkeypatch, cert=files.client_cert)
    with pytest.raises(InvalidArgument, match="PD_RELAY_TLS_CERT and PD_RELAY_TLS_KEY go together"):
        async with router_client("127.0.0.1:1"):
            pass
    monkeypatch.setenv("PD_RELAY_TLS_CERT", "")
    monkeypatch.setenv("PD_RELAY_TLS_CA", "/absent")
    with pytest.raises(InvalidArgument, match="cannot read /absent, which PD_RELAY_TLS_CA names"):
        async with router_client("127.0.0.1:1"):
            pass
