"""What a handoff costs a client: real processes, one request at a time, the times at which its tokens arrive."""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pd_engine.contracts import api_pb2
from pd_engine.errors import FailedPrecondition
from pd_engine.settings import load_settings
from pd_engine.text.defaults import SamplingFields
from pd_ops.bench.engine_rows import Comparison, Kind, prompts_of
from pd_ops.bench.harness import served
from pd_ops.bench.measured_process import Document
from pd_ops.client import Completion, router_client
from pd_ops.latency import StreamTiming
from pd_ops.request_options import TokensPrompt, to_request

NUM_NEW_TOKENS = 48
NUM_UNSTEADY_GAPS = 1  # the gap that the handoff is in


@dataclass(frozen=True, kw_only=True, slots=True)
class HandoffRow:
    """Medians over some requests, one at a time, without drafts.

    Attributes:
        hidden_share: bytes that the decode worker had verified when the prompt had been computed, of all.
        token1_gap_ms: from the first token to the second, less `itl_ms`: what the handoff adds.
        itl_ms: between tokens after the second: the mean, as a busy client is given several at once.
    """

    transport: str
    prompt_tokens: int
    hidden_share: float
    token1_gap_ms: float
    itl_ms: float

    def to_json(self) -> Document:
        return asdict(self)


async def measure_handoffs(
    model: Path, transport: str, prompt_tokens: Sequence[int], *, requests: int, dtype: str,
    note: Callable[[str], None], add: Callable[[HandoffRow], None],
) -> None:
    """Adds the rows of one transport as they are known, on processes that are started for it.

    Raises:
        PdRelayError: they did not start, or a request failed.
    """
    settings = load_settings(None, {
        "model": str(model), "transfer.transport": transport, "decode.speculate": 0, "engine.dtype": dtype,
        "router.grpc_port": 0, "router.http_port": 0,
    })
    with tempfile.TemporaryDirectory(prefix="pd-relay-bench-") as directory:
        note(f"{transport}: starting a router and two workers")
        async with served(settings, Path(directory)) as address, router_client(address) as client:
            vocab_size = (await client.model_info()).vocab_size
            for count in prompt_tokens:
                completions = []
                for number in range(requests + 1):  # the first one connects, and does not count
                    what = f"{number} of {requests}" if number else "to warm up"
                    note(f"{transport}: prompt of {count} tokens, {what}")
                    completions.append(await client.complete(_request(count, vocab_size, number)))
                add(handoff_row(transport, count, completions[1:]))


def handoff_row(transport: str, prompt_tokens: int, completions: Sequence[Completion]) -> HandoffRow:
    """Raises:
    FailedPrecondition: a prompt was not handed over by that transport.
    """
    for completion in completions:
        if completion.complete.handoff.transport != transport:
            raise FailedPrecondition(
                f"the handoff went by {completion.complete.handoff.transport or 'no transport'}, not by {transport}"
            )
    steady = [statistics.mean(gaps_ms(one.timing)[NUM_UNSTEADY_GAPS:]) for one in completions]
    extra = [gaps_ms(one.timing)[0] - itl for one, itl in zip(completions, steady, strict=True)]
    hidden = [one.complete.handoff.hidden_bytes / one.complete.handoff.bytes for one in completions]
    return HandoffRow(
        transport=transport, prompt_tokens=prompt_tokens, hidden_share=statistics.median(hidden),
        token1_gap_ms=statistics.median(extra), itl_ms=statistics.median(steady),
    )


def gaps_ms(timing: StreamTiming) -> list[float]:
    """Between each token and the next; 0 between tokens that came together."""
    times = [time for time, num_tokens in timing.arrivals for _ in range(num_tokens)]
    return [1e3 * (later - earlier) for earlier, later in itertools.pairwise(times)]


def _request(prompt_tokens: int, vocab_size: int, number: int) -> api_pb2.GenerateRequest:
    [token_ids] = prompts_of(
        Comparison(kind=Kind.PREFILL, batch=1, prompt_tokens=prompt_tokens), vocab_size, number
    )
    sampling = SamplingFields(temperature=0.0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True, speculate=0)
    placement = api_pb2.Placement(
        prefill_worker="prefill-0", decode_worker="decode-0", bypass_prefix_cache=True
    )
    return to_request(TokensPrompt(token_ids=tuple(token_ids)), sampling, placement=placement)
