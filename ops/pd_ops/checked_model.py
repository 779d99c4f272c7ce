"""A look at a checkpoint before anything is started or loaded for it. Torch-free."""

from __future__ import annotations

from pd_engine.model.checkpoint import check_tensors, resolve_model, stored_tensors
from pd_engine.model.config import ModelConfig, check_latent_dtype
from pd_engine.settings import Settings


def with_checked_model(settings: Settings) -> Settings:
    """The settings with `model` as an absolute path, once its files are what every process would take.

    Raises:
        PdRelayError: no such checkpoint, a configuration that is broken or not supported, weights that do not fit, or
            settings that it cannot be served with.
    """
    path = resolve_model(settings.model)
    config = ModelConfig.load(path)
    check_tensors(config, stored_tensors(path))
    check_latent_dtype(config, settings.engine.dtype, settings.engine.latent_dtype)
    return settings.model_copy(update={"model": str(path)})
