"""A look at a checkpoint before anything is started or loaded for it. Torch-free."""

from __future__ import annotations

from pd_engine.model.checkpoint import check_tensors, resolve_model, stored_tensors
from pd_engine.model.config import ModelConfig
from pd_engine.settings import Settings


def with_checked_model(settings: Settings) -> Settings:
    """The settings with `model` as an absolute path, once its files are what every process would take.

    Raises:
        PdRelayError: no such checkpoint, a configuration that is broken or not supported, weights that do not fit.
    """
    path = resolve_model(settings.model)
    check_tensors(ModelConfig.load(path), stored_tensors(path))
    return settings.model_copy(update={"model": str(path)})
