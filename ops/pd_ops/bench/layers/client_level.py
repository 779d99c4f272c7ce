"""The same cases as a client sees them: a router and two workers as processes of their own, by the wall clock."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from pd_engine.contracts import api_pb2
from pd_engine.settings import load_settings
from pd_engine.text.defaults import SamplingFields
from pd_ops.bench.engine_rows import Kind, prompts_of
from pd_ops.bench.harness import served
from pd_ops.bench.layers.work import Case
from pd_ops.bench.measured_process import Document
from pd_ops.client import RouterClient, router_client
from pd_ops.latency import StreamTiming
from pd_ops.request_options import TokensPrompt, to_request

ALONE_TOKENS = 48         # of an answer in a batch of one
TOKENS_A_SEQUENCE = 16    # longer by so many for each further one: all have to run at once for a while
FEWEST_TOKENS = 8         # that must have come meanwhile, of each


async def client_times(
    model: Path, cases: Sequence[Case], engine: Document, *, requests: int, note: Callable[[str], None]
) -> dict[Case, float]:
    """Milliseconds until the first token, or between two: medians. A case whose answers hardly ran at once is left out.

    Args:
        engine: settings of that section.

    Raises:
        PdRelayError: the processes did not start, or a request failed.
    """
    settings = load_settings(None, {
        "model": str(model), "decode.speculate": 0, "router.grpc_port": 0, "router.http_port": 0,
        **{f"engine.{name}": value for name, value in engine.items()},
    })
    found: dict[Case, float] = {}
    with tempfile.TemporaryDirectory(prefix="pd-relay-bench-") as directory:
        note("starting a router and two workers")
        async with served(settings, Path(directory)) as address, router_client(address) as client:
            info = await client.model_info()
            for case in cases:
                note(f"{case.text}: through router and workers")
                times = [await _one(client, case, number, info) for number in range(requests + 1)]
                if known := [ms for ms in times[1:] if ms is not None]:  # the first one connects, and does not count
                    found[case] = statistics.median(known)
    return found


async def _one(client: RouterClient, case: Case, number: int, info: api_pb2.GetModelInfoResponse) -> float | None:
    prompts = prompts_of(case.comparison, info.vocab_size, number)
    num_new = 2
    if case.kind is Kind.DECODE:
        num_new = min(info.max_context_length - case.tokens, ALONE_TOKENS + TOKENS_A_SEQUENCE * (case.batch - 1))
    done = await asyncio.gather(*(client.complete(_request(prompt, num_new)) for prompt in prompts))
    if case.kind is Kind.PREFILL:
        return done[0].timing.ttft_ms
    return shared_itl_ms([one.timing for one in done])


def shared_itl_ms(timings: Sequence[StreamTiming]) -> float | None:
    """Between two tokens of a stream while all streams run; None if that was hardly ever so."""
    begin_s = max(one.arrivals[0][0] for one in timings)
    end_s = min(one.arrivals[-1][0] for one in timings)
    num_tokens = sum(count for one in timings for at_s, count in one.arrivals if begin_s < at_s <= end_s)
    if num_tokens < FEWEST_TOKENS * len(timings):
        return None
    return 1e3 * (end_s - begin_s) * len(timings) / num_tokens


def _request(prompt: Sequence[int], num_new: int) -> api_pb2.GenerateRequest:
    sampling = SamplingFields(temperature=0.0, max_tokens=num_new, ignore_eos=True, speculate=0)
    placement = api_pb2.Placement(
        prefill_worker="prefill-0", decode_worker="decode-0", bypass_prefix_cache=True
    )
    return to_request(TokensPrompt(token_ids=tuple(prompt)), sampling, placement=placement)
