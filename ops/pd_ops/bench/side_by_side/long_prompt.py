"""What running answers feel of a long prompt: times between their tokens while one is read, and while none is."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from pd_engine.errors import FailedPrecondition
from pd_ops.bench.measured_process import Document
from pd_ops.bench.serve.http_sender import Endpoint, HttpSender, get_json
from pd_ops.bench.serve.prompts import PromptMaker
from pd_ops.bench.serve.record import Recording
from pd_ops.bench.serve.sender import Sampling
from pd_ops.bench.serve.summary import percentile
from pd_ops.bench.serve.traced import TracedRequest

NUM_STREAMS = 4
STREAM_PROMPT, LONG_PROMPT = 128, 2048
QUIET_S = 0.5        # before each long prompt, and after the streams have begun
FEWEST_GAPS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Disturbance:
    """Milliseconds between two tokens of running answers: while no long prompt was read, and from when one was sent to
    its first token.

    Attributes:
        ratio: of the two p99. first_token_ms: of the long prompts, the median.
    """

    num_prompts: int
    quiet_p50_ms: float
    quiet_p99_ms: float
    during_p50_ms: float
    during_p99_ms: float
    ratio: float
    first_token_ms: float

    def to_json(self) -> Document:
        return asdict(self)


async def disturb(url: str, *, num_prompts: int, stream_tokens: int, vocab_size: int, salt: str) -> Disturbance:
    """Some streams run; long prompts come one after the other.

    Raises:
        PdRelayError: the endpoint failed a request, or the streams ended too early for a figure.
    """
    endpoint = Endpoint.parse(url)
    model = (await get_json(endpoint, "/v1/models"))["data"][0]["id"]
    sender = HttpSender(endpoint, model, Sampling())
    prompts = PromptMaker(vocab_size=vocab_size, salt=salt)
    begin_s = time.monotonic()

    def now() -> float:
        return time.monotonic() - begin_s

    def recording(number: int, prompt_tokens: int, answer_tokens: int) -> tuple[list[int], Recording]:
        request = TracedRequest(arrival_s=0.0, prompt_tokens=prompt_tokens, output_tokens=answer_tokens)
        return prompts.token_ids(request, number), Recording(
            number=number, kind="", intended_s=now(), prompt_tokens=prompt_tokens, asked_tokens=answer_tokens
        )

    streams = [recording(number, STREAM_PROMPT, stream_tokens) for number in range(NUM_STREAMS)]
    running = [asyncio.create_task(sender.send(ids, into, now)) for ids, into in streams]
    windows: list[tuple[float, float]] = []
    try:
        while not all(into.arrivals for _, into in streams):
            await asyncio.sleep(0.05)
            for task in running:
                if task.done():
                    task.result()
        for number in range(num_prompts):
            await asyncio.sleep(QUIET_S)
            ids, into = recording(NUM_STREAMS + number, LONG_PROMPT, 2)
            sent_s = now()
            await sender.send(ids, into, now)
            windows.append((sent_s, into.arrivals[0][0]))
        await asyncio.sleep(QUIET_S)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return disturbance([into.arrivals for _, into in streams], windows)


def disturbance(streams: Sequence[Sequence[tuple[float, int]]], windows: Sequence[tuple[float, float]]) -> Disturbance:
    """From when the tokens of each stream came, and from when to when long prompts were read. A gap that reaches into a
    window is of that window. What was before all streams had a token does not count.

    Raises:
        FailedPrecondition: there are too few gaps of either sort.
    """
    begin_s = max(arrivals[0][0] for arrivals in streams)
    quiet: list[float] = []
    during: list[float] = []
    for arrivals in streams:
        for (before_s, _), (after_s, count) in itertools.pairwise(arrivals):
            if before_s < begin_s:
                continue
            is_during = any(before_s < end_s and after_s > start_s for start_s, end_s in windows)
            (during if is_during else quiet).extend([1e3 * (after_s - before_s) / count] * count)
    if min(len(quiet), len(during)) < FEWEST_GAPS:
        raise FailedPrecondition(
            f"{len(quiet)} tokens came while no long prompt was read, {len(during)} while one was: too few to tell"
        )
    quiet.sort()
    during.sort()
    firsts = sorted(1e3 * (end_s - start_s) for start_s, end_s in windows)
    return Disturbance(
        num_prompts=len(windows), quiet_p50_ms=percentile(quiet, 0.5), quiet_p99_ms=percentile(quiet, 0.99),
        during_p50_ms=percentile(during, 0.5), during_p99_ms=percentile(during, 0.99),
        ratio=percentile(during, 0.99) / percentile(quiet, 0.99), first_token_ms=percentile(firsts, 0.5),
    )
