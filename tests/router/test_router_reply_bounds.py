"""What a worker says is checked: what cannot be is a fault of the worker, and never of the request."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from pd_engine.contracts import worker_pb2 as pb
from pd_engine.errors import DataLoss
from pd_router.reply_bounds import ReplyBounds, check_info, check_loads, check_times
from support.router_lab import PROMPT, eventually, router_lab
from support.toy_model import VOCAB_SIZE, toy_generate, toy_logprobs

BOUNDS = ReplyBounds(vocab_size=VOCAB_SIZE, num_tokens=40, block_size=16, num_top=2)
EPOCH, ID = "ab" * 16, "cd" * 16
LEASE = {"lease_id": ID, "lease_ms": 1_000, "num_held_blocks": 2}
SOURCE = {"epoch": EPOCH, "token": ID, "address": "10.0.0.1:7000"}
HANDOFF = {"bytes": 10, "hidden_bytes": 10, "transport": "tcp", "cached_tokens": 40, "pull_ms": 1.0}
TIMES = {"total_ms": 3.0, "queue_ms": 1.0, "chunks": [pb.ChunkTime(begun_ms=1.0, ms=2.0)] * 256}
INFO = {"epoch": EPOCH, "block_size": 16, "num_blocks_total": 1, "max_context_length": 1}
LOADS = {"num_blocks_total": 2, "num_blocks_free": 2, "itl_ms": 1.5, "stages": [pb.StageTime(seconds=1.0)]}
LOGPROB: dict[str, Any] = {"token_id": 7, "logprob": -math.inf, "top_token_ids": [7, 9], "top_logprobs": [-0.5, -1.0]}


def tell_tokens(**entry: Any) -> None:
    BOUNDS.check_tokens([7], [pb.Logprobs(**entry)])


Check = Callable[..., None]
CHECKS: dict[str, tuple[Check, dict[str, Any]]] = {
    "lease": (lambda **fields: BOUNDS.check_lease(pb.ReserveReply(**fields)), LEASE),
    "source": (lambda **fields: BOUNDS.check_source(pb.SourceInfo(**fields), EPOCH), SOURCE),
    "handoff": (lambda **fields: BOUNDS.check_event(pb.TokensEvent(handoff=pb.HandoffDone(**fields))), HANDOFF),
    "event": (lambda **fields: BOUNDS.check_event(pb.TokensEvent(**fields)), {"drafted_tokens": 3}),
    "first": (lambda **fields: BOUNDS.check_first_token(pb.FirstToken(**fields)), {"cached_tokens": 40}),
    "times": (lambda **fields: check_times(pb.PromptTimes(**fields)), TIMES),
    "info": (lambda **fields: check_info(pb.WorkerInfo(**fields)), INFO),
    "loads": (lambda **fields: check_loads(pb.LoadsReply(**fields)), LOADS),
    "logprob": (tell_tokens, LOGPROB),
}


@pytest.mark.parametrize("what", CHECKS)
def test_what_can_be_is_taken(what: str) -> None:
    check, fields = CHECKS[what]
    check(**fields)


@pytest.mark.parametrize(("what", "change"), [
    ("lease", {"lease_id": "lease"}), ("lease", {"lease_ms": 0}), ("lease", {"lease_ms": 3_600_001}),
    ("lease", {"num_held_blocks": 3}),
    ("source", {"epoch": ID}), ("source", {"token": ""}), ("source", {"address": "unix:/tmp/x"}),
    ("handoff", {"cached_tokens": 41}), ("handoff", {"hidden_bytes": 11}), ("handoff", {"transport": "x" * 33}),
    ("handoff", {"pull_ms": math.nan}), ("handoff", {"exposed_ms": math.inf}),
    ("event", {"accepted_tokens": 4}), ("event", {"local_prefill": pb.LocalPrefillDone(cached_tokens=41)}),
    ("event", {"local_prefill": pb.LocalPrefillDone(times=pb.PromptTimes(fetch_ms=math.nan))}),
    ("first", {"cached_tokens": 41}), ("first", {"times": pb.PromptTimes(total_ms=math.inf)}),
    ("times", {"chunks": [pb.ChunkTime()] * 257}), ("times", {"chunks": [pb.ChunkTime(ms=math.nan)]}),
    ("info", {"epoch": "E" * 32}), ("info", {"block_size": 0}), ("info", {"num_blocks_total": 0}),
    ("info", {"max_context_length": 0}),
    ("loads", {"itl_ms": math.nan}), ("loads", {"prefill_tokens_per_s": -1.0}),
    ("loads", {"pull_bytes_per_s": math.inf}), ("loads", {"num_blocks_free": 3}),
    ("loads", {"stages": [pb.StageTime(seconds=math.nan)]}),
    ("logprob", {"token_id": 8}), ("logprob", {"logprob": math.nan}), ("logprob", {"top_logprobs": [-0.5]}),
    ("logprob", {"top_token_ids": [7, VOCAB_SIZE]}), ("logprob", {"top_logprobs": [-0.5, math.inf]}),
    ("logprob", {"top_token_ids": [1, 2, 3], "top_logprobs": [-1.0, -1.0, -1.0]}),
])
def test_what_cannot_be_is_data_loss(what: str, change: dict[str, Any]) -> None:
    check, fields = CHECKS[what]
    with pytest.raises(DataLoss):
        check(**{**fields, **change})


def test_tokens_come_with_the_logprobs_that_were_asked_for() -> None:
    silent = ReplyBounds(vocab_size=VOCAB_SIZE, num_tokens=40, block_size=16, num_top=None)
    silent.check_tokens([VOCAB_SIZE - 1], [])
    BOUNDS.check_tokens([5, 6], [toy_logprobs(5, 2), toy_logprobs(6, 0)])
    with pytest.raises(DataLoss, match=f"token {VOCAB_SIZE} is none of the vocabulary"):
        silent.check_tokens([1, VOCAB_SIZE], [])
    with pytest.raises(DataLoss, match="came with 1 logprobs, where 0 were wanted"):
        silent.check_tokens([5], [toy_logprobs(5, 0)])
    with pytest.raises(DataLoss, match="came with 0 logprobs, where 2 were wanted"):
        BOUNDS.check_tokens([5, 6], [])


def no_logprobs(message: Any) -> None:
    message.ClearField("logprobs")


@pytest.mark.parametrize(("role", "name", "change"), [
    ("prefill", "first_token", lambda first: setattr(first, "token_id", VOCAB_SIZE)),
    ("prefill", "first_token", lambda first: setattr(first, "cached_tokens", 6)),
    ("prefill", "first_token", no_logprobs),
    ("prefill", "source", lambda source: setattr(source, "token", "nonsense")),
    ("decode", "lease", lambda lease: setattr(lease, "num_held_blocks", 1)),
    ("decode", "event", lambda event: event.token_ids.__setitem__(0, VOCAB_SIZE)),
    ("decode", "event", lambda event: event.logprobs[0].top_token_ids.__setitem__(0, VOCAB_SIZE)),
    ("decode", "event", no_logprobs),
])
async def test_another_worker_takes_over(role: str, name: str, change: Callable[[Any], None]) -> None:
    """The client gets the answer, and the breaker of the one that said it knows."""
    async with router_lab(num_prefill=2, num_decode=2) as lab:
        faulty = lab.prefill[0] if role == "prefill" else lab.decode[0]
        faulty.faults.spoil[name] = change
        complete = await lab.generate(max_tokens=12, stream=True, logprobs=2)
        assert list(complete.output_ids) == toy_generate(PROMPT, 12)
        assert [len(entry.top_token_ids) for entry in complete.logprobs] == [2] * 12
        assert not faulty.faults.spoil, "it was not asked"
        link = lab.router._registry.link(faulty.worker_id)
        assert link is not None
        assert link.breaker._num_failures == 1


async def test_a_worker_whose_report_is_nonsense_is_lost_until_it_is_not() -> None:
    async with router_lab(num_decode=2) as lab:
        lab.decode[0].loads["itl_ms"] = math.nan
        link = lab.router._registry.link("decode-0")
        assert link is not None
        await eventually(lambda: link.state.value == "lost")
        assert link.error is not None
        assert "itl_ms cannot be 'nan'" in link.error.message
        assert (await lab.generate()).handoff.decode_worker == "decode-1"
        assert (await lab.http.get("/ui/data")).status_code == 200
        del lab.decode[0].loads["itl_ms"]
        await eventually(lambda: link.state.value == "ready")
