"""What DeepSeek published of a day of serving V3 and R1 (27 February 2025, open-infra-index, "One More Thing"), and
what a roofline and plain sums make of it. Thousands of devices as sums over pools: no queue is played."""

from __future__ import annotations

from dataclasses import dataclass

from pd_ops.bench.measured_process import Document
from pd_ops.capacity.named import architecture
from pd_ops.sizing.roofline import HARDWARE, Deployment, roofline

DEVICES_A_NODE = 8
SECONDS_A_DAY = 86_400.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Day:
    """As published; tokens of one day, rates of one node of eight H800."""

    input_tokens: float = 608e9
    cached_tokens: float = 342e9
    output_tokens: float = 168e9
    input_per_s: float = 73_700.0   # cached ones included
    output_per_s: float = 14_800.0
    stream_per_s: float = 21.0      # 20 to 22
    mean_context: float = 4_989.0
    mean_nodes: float = 226.75
    prefill_devices: int = 32
    decode_devices: int = 144


def compared(day: Day, efficiency: float = 1.0) -> list[Document]:
    """`name, published, computed, ratio`."""
    costs = roofline(architecture("deepseek-v3"), Deployment(
        hardware=HARDWARE["h800"], prefill_devices=day.prefill_devices, decode_devices=day.decode_devices,
        efficiency=efficiency,
    ))
    nodes = day.input_tokens / SECONDS_A_DAY / day.input_per_s + day.output_tokens / SECONDS_A_DAY / day.output_per_s
    sequences = day.output_per_s / day.stream_per_s * day.decode_devices / DEVICES_A_NODE
    step_s = costs.decode_s(round(sequences), sequences * day.mean_context)
    computed_share = 1 - day.cached_tokens / day.input_tokens
    prefill_per_s = costs.tokens_per_s_of_prefill * DEVICES_A_NODE / day.prefill_devices
    rows = [
        ("nodes, on average", day.mean_nodes, nodes),
        ("ms between tokens, with the published streams a node", 1e3 / day.stream_per_s, 1e3 * step_s),
        ("output tokens a second and node, with as many streams", day.output_per_s,
         sequences / step_s * DEVICES_A_NODE / day.decode_devices),
        ("computed input tokens a second and node", day.input_per_s * computed_share, prefill_per_s),
    ]
    return [{"name": name, "published": published, "computed": computed, "ratio": computed / published}
            for name, published, computed in rows]
