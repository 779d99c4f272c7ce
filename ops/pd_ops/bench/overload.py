"""More requests than can be served in time, in simulated time: the router's own classes for reports, forecasts, line
and placement, with simulated workers of both pools."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial

from pd_engine.contracts import worker_pb2 as pb
from pd_engine.errors import ResourceExhausted
from pd_ops.bench.measured_process import Document
from pd_ops.bench.placement_trace import ROOMY, SimulatedPrefill, TracedRequest
from pd_router.admission import Admission, AdmissionLimits
from pd_router.costs import num_expected_tokens
from pd_router.placement import Placement
from pd_router.pools import PlacementRequest, Snapshot, WorkerView
from pd_router.targets import Targets
from pd_router.waiting_line import Waiter
from pd_router.worker_load import WorkerLoad

REPORT_INTERVAL_S = 0.2
NUM_PREFILL, NUM_DECODE = 2, 2
PREFILL_TOKENS_PER_S = 10_000.0
STEP_MS, STEP_MS_PER_SEQUENCE = 12.0, 0.6
TTFT_TARGET_MS, ITL_TARGET_MS = 1_500.0, 30.0
PROMPT_TOKENS = (600.0, 0.8)  # log-normal: median and sigma
OUTPUT_TOKENS = (120.0, 0.6)
MAX_TOKENS = 512
UNSTEADINESS = 0.1  # a worker is faster or slower by so much at most
SPEED_CHANGE_S = 1.0
WARM_UP_S = 20.0
LIMITS = AdmissionLimits(max_running=256, max_waiting=256, max_queued_ms=2_000)


@dataclass(frozen=True, kw_only=True, slots=True)
class OverloadRow:
    """Of the requests that came after the warm-up.

    Attributes:
        served_share, refused_at_once_share, refused_in_line_share: of all; the last found no room in time.
        goodput_per_s: requests a second that kept within both targets.
        ttft_p99, ttft_most, itl_p99, itl_most: of those that were served, as shares of their target.
    """

    load_per_s: float
    num_requests: int
    served_share: float
    refused_at_once_share: float
    refused_in_line_share: float
    goodput_per_s: float
    ttft_p99: float
    ttft_most: float
    itl_p99: float
    itl_most: float

    def to_json(self) -> Document:
        return asdict(self)


@dataclass(eq=False, kw_only=True, slots=True)
class _Request:
    number: int
    arrival_s: float
    num_prompt: int
    num_output: int
    wanted: PlacementRequest
    waiter: Waiter
    targets: Targets
    placement: Placement | None = None
    first_s: float = 0.0
    end_s: float = 0.0
    refused: str = ""
    num_left: int = 0

    @property
    def ttft(self) -> float:
        return 1000 * (self.first_s - self.arrival_s) / TTFT_TARGET_MS

    @property
    def itl(self) -> float:
        return 1000 * (self.end_s - self.first_s) / max(1, self.num_output - 1) / ITL_TARGET_MS


@dataclass(eq=False, slots=True)
class _Decode:
    """A decode worker: a step gives each of its sequences a token, and takes the longer the more there are."""

    worker_id: str
    load: WorkerLoad = field(default_factory=WorkerLoad)
    passengers: dict[int, _Request] = field(default_factory=dict)
    batch: list[_Request] = field(default_factory=list)
    is_stepping: bool = False
    slowness: float = 1.0
    itl_limit_ms: float = math.inf

    def step_s(self) -> float:
        return self.slowness * (STEP_MS + STEP_MS_PER_SEQUENCE * len(self.batch)) / 1000

    def report(self) -> None:
        num_running = len(self.batch)
        self.load.note_report(pb.LoadsReply(
            num_running=num_running, num_leases=len(self.passengers) - num_running, num_blocks_free=ROOMY,
            itl_ms=1000 * self.step_s() if num_running else 0.0,
        ))

    def view(self) -> WorkerView:
        num_sequences = max(len(self.passengers), self.load.num_sequences)
        itl = self.load.itl
        view = WorkerView(
            worker_id=self.worker_id, ready=True, num_blocks_free=ROOMY, num_blocks_total=ROOMY,
            num_sequences=num_sequences, itl_limit_ms=self.itl_limit_ms,
        )
        if not itl.is_measured:
            return view
        return replace(view, next_itl_ms=itl.at(num_sequences + 1), alone_itl_ms=itl.at(1))


def overload(
    load_per_s: float, *, seconds: float, prefill_tokens_per_s: float = PREFILL_TOKENS_PER_S, with_targets: bool = True,
    seed: int = 1,
) -> OverloadRow:
    """Random arrivals at this rate for so many simulated seconds, run to their end; speeds change every second.

    Args:
        prefill_tokens_per_s: of each prefill worker; little, and it is they that are too few.
        with_targets: False: nobody is refused for them, as a comparison.
    """
    return _World(load_per_s, seconds, prefill_tokens_per_s, with_targets, random.Random(seed)).run()


class _World:
    def __init__(
        self, load_per_s: float, seconds: float, prefill_tokens_per_s: float, with_targets: bool, rng: random.Random
    ) -> None:
        self._load_per_s = load_per_s
        self._seconds = seconds
        self._prefill_tokens_per_s = prefill_tokens_per_s
        self._ttft_ms = TTFT_TARGET_MS if with_targets else None
        self._itl_ms = ITL_TARGET_MS if with_targets else None
        self._rng = rng
        self._admission = Admission(LIMITS)
        self._prefill = {
            f"prefill-{n}": SimulatedPrefill(f"prefill-{n}", tokens_per_s=prefill_tokens_per_s, cache_blocks=0)
            for n in range(NUM_PREFILL)
        }
        limit_ms = math.inf if self._itl_ms is None else self._itl_ms
        self._decode = {f"decode-{n}": _Decode(f"decode-{n}", itl_limit_ms=limit_ms) for n in range(NUM_DECODE)}
        self._computing: dict[TracedRequest, _Request] = {}
        self._waiting: dict[Waiter, _Request] = {}
        self._requests: list[_Request] = []
        self._num_open = 0
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = itertools.count()

    def run(self) -> OverloadRow:
        at_s = 0.0
        while (at_s := at_s + self._rng.expovariate(self._load_per_s)) < self._seconds:
            self._requests.append(self._request(at_s))
            self._at(at_s, partial(self._arrive, self._requests[-1]))
        self._num_open = len(self._requests)
        self._at(0.0, self._change_speeds)
        self._at(0.0, self._report)
        while self._num_open:
            now_s, _, happen = heapq.heappop(self._events)
            happen(now_s)
        assert self._admission.num_running == 0
        assert not len(self._admission.line)
        return self._row()

    def _request(self, at_s: float) -> _Request:
        num_prompt = self._draw(PROMPT_TOKENS)
        wanted = PlacementRequest(
            num_tokens=num_prompt, num_prefill_blocks=1, num_decode_blocks=1, num_output_tokens=MAX_TOKENS
        )
        return _Request(
            number=next(self._numbers), arrival_s=at_s, num_prompt=num_prompt,
            num_output=min(MAX_TOKENS, 1 + self._draw(OUTPUT_TOKENS)), wanted=wanted,
            waiter=Waiter(num_tokens=num_prompt + num_expected_tokens(wanted)),
            targets=Targets(begun_s=at_s, ttft_ms=self._ttft_ms, itl_ms=self._itl_ms),
        )

    def _draw(self, distribution: tuple[float, float]) -> int:
        median, sigma = distribution
        return max(1, round(median * self._rng.lognormvariate(0.0, sigma)))

    def _at(self, when_s: float, happen: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when_s, next(self._numbers), happen))

    def _snapshot(self) -> Snapshot:
        return Snapshot(
            prefill=tuple(worker.view() for worker in self._prefill.values()),
            decode=tuple(worker.view() for worker in self._decode.values()),
            prefill_is_measured=True,
            itl_is_measured=any(worker.load.itl.is_measured for worker in self._decode.values()),
        )

    # The router

    def _arrive(self, request: _Request, now_s: float) -> None:
        try:
            arrival = self._admission.arrive(
                request.waiter, request.wanted, self._snapshot(), request.targets, now_s
            )
        except ResourceExhausted:
            self._refuse(request, "at once")
            return
        if arrival.displaced is not None:
            self._refuse(self._waiting.pop(arrival.displaced), "at once")
        if arrival.placement is not None:
            self._begin(request, arrival.placement, now_s)
            return
        self._waiting[request.waiter] = request
        if self._ttft_ms is not None:
            self._at(request.arrival_s + self._ttft_ms / 1000, partial(self._overdue, request))

    def _turns(self, now_s: float) -> None:
        """Something has changed: whoever is at the head of the line tries."""
        while (head := self._admission.line.head) is not None:
            request = self._waiting[head]
            try:
                placement = self._admission.turn(
                    head, request.wanted, self._snapshot(), request.targets, now_s
                )
            except ResourceExhausted:
                self._leave(request)
                continue
            if placement is None:
                return
            del self._waiting[head]
            self._begin(request, placement, now_s)

    def _overdue(self, request: _Request, now_s: float) -> None:
        if request.waiter in self._waiting:
            self._leave(request)

    def _leave(self, request: _Request) -> None:
        del self._waiting[request.waiter]
        self._admission.leave(request.waiter)
        self._refuse(request, "in line")

    def _refuse(self, request: _Request, how: str) -> None:
        assert not request.refused
        assert request.placement is None
        request.refused = how
        self._num_open -= 1

    def _report(self, now_s: float) -> None:
        for prefill in self._prefill.values():
            prefill.report(now_s)
        for decode in self._decode.values():
            decode.report()
        self._turns(now_s)
        self._at(now_s + REPORT_INTERVAL_S, self._report)

    # The workers

    def _change_speeds(self, now_s: float) -> None:
        for prefill in self._prefill.values():
            prefill.tokens_per_s = self._prefill_tokens_per_s * self._rng.uniform(1 - UNSTEADINESS, 1 + UNSTEADINESS)
        for decode in self._decode.values():
            decode.slowness = self._rng.uniform(1 - UNSTEADINESS, 1 + UNSTEADINESS)
        self._at(now_s + SPEED_CHANGE_S, self._change_speeds)

    def _begin(self, request: _Request, placement: Placement, now_s: float) -> None:
        request.placement = placement
        decode = self._decode[placement.decode_worker or ""]
        decode.passengers[request.number] = request
        decode.load.note_arrival(str(request.number))
        traced = TracedRequest(request.arrival_s, request.num_prompt, ())
        self._computing[traced] = request
        prefill = self._prefill[placement.prefill_worker]
        prefill.submit(traced, request.num_prompt)
        self._next_prompt(prefill, now_s)

    def _next_prompt(self, prefill: SimulatedPrefill, now_s: float) -> None:
        begun = prefill.begin(now_s)
        if begun is not None:
            self._at(begun[0], partial(self._prefilled, prefill))

    def _prefilled(self, prefill: SimulatedPrefill, now_s: float) -> None:
        request = self._computing.pop(prefill.finish()[0])
        request.first_s = request.end_s = now_s
        request.num_left = request.num_output - 1
        assert request.placement is not None
        decode = self._decode[request.placement.decode_worker or ""]
        decode.batch.append(request)
        if not decode.is_stepping:
            decode.is_stepping = True
            self._at(now_s + decode.step_s(), partial(self._step, decode))
        self._next_prompt(prefill, now_s)

    def _step(self, decode: _Decode, now_s: float) -> None:
        for request in list(decode.batch):
            request.num_left -= 1
            request.end_s = now_s
            if request.num_left <= 0:
                decode.batch.remove(request)
                del decode.passengers[request.number]
                decode.load.note_departure(str(request.number))
                self._admission.free_seat()
                self._num_open -= 1
        decode.is_stepping = bool(decode.batch)
        if decode.batch:
            self._at(now_s + decode.step_s(), partial(self._step, decode))
        self._turns(now_s)

    def _row(self) -> OverloadRow:
        counted = [request for request in self._requests if request.arrival_s >= WARM_UP_S]
        served = [request for request in counted if not request.refused]
        ttfts, itls = sorted(r.ttft for r in served), sorted(r.itl for r in served)
        num_good = sum(request.ttft <= 1 and request.itl <= 1 for request in served)

        def share(how: str) -> float:
            return sum(request.refused == how for request in counted) / len(counted)

        return OverloadRow(
            load_per_s=self._load_per_s, num_requests=len(counted), served_share=len(served) / len(counted),
            refused_at_once_share=share("at once"), refused_in_line_share=share("in line"),
            goodput_per_s=num_good / (self._seconds - WARM_UP_S),
            ttft_p99=ttfts[len(ttfts) * 99 // 100], ttft_most=ttfts[-1],
            itl_p99=itls[len(itls) * 99 // 100], itl_most=itls[-1],
        )
