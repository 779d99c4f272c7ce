"""`unequal-shapes`, `mtp-mismatch`: workers that cannot hand over find out when they first speak."""

from __future__ import annotations

import dataclasses

import pytest

from kv_transfer.compatibility import check_compatible
from pd_engine.cache.layout import CacheLayout, Component, ComponentKind
from pd_engine.errors import FailedPrecondition

LAYOUT = CacheLayout(
    block_size=16,
    components=tuple(
        Component(name=name, kind=ComponentKind.PAGED, width=576, dtype="bf16") for name in ("layers.0", "mtp.0")
    ),
)


def other(**changes: object) -> CacheLayout:
    first = dataclasses.replace(LAYOUT.components[0], **changes)
    return dataclasses.replace(LAYOUT, components=(first, LAYOUT.components[1]))


@pytest.mark.parametrize(("layout", "fingerprint", "checksums", "named"), [
    (dataclasses.replace(LAYOUT, block_size=32), "aa", True, "block_size is 16 at p (source) and 32 at d"),
    (dataclasses.replace(LAYOUT, version=2), "aa", True, "layout version is 1 at p (source) and 2 at d"),
    (dataclasses.replace(LAYOUT, components=LAYOUT.components[:1]), "aa", True, "number of components is 2 .* and 1"),
    (other(dtype="fp32"), "aa", True, "dtype of component layers.0 is bf16 at p (source) and fp32 at d"),
    (other(width=512), "aa", True, "width of component layers.0 is 576 at p (source) and 512 at d"),
    (other(kind=ComponentKind.SNAPSHOT), "aa", True, "kind of component layers.0 is paged at p .* and snapshot at d"),
    (other(name="layers.1"), "aa", True, "component names is layers.0, mtp.0 .* layers.1, mtp.0"),
    (LAYOUT, "bb", True, "fingerprint is aa at p (source) and bb at d"),
    (LAYOUT, "aa", False, "checksums is True at p (source) and False at d"),
])
def test_unequal_shapes_are_refused_with_both_values(
    layout: CacheLayout, fingerprint: str, checksums: bool, named: str
) -> None:
    with pytest.raises(FailedPrecondition, match=named.replace("(", r"\(").replace(")", r"\)")):
        check_compatible(
            source="p", source_fingerprint="aa", source_layout=LAYOUT, source_checksums=True, destination="d",
            destination_fingerprint=fingerprint, destination_layout=layout, destination_checksums=checksums,
        )


def test_equal_workers_may_hand_over() -> None:
    check_compatible(
        source="p", source_fingerprint="aa", source_layout=LAYOUT, source_checksums=True, destination="d",
        destination_fingerprint="aa", destination_layout=LAYOUT, destination_checksums=True,
    )
