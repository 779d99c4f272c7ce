"""A client of the simulated cluster: it asks, reads, perhaps gives up, and checks every message that it gets."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc.aio

from pd_engine.contracts import api_pb2 as api
from pd_engine.contracts import api_pb2_grpc
from pd_engine.errors import PdRelayError, Unavailable
from pd_engine.sampling.params import SamplingParams, seed_of_choice
from pd_engine.sequence import SampledToken
from pd_engine.service.client import typed_error
from pd_ops.simulation.calls import CONNECTION_LOST, MemoryChannel
from pd_ops.simulation.network import Network
from pd_ops.simulation.toy import STOP_TOKEN, oracle

LAST_ARRIVAL_S = 3.0
BUSY_S = 0.8  # within which the requests of a busy world come
MAX_TRIES = 30
TRY_AGAIN_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """One request.

    Attributes:
        cancel_after: it is given up once so many tokens have come; None: never.
        router: the number of the router that is asked first.
        sends_ids: when it comes back it says which tokens it has, not only how many.
        num_choices: how many answers it wants.
    """

    name: str
    at_s: float
    prompt_ids: tuple[int, ...]
    max_tokens: int
    speculate: int
    seed: int
    wants_logprobs: bool
    cancel_after: int | None
    router: int
    sends_ids: bool
    num_choices: int

    def message(self, has: Sequence[Sequence[int]]) -> api.GenerateRequest:
        """For the rest, where the client has the first tokens of each choice."""
        sampling = api.SamplingParams(
            temperature=1.0, max_tokens=self.max_tokens, speculate=self.speculate, seed=self.seed,
            stop_token_ids=[STOP_TOKEN], ignore_eos=True,
        )
        if self.wants_logprobs:
            sampling.logprobs = 0
        if self.num_choices > 1:
            sampling.n = self.num_choices
        request = api.GenerateRequest(
            request_id=self.name, tokenized=api.TokenizedInput(input_ids=self.prompt_ids), stream=True,
            sampling_params=sampling,
        )
        if any(has) and self.sends_ids:
            request.resume_output_ids.extend(api.TokenIds(ids=ids) for ids in has)
        elif any(has):
            request.resume_from.extend(map(len, has))
        return request

    def expected(self, choice: int = 0) -> list[SampledToken]:
        params = SamplingParams(
            temperature=1.0, top_p=1.0, top_k=-1, seed=seed_of_choice(self.seed, choice), max_tokens=self.max_tokens,
            ignore_eos=True, logprobs=0 if self.wants_logprobs else None,
        )
        return oracle(self.prompt_ids, params, frozenset({STOP_TOKEN}))


def plan_wishes(
    chance: random.Random, *, num_routers: int, max_slots: int, is_busy: bool, draw_choices: Callable[[], int]
) -> list[Wish]:
    """Requests of one world, by time; many begin alike, as those of a conversation do. `is_busy`: they are long, and
    come at about the same time, so that there is not room for all."""
    openings = [[chance.randrange(100, 1_000) for _ in range(24)] for _ in range(2)]
    wishes: list[Wish] = []
    for number in range(chance.randint(*((6, 9) if is_busy else (3, 9)))):
        shared = chance.choice(openings)[: chance.choice((0, 8, 16, 24))]
        if wishes and chance.random() < 0.3:  # the next turn of a conversation
            before = chance.choice(wishes)
            shared = [*before.prompt_ids, *(token.token_id for token in before.expected())][: max_slots - 30]
        prompt = [*shared, *(chance.randrange(100, 1_000) for _ in range(chance.randint(1, 20)))]
        max_tokens = min(chance.choice((6, 40, 40) if is_busy else (1, 2, 6, 16, 40)), max_slots - len(prompt))
        wishes.append(
            Wish(
                name=f"request-{number}", at_s=chance.uniform(0.0, BUSY_S if is_busy else LAST_ARRIVAL_S),
                prompt_ids=tuple(prompt),
                max_tokens=max_tokens, speculate=chance.choice((0, 1, 2)), seed=chance.randrange(1_000),
                wants_logprobs=chance.random() < 0.3,
                cancel_after=chance.randint(0, max_tokens) if chance.random() < 0.25 else None,
                router=chance.randrange(num_routers), sends_ids=chance.random() < 0.7, num_choices=draw_choices(),
            )
        )
    return sorted(wishes, key=lambda wish: wish.at_s)


class Client:
    """Args:
    routers: addresses.
    complain: told of what must never be.
    tell: what happens, in words.

    Attributes:
        ended: how; None: not yet.
    """

    def __init__(
        self, wish: Wish, *, network: Network, routers: Sequence[str], complain: Callable[[str], None],
        tell: Callable[[str], None],
    ) -> None:
        self.wish = wish
        self.ended: str | None = None
        self._network = network
        self._routers = routers
        self._complain = complain
        self._tell = tell
        self._expected = [wish.expected(choice) for choice in range(wish.num_choices)]
        self._has: list[list[int]] = [[] for _ in self._expected]

    async def run(self) -> None:
        for attempt in range(MAX_TRIES):
            address = self._routers[(self.wish.router + attempt) % len(self._routers)]
            self._tell(
                f"asks {address} for {self.wish.max_tokens} tokens after {len(self.wish.prompt_ids)}"
                f"{'' if self.wish.num_choices == 1 else f' in {self.wish.num_choices} choices'}"
                f"{'' if self.wish.cancel_after is None else f', gives up after {self.wish.cancel_after}'}"
            )
            try:
                self.ended = await self._ask(address)
                self._tell(f"ends: {self.ended}")
                return
            except PdRelayError as error:
                self._tell(f"is refused ({error.code.value}): {error.message}")
                if not isinstance(error, Unavailable):
                    self._complain(f"{self.wish.name} has failed with {error.code.value}: {error.message}")
                last = error
            await asyncio.sleep(TRY_AGAIN_S)
        self._complain(f"{self.wish.name} was refused {MAX_TRIES} times; at last: {last.message}")

    async def _ask(self, address: str) -> str:
        """How it has ended. Raises typed errors."""
        stub = api_pb2_grpc.PdRelayStub(MemoryChannel(self._network, address))
        call = stub.Generate(self.wish.message(self._has))
        num_before, reasons = self._num_tokens, dict[int, str]()
        try:
            if self.wish.cancel_after == 0:
                await asyncio.sleep(0.02)
                return "given up"
            async for response in call:
                part = response.chunk if response.HasField("chunk") else response.complete
                if part.choice in reasons:
                    self._complain(f"{self._name(part.choice)}: a message after the last one")
                if isinstance(part, api.GenerateStreamChunk):
                    self._take_chunk(part)
                    if self.wish.cancel_after is not None and self._num_tokens >= self.wish.cancel_after:
                        return "given up"
                else:
                    reasons[part.choice] = part.finish_reason
                    self._check_complete(part)
        except grpc.aio.AioRpcError as error:
            if self._num_tokens > num_before and error.details() != CONNECTION_LOST:
                self._complain(f"{self.wish.name} has failed after {self._num_tokens} tokens: {error.details()}")
            raise typed_error(error) from None
        finally:
            call.cancel()
        if len(reasons) < self.wish.num_choices:
            self._complain(f"{self.wish.name}: the stream ended without a last message")
            return "nothing"
        return f"{', '.join(reasons[choice] for choice in sorted(reasons))}, {self._num_tokens} tokens"

    @property
    def _num_tokens(self) -> int:
        """Of all choices."""
        return sum(map(len, self._has))

    def _name(self, choice: int) -> str:
        return f"{self.wish.name}/{choice}" if self.wish.num_choices > 1 else self.wish.name

    def _take_chunk(self, chunk: api.GenerateStreamChunk) -> None:
        request_id, has = self._name(chunk.choice), self._has[chunk.choice]
        num_tokens = len(has)
        if chunk.index != num_tokens:
            self._complain(f"{request_id}: a chunk begins at index {chunk.index}, after {num_tokens} tokens")
        end = num_tokens + len(chunk.token_ids)
        expected = self._expected[chunk.choice][num_tokens:end]
        if list(chunk.token_ids) != [token.token_id for token in expected]:
            self._complain(f"{request_id}: tokens {num_tokens} to {end - 1} are not the oracle's")
        if self.wish.wants_logprobs and [item.logprob for item in chunk.logprobs] != [
            token.logprobs.logprob for token in expected if token.logprobs is not None
        ]:
            self._complain(f"{request_id}: logprobs {num_tokens} to {end - 1} are not the oracle's")
        self._tell(f"has {end} tokens" if self.wish.num_choices == 1 else f"has {end} tokens of choice {chunk.choice}")
        has += chunk.token_ids

    def _check_complete(self, complete: api.GenerateComplete) -> None:
        request_id, num_tokens = self._name(complete.choice), len(self._has[complete.choice])
        expected = [token.token_id for token in self._expected[complete.choice]]
        if list(complete.output_ids) != expected or num_tokens != len(expected):
            self._complain(f"{request_id}: ended with {num_tokens} of {len(expected)} tokens, or other ones")
        reason = "stop" if expected[-1] == STOP_TOKEN else "length"
        if complete.finish_reason != reason:
            self._complain(f"{request_id}: ended with {complete.finish_reason}, where it should be {reason}")
