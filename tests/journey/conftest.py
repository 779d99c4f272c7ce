"""What journeys are compared with: the demo checkpoint in this process, loaded once a session."""

from __future__ import annotations

import pytest

from pd_engine.engine import Engine
from pd_engine.model.checkpoint import resolve_model
from pd_engine.settings import EngineSettings
from pd_engine.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(resolve_model("demo"))


@pytest.fixture(scope="session")
def engine() -> Engine:
    """Its arena outlives every worker that a test starts in this process: such a test asks for the engine first."""
    return Engine.load(resolve_model("demo"), EngineSettings(cache_mib=24), max_speculate=8)
