"""One loaded model with its cache: what a worker, or `pd-relay generate`, computes on. It knows no role."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import psutil
import torch

from pd_engine.cache.arena import Arena
from pd_engine.cache.blocks import BlockPool
from pd_engine.cache.device_arena import DeviceArena
from pd_engine.cache.layout import CacheLayout
from pd_engine.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from pd_engine.fingerprint import engine_fingerprint
from pd_engine.model.checkpoint import check_tensors, checkpoint_dtype, stored_tensors
from pd_engine.model.config import ModelConfig, cache_layout, check_latent_dtype
from pd_engine.model.mla import LayerCache
from pd_engine.model.mtp import Mtp
from pd_engine.model.rope import rope_table_bytes
from pd_engine.model.transformer import Transformer
from pd_engine.model.weights import ModelWeights, load_weights, weights_size
from pd_engine.settings import EngineSettings
from pd_kernels.backend import OpsUnavailable, load_ops
from pd_kernels.ops import Ops

log = logging.getLogger(__name__)

MIB = 1024 * 1024
Dtype = Literal["bf16", "fp16", "fp32"]


class Engine:
    """The model's functions over packed weights, and the arena and pool of its blocks.

    Used from one thread at a time. `main_caches` and `mtp_cache` are the arena's components as the layers take them.
    """

    def __init__(
        self, *, config: ModelConfig, weights: ModelWeights, ops: Ops, layout: CacheLayout, num_blocks: int,
        max_context_length: int, dtype: str, prefill_form: str, fingerprint: str, load_seconds: float,
    ) -> None:
        self.config = config
        self.ops = ops
        self.layout = layout
        self.dtype = dtype
        self.fingerprint = fingerprint
        self.max_context_length = max_context_length
        self.expand_prompts = prefill_form == "expanded"
        self.num_parameters = weights.num_parameters
        self.weights_bytes = weights.num_bytes
        self.load_seconds = load_seconds
        self.arena = Arena(layout, num_blocks) if ops.is_on_host else DeviceArena(layout, num_blocks, ops.device)
        self.pool = BlockPool(num_blocks, on_reuse=self.arena.renew)
        self.main = Transformer(config, weights, ops, num_positions=max_context_length, dtype=dtype)
        self.mtp = Mtp(self.main, weights.mtp) if weights.mtp is not None else None
        caches = [
            LayerCache(slots_GKE=slots, first_position=component.first_position)
            for slots, component in zip(self.arena.components, layout.components, strict=True)
        ]
        self.main_caches = caches[: config.num_hidden_layers]
        self._mtp_caches = caches[config.num_hidden_layers :]

    @property
    def has_mtp(self) -> bool:
        return self.mtp is not None

    def with_ops(self, ops: Ops) -> Engine:
        """The same engine, weights, cache and all, that computes with other ops, which take the same packed weights."""
        view = copy.copy(self)
        view.ops = ops
        view.main = self.main.with_ops(ops)
        view.mtp = None if self.mtp is None else self.mtp.over(view.main)
        return view

    @property
    def mtp_component(self) -> int:
        """Index of MTP's component in the layout."""
        assert self._mtp_caches, "the engine has no MTP layer"
        return self.config.num_hidden_layers

    @property
    def mtp_cache(self) -> LayerCache:
        assert self._mtp_caches, "the engine has no MTP layer"
        return self._mtp_caches[0]

    @classmethod
    def load(
        cls, path: Path, settings: EngineSettings, *, max_speculate: int, also_needed: Mapping[str, int] | None = None
    ) -> Engine:
        """Loads the checkpoint in folder `path`.

        Args:
            max_speculate: the most draft tokens a sequence may ask for; 0 leaves the MTP layer out, weights and cache.
            also_needed: bytes that the process will take later, by what they are for; memory must have room for them.

        Raises:
            NotFound, InvalidArgument, FailedPrecondition: the checkpoint is not there, broken or not supported, or
                does not fit the settings.
            ResourceExhausted: weights, cache, table of angles and `also_needed` do not fit into this host's memory, or
                weights and cache not into the GPU's.
        """
        started_s = time.monotonic()
        config = ModelConfig.load(path)
        stored = stored_tensors(path)
        with_mtp = max_speculate > 0 and config.has_mtp
        check_tensors(config, stored, with_mtp=with_mtp)
        dtype = checkpoint_dtype(config, stored) if settings.dtype == "auto" else settings.dtype
        check_latent_dtype(config, dtype, settings.latent_dtype)
        latent_dtype = dtype if settings.latent_dtype == "auto" else settings.latent_dtype
        layout = cache_layout(config, latent_dtype, settings.block_size, with_mtp)
        num_blocks = _num_blocks(layout, settings)
        max_context_length = _context_length(config, settings)
        _, num_weight_bytes = weights_size(config, stored, dtype=dtype, with_mtp=with_mtp)
        ops = _load_ops(settings, dtype)
        computing = {"weights": num_weight_bytes, "cache": num_blocks * layout.block_bytes}
        _check_device_memory(ops.device, sum(computing.values()))
        _check_memory({
            **(computing if ops.device.type == "cpu" else {}),
            "table of angles": rope_table_bytes(config, max_context_length),
            **(also_needed or {}),
        })
        engine = cls(
            config=config,
            weights=load_weights(config, stored, ops, dtype=dtype, with_mtp=with_mtp),
            ops=ops,
            layout=layout,
            num_blocks=num_blocks,
            max_context_length=max_context_length,
            dtype=dtype,
            prefill_form=settings.prefill_form,
            fingerprint=engine_fingerprint(
                path, config, layout, dtype=dtype, prefill_form=settings.prefill_form, numerics=ops.numerics
            ),
            load_seconds=0.0,
        )
        engine.load_seconds = time.monotonic() - started_s
        log.info(
            "loaded %s: %.1f million parameters, %.1f MiB %s, %d blocks of %d tokens (%.1f MiB), %.2f s",
            path, engine.num_parameters / 1e6, engine.weights_bytes / MIB, dtype, num_blocks, layout.block_size,
            num_blocks * layout.block_bytes / MIB, engine.load_seconds,
        )
        return engine


