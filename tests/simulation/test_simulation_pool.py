"""The simulation's block pool is checked after events that changed it: it has to know of every change."""

from __future__ import annotations

import inspect

from pd_engine.cache.blocks import BlockPool
from pd_ops.simulation.pool import WatchedPool

READS = {"can_allocate", "is_free", "owners", "is_held", "holdings", "kept", "check_integrity"}
BEFORE_USE = {"attach"}


def test_whatever_changes_a_pool_is_noted() -> None:
    methods = {name for name, each in vars(BlockPool).items() if inspect.isfunction(each) and not name.startswith("_")}
    changes = methods - READS - BEFORE_USE
    assert changes == set(vars(WatchedPool)) & methods
    assert {"allocate", "hold", "release"} <= changes


def test_a_change_is_noted() -> None:
    pool = WatchedPool(4)
    pool.has_changed = False
    assert pool.can_allocate(4)
    assert not pool.has_changed
    blocks = pool.allocate(2, "a")
    assert pool.has_changed
    pool.has_changed = False
    pool.release(blocks, "a")
    assert pool.has_changed
