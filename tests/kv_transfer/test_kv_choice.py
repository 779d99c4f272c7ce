"""Which transports a worker offers, and that it says so."""

from __future__ import annotations

import logging

import pytest

from kv_transfer.transports import source_transports
from kv_transfer.transports.choice import HostFacts, transport_names, why
from pd_engine.settings import TransferSettings

PLAIN = HostFacts(has_nixl=False, num_rdma_devices=0)


@pytest.mark.parametrize(("setting", "facts", "names"), [
    ("auto", PLAIN, ("shared_memory", "tcp")),
    ("auto", HostFacts(has_nixl=True, num_rdma_devices=0), ("shared_memory", "tcp")),
    ("auto", HostFacts(has_nixl=False, num_rdma_devices=2), ("shared_memory", "tcp")),
    ("auto", HostFacts(has_nixl=True, num_rdma_devices=2), ("shared_memory", "nixl", "tcp")),
    ("tcp", HostFacts(has_nixl=True, num_rdma_devices=2), ("tcp",)),
    ("nixl", PLAIN, ("nixl",)),
])
def test_what_is_offered(setting: str, facts: HostFacts, names: tuple[str, ...]) -> None:
    assert transport_names(setting, facts) == names


def test_the_reason_names_what_decided() -> None:
    assert why("tcp", PLAIN) == "transports: tcp, as set"
    assert why("auto", HostFacts(has_nixl=True, num_rdma_devices=2)) == (
        "transports: shared_memory, nixl, tcp (auto; arenas in host memory, nixl is installed, 2 RDMA devices)"
    )


def test_the_choice_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="kv_transfer.transports"):
        [transport] = source_transports(TransferSettings(transport="tcp"), secret="s" * 16, host="127.0.0.1")
    assert transport.name == "tcp"
    assert "transports: tcp, as set" in caplog.text
