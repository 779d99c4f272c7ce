"""Checkpoints, engines and oracles of the engine's tests, made once a session."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pd_engine.engine import Engine
from pd_engine.model.checkpoint import resolve_model
from support.engine_cases import CONFIGS, available_ops, load_engine, write_case

if TYPE_CHECKING:
    from support.engine_oracle import Oracle

REFERENCE_NAMES = {"base", "odd", "demo"}  # for which the reference ops, which are slow, are always tested


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The reference ops on every other checkpoint are for `make gate`, where there are compiled ones."""
    if len(available_ops()) == 1:
        return
    for item in items:
        params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        is_here = item.path.parent == Path(__file__).parent
        if is_here and params.get("ops") == "reference" and params.get("name", "base") not in REFERENCE_NAMES:
            item.add_marker("slow")


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders by name: `CONFIGS` and the demo checkpoint."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return {name: write_case(folder, name) for name in CONFIGS} | {"demo": resolve_model("demo")}


@pytest.fixture(scope="session", params=available_ops())
def ops(request: pytest.FixtureRequest) -> str:
    """Each implementation of the ops in turn, as the settings name it."""
    return str(request.param)


@pytest.fixture(scope="session")
def engines(checkpoints: dict[str, Path], ops: str) -> dict[str, Engine]:
    """fp32 engines by name."""
    return {
        name: load_engine(path, ops=ops, cache_mib=16 if name == "demo" else 4) for name, path in checkpoints.items()
    }


@pytest.fixture(scope="session")
def oracles(checkpoints: dict[str, Path]) -> dict[str, Oracle]:
    from support.engine_oracle import Oracle  # transformers takes seconds to import

    return {name: Oracle(path) for name, path in checkpoints.items()}
