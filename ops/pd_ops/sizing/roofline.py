"""A cost model of hardware that is not here, by its data sheet, for a DeepSeek-V3-family model.

Experts are spread over all devices of a worker, everything else is on each of them and sees its share of the sequences
(expert and data parallelism, as DeepSeek serves V3). What a step does is added up, nothing hides behind anything: it
reads weights and cache, computes, and sends each token to its experts and back: over NVLink where a worker is one host
at most, over the network (RDMA) where it is more, and nowhere where it is one device; attention is absorbed.
`efficiency` is the share of a data sheet's rates that is assumed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pd_engine.errors import InvalidArgument
from pd_ops.capacity.architecture import COPIES, MTP, ROUTED, Architecture
from pd_ops.capacity.cache import Rows
from pd_ops.sizing.cost_model import CostModel

FP8_BYTES, BF16_BYTES, SCALE_BYTES, SCALE_BLOCK = 1, 2, 4, 128
DISPATCH_LATENCY_S = 10e-6  # of one exchange between the devices of a worker, however small
EXCHANGES_A_LAYER = 2       # to the experts, and back
HANDOFF_FIXED_S = 2e-3
DEVICES_A_HOST = 8
CHUNK_A_DEVICE, BATCH_A_DEVICE = 512, 128  # assumed: prompt tokens of a step, sequences
ROOM_SHARE = 0.9  # of the memory, for weights and cache


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """One device, by its data sheet: dense rates, of one direction.

    Attributes:
        nvlink_gb_per_s: to the other devices of its host. network_gb_per_s: of its own adapter, to other hosts.
    """

    name: str
    fp8_tflops: float
    bf16_tflops: float
    memory_gb_per_s: float
    memory_gib: float
    nvlink_gb_per_s: float
    network_gb_per_s: float


HOPPER = Hardware(
    name="h100", fp8_tflops=1979, bf16_tflops=989, memory_gb_per_s=3350, memory_gib=80, nvlink_gb_per_s=450,
    network_gb_per_s=50,
)
HARDWARE = {
    one.name: one for one in (
        HOPPER, replace(HOPPER, name="h800", nvlink_gb_per_s=200),
        replace(HOPPER, name="h200", memory_gb_per_s=4800, memory_gib=141),
        Hardware(name="b200", fp8_tflops=4500, bf16_tflops=2250, memory_gb_per_s=8000, memory_gib=180,
                 nvlink_gb_per_s=900, network_gb_per_s=50),
    )
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Deployment:
    """Devices of one prefill worker and of one decode worker."""

    hardware: Hardware
    prefill_devices: int
    decode_devices: int
    efficiency: float = 1.0
    tokens_per_step: float = 1.0


def active_parameters(model: Architecture) -> float:
    """That one token is multiplied with: without the embedding and the MTP layer, of the routed experts its own."""
    ledger = model.loaded
    others = sum(
        weight.num_elements for weight in ledger.weights
        if weight.part not in (ROUTED, MTP, COPIES) and "embed" not in weight.name
    )
    return others + ledger.part(ROUTED).num_elements * model.num_experts_per_token / max(1, model.num_experts)


def resident_bytes(model: Architecture, devices: int) -> float:
    """Of the weights on one device, all of which a step of many sequences reads; without the MTP layer."""
    ledger = model.loaded
    routed = ledger.part(ROUTED).num_bytes
    return ledger.num_bytes - ledger.part(MTP).num_bytes - routed + routed / devices


def exchanged_bytes(model: Architecture) -> float:
    """Of one token, to its experts in FP8 with scales and back in bf16, in all layers that have some."""
    scales = SCALE_BYTES * -(-model.hidden_size // SCALE_BLOCK)
    there = model.hidden_size * FP8_BYTES + scales
    return model.num_moe_layers * model.num_experts_per_token * (there + model.hidden_size * BF16_BYTES)


def _slot_bytes(model: Architecture) -> int:
    return sum(component.row_bytes * component.num_layers for component in model.cache)


def sizes(model: Architecture, deployment: Deployment) -> dict[str, int]:
    """Of `Pools`, as such workers would have them: caches by the memory that weights leave, the rest by the device."""
    def room(devices: int) -> int:
        left = ROOM_SHARE * deployment.hardware.memory_gib * 2**30 - resident_bytes(model, devices)
        return max(1, int(devices * left / _slot_bytes(model)))

    return {
        "chunk_tokens": CHUNK_A_DEVICE * deployment.prefill_devices,
        "max_batch": BATCH_A_DEVICE * deployment.decode_devices,
        "prefill_cache_tokens": room(deployment.prefill_devices), "cache_tokens": room(deployment.decode_devices),
    }


def _exchange_s(model: Architecture, hardware: Hardware, devices: int, share: float) -> tuple[float, float]:
    """(of a step, and of one token) between the devices of a worker."""
    if devices == 1:
        return 0.0, 0.0
    gb_per_s = hardware.nvlink_gb_per_s if devices <= DEVICES_A_HOST else hardware.network_gb_per_s
    return (model.num_moe_layers * EXCHANGES_A_LAYER * DISPATCH_LATENCY_S,
            exchanged_bytes(model) / (share * 1e9 * gb_per_s))


def roofline(model: Architecture, deployment: Deployment, *, room_share: float = ROOM_SHARE) -> CostModel:
    """`room_share`: of the memory, that weights may take.

    Raises:
        InvalidArgument: the weights do not fit the devices, or the cache is none of latents for every token.
    """
    if any(component.rows is not Rows.ENTRIES or component.size != 1 for component in model.cache):
        raise InvalidArgument(f"--hardware has costs of DeepSeek-V3's family, whose cache grows with every token, not "
                              f"of {model.name}: pd-relay capacity has its bytes; --cost takes costs of your own")
    hardware, share = deployment.hardware, deployment.efficiency
    slot_bytes = _slot_bytes(model)
    fp8, bf16 = (share * 1e12 * rate for rate in (hardware.fp8_tflops, hardware.bf16_tflops))
    memory = share * 1e9 * hardware.memory_gb_per_s
    for name, devices in (("prefill", deployment.prefill_devices), ("decode", deployment.decode_devices)):
        if resident_bytes(model, devices) >= room_share * hardware.memory_gib * 2**30:
            raise InvalidArgument(f"{model.name} does not fit {devices} devices of {hardware.name}, of whose memory "
                                  f"{room_share:.0%} are for weights and cache: see pd-relay capacity; "
                                  f"--{name}-devices must be more")
    token_s = 2 * active_parameters(model) / fp8
    pair_flops = 2 * 2 * model.query_width * model.num_layers  # scores and values over the latent
    decode, prefill = deployment.decode_devices, deployment.prefill_devices
    (decode_fixed_s, decode_exchange_s), (prefill_fixed_s, prefill_exchange_s) = (
        _exchange_s(model, hardware, devices, share) for devices in (decode, prefill)
    )
    return CostModel(
        source=f"by the data sheet of {hardware.name}, {prefill} devices a prefill worker, {decode} a decode worker, "
               f"at {share:.0%} of its rates",
        prefill_step_ms=1e3 * (resident_bytes(model, prefill) / memory + prefill_fixed_s),
        prefill_ms_per_token=1e3 * (token_s + prefill_exchange_s) / prefill,
        prefill_ms_per_pair=1e3 * pair_flops / bf16 / prefill,
        decode_step_ms=1e3 * (resident_bytes(model, decode) / memory + decode_fixed_s),
        decode_ms_per_sequence=1e3 * (token_s + decode_exchange_s) / decode,
        decode_ms_per_slot=1e3 * max(slot_bytes / memory, pair_flops / bf16) / decode,
        handoff_ms=1e3 * HANDOFF_FIXED_S, tokens_per_step=deployment.tokens_per_step, bytes_per_slot=slot_bytes,
    )
