"""Settings that a running cluster is given: what its processes may have while others have the old ones. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pd_engine.errors import InvalidArgument, shown
from pd_engine.settings import ClusterSettings, Settings, load_settings

SIZES = ("prefill.workers", "decode.workers")  # of the start; what pools have now is for `scale`
PORTS = ("router.grpc_port", "router.http_port")  # the next router takes over
ALIKE = (  # in processes that hand over to each other: while a roll goes on, there are old and new ones
    "model", "engine.dtype", "engine.latent_dtype", "engine.block_size", "engine.device", "engine.ops",
    "engine.prefill_form", "transfer.transport", "transfer.checksums", "transfer.lease_ms",
)
DRAFTS = "decode.speculate"  # 0 leaves the MTP layer out, in caches too; other numbers are of one kind
FIXED = (
    *ALIKE, DRAFTS, "engine.threads", "router.host", *PORTS,
    *(f"cluster.{name}" for name in ClusterSettings.model_fields),
)


def changed_settings(current: Settings, named: Mapping[str, Any]) -> Settings:
    """What a settings file names stands over what the cluster has; sizes of pools stay.

    Raises:
        InvalidArgument: a key or a value that there is not, or one that cannot change while the cluster runs.
    """
    before = _flat(current.model_dump())
    wanted = {**before, **_flat(named)}
    for key in PORTS:
        if wanted[key] == 0:  # any free one: the one that it has
            wanted[key] = before[key]
    changed = load_settings(None, {**wanted, **{key: before[key] for key in SIZES}})
    after = _flat(changed.model_dump())
    for key in FIXED:
        if after[key] != before[key] and not (key == DRAFTS and after[key] and before[key]):
            raise InvalidArgument(
                f"settings: {key} cannot change while the cluster runs: it has {shown(before[key])}, not "
                f"{shown(after[key])}; start the cluster anew"
            )
    return changed


def _flat(document: Mapping[str, Any]) -> dict[str, Any]:
    """By "section.key"; what is no section by its name."""
    flat: dict[str, Any] = {}
    for name, value in document.items():
        flat |= {f"{name}.{key}": one for key, one in value.items()} if isinstance(value, Mapping) else {name: value}
    return flat
