"""Cache layouts in messages: packed, and read with every field checked."""

from __future__ import annotations

from typing import Any

from kv_transfer.wire import Fields
from pd_engine.cache.layout import DTYPE_BYTES, CacheLayout, Component, ComponentKind
from pd_engine.errors import InvalidArgument

MAX_COMPONENTS = 1_024
MAX_BLOCK_SIZE = 1_024
MAX_WIDTH = 1 << 24
MAX_TOKENS = 1 << 24
MAX_NAME_CHARS = 128


def layout_map(layout: CacheLayout) -> dict[str, Any]:
    return {
        "version": layout.version, "block_size": layout.block_size,
        "components": [
            {"name": c.name, "kind": c.kind.value, "width": c.width, "dtype": c.dtype,
             "first_position": c.first_position, "window_slots": c.window_slots}
            for c in layout.components
        ],
    }


def read_layout(fields: Fields) -> CacheLayout:
    components = tuple(
        _component(Fields(item, f"{fields.where}.components[{index}]"))
        for index, item in enumerate(fields.items("components", MAX_COMPONENTS))
    )
    layout = CacheLayout(
        block_size=fields.integer("block_size", 1, MAX_BLOCK_SIZE), components=components,
        version=fields.integer("version", 0, 1 << 16),
    )
    fields.done()
    if not components or len({component.name for component in components}) != len(components):
        raise InvalidArgument(f"{fields.where}: components must be at least one, with different names")
    return layout


def _component(fields: Fields) -> Component:
    name, kind = fields.text("name", MAX_NAME_CHARS), fields.text("kind", 16)
    if kind not in {known.value for known in ComponentKind}:
        raise InvalidArgument(f"{fields.where}: kind must be paged, ring or snapshot, got {kind!r}")
    is_ring = kind == ComponentKind.RING.value
    component = Component(
        name=name, kind=ComponentKind(kind), width=fields.integer("width", 1, MAX_WIDTH), dtype=read_dtype(fields),
        first_position=fields.integer("first_position", 0, MAX_TOKENS),
        window_slots=fields.integer("window_slots", int(is_ring), MAX_TOKENS if is_ring else 0),
    )
    fields.done()
    return component


def read_dtype(fields: Fields) -> str:
    dtype = fields.text("dtype", 16)
    if dtype not in DTYPE_BYTES:
        raise InvalidArgument(f"{fields.where}: dtype must be one of {', '.join(DTYPE_BYTES)}, got {dtype!r}")
    return dtype
