"""Further workers are refused where the host's memory would not hold them."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from pd_engine.errors import ResourceExhausted
from pd_ops.cluster.plan import Role
from pd_ops.cluster.ray_room import check_room


def member(role: Role, pid: int | None) -> Any:
    return SimpleNamespace(role=role, started=None if pid is None else SimpleNamespace(pid=pid))


def test_a_full_host_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet: Any = SimpleNamespace(workers=[
        member(Role.DECODE, os.getpid()), member(Role.DECODE, None), member(Role.DECODE, 2**22 + 1),
        member(Role.PREFILL, None),
    ])
    own = psutil.Process().memory_info().rss
    memory = SimpleNamespace(total=20 * own, available=2 * own + own // 2 + own)  # 5 % of it are left alone
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    check_room(fleet, [Role.DECODE, Role.DECODE, Role.PREFILL], is_local=True)
    with pytest.raises(ResourceExhausted, match=r"3 workers more would take about .* MiB to spare"):
        check_room(fleet, [Role.DECODE] * 3, is_local=True)
