"""What the router knows of the model it serves, from the checkpoint's files alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pd_engine.model.checkpoint import resolve_model
from pd_engine.model.config import ModelConfig
from pd_engine.settings import Settings
from pd_engine.text.defaults import GenerationDefaults, ModelLimits
from pd_engine.text.tokenizer import Tokenizer
from pd_router.registry import Registry


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInfo:
    """The served model. `max_context_length`: tokens, as the settings and the checkpoint allow; `max_request_tokens`:
    of one request, if the settings limit them."""

    path: Path
    served_name: str
    config: ModelConfig
    tokenizer: Tokenizer
    defaults: GenerationDefaults
    max_context_length: int
    max_request_tokens: int | None = None

    @staticmethod
    def load(settings: Settings) -> ModelInfo:
        """Raises:
        NotFound, InvalidArgument: there is no such model, or a file of it is broken.
        """
        path = resolve_model(settings.model)
        config = ModelConfig.load(path)
        asked = settings.engine.max_context_length or config.max_position_embeddings
        return ModelInfo(
            path=path,
            served_name=settings.router.served_model_name or Path(settings.model).name,
            config=config,
            tokenizer=Tokenizer.load(path),
            defaults=GenerationDefaults.load(path),
            max_context_length=min(asked, config.max_position_embeddings),
            max_request_tokens=settings.router.max_request_tokens,
        )

    def limits(self, registry: Registry) -> ModelLimits:
        """What a request must fit: the context, the largest decode worker's cache with room for drafts, and what the
        settings allow one request."""
        context = min(self.max_context_length, registry.max_context_length or self.max_context_length)
        slots = registry.num_decode_slots
        room = context if slots is None else slots - registry.max_speculate
        if self.max_request_tokens is not None and self.max_request_tokens < min(room, context):
            return ModelLimits(
                max_context_length=self.max_request_tokens,
                vocab_size=self.config.vocab_size,
                context_name="router.max_request_tokens",
            )
        if room < context:
            return ModelLimits(
                max_context_length=max(room, 2),
                vocab_size=self.config.vocab_size,
                context_name="the largest decode worker's cache",
            )
        return ModelLimits(max_context_length=context, vocab_size=self.config.vocab_size)