def _num_blocks(layout: CacheLayout, settings: EngineSettings) -> int:
    num_blocks = settings.cache_mib * MIB // layout.block_bytes
    if num_blocks < 1:
        raise InvalidArgument(
            f"settings: engine.cache_mib: {settings.cache_mib} MiB do not hold one block of {layout.block_size} tokens "
            f"({layout.block_bytes} bytes)"
        )
    return num_blocks


def _context_length(config: ModelConfig, settings: EngineSettings) -> int:
    wanted = settings.max_context_length
    if wanted is not None and wanted > config.max_position_embeddings:
        raise InvalidArgument(
            f"settings: engine.max_context_length must be at most the checkpoint's max_position_embeddings "
            f"({config.max_position_embeddings}), got {wanted}"
        )
    return wanted or config.max_position_embeddings


def _check_memory(needs: dict[str, int]) -> None:
    """`needs`: bytes by what they are for."""
    available = psutil.virtual_memory().available
    if sum(needs.values()) > available:
        listed = ", ".join(f"{name} {num_bytes / MIB:.0f} MiB" for name, num_bytes in needs.items())
        raise ResourceExhausted(f"{listed}: more than the {available / MIB:.0f} MiB that are available on this host")


def _check_device_memory(device: torch.device, num_bytes: int) -> None:
    """`num_bytes`: of weights and cache. What the steps themselves need comes on top."""
    if device.type != "cuda":
        return
    free, _ = torch.cuda.mem_get_info(device)
    if num_bytes > free:
        raise ResourceExhausted(
            f"weights and cache take {num_bytes / MIB:.0f} MiB: more than the {free / MIB:.0f} MiB that are free on "
            f"{torch.cuda.get_device_name(device)}"
        )


def _load_ops(settings: EngineSettings, dtype: Dtype) -> Ops:
    try:
        return load_ops(settings.ops, device=settings.device, threads=settings.threads, dtype=dtype)
    except OpsUnavailable as error:
        what = "engine.ops: " + settings.ops if settings.device == "cpu" else "engine.device: " + settings.device
        raise FailedPrecondition(f"settings: {what}: {error}") from None
