"""Statuses of gRPC itself, as its callers see them."""

from __future__ import annotations

import grpc
import pytest

from pd_engine.errors import FailedPrecondition, PdRelayError, Unavailable, from_grpc
from support.router_lab import router_lab


class FailedCall(grpc.RpcError):
    def __init__(self, status: grpc.StatusCode) -> None:
        super().__init__()
        self._status = status

    def code(self) -> grpc.StatusCode:
        return self._status

    def details(self) -> str:
        return "as it says"


@pytest.mark.parametrize("status", grpc.StatusCode)
def test_only_what_may_pass_is_tried_again(status: grpc.StatusCode) -> None:
    error = from_grpc(FailedCall(status))
    assert error.message.endswith("as it says")
    passes = {"UNAVAILABLE", "DATA_LOSS", "RESOURCE_EXHAUSTED", "UNKNOWN", "ABORTED", "OK"}
    assert error.retryable == (status.name in passes), (status, error)
    assert isinstance(error, PdRelayError)


async def test_a_call_that_does_not_exist() -> None:
    async with router_lab() as lab, grpc.aio.insecure_channel(lab.grpc_address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/pdrelay.v1.PdRelay/Generat")(b"")
        error = from_grpc(caught.value)
        assert isinstance(error, FailedPrecondition)
        assert error.message.startswith("UNIMPLEMENTED")
        assert not isinstance(error, Unavailable)
