"""Thousands of workers, aggregated: equal cells that know nothing of each other, each of them played step by step.

A placement costs as much as there are workers to choose from, so a thousand of them under ten times the requests take a
hundred times as long as a hundred; in cells, ten times as long. The price: no worker helps out in another cell, and a
beginning that all prompts share is cached once a cell. Decision 0211 has the error beside one world of all workers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from pd_engine.errors import InvalidArgument
from pd_ops.sizing.cost_model import CostModel
from pd_ops.sizing.outcome import Outcome, Totals, Traveller
from pd_ops.sizing.pools import Failure, Pools
from pd_ops.sizing.world import World

REMEMBERED_EVERY = 8  # blocks of a prompt: where one that begins alike went is known to that many blocks
OVERLOAD = 1.1  # times a cell's fair share of the tokens: beyond it, not even a cached prefix draws a request there
MEMORY_S = 20.0  # in which the tokens that a cell was given count e times less: about as long as a request


def split(pools: Pools, num_cells: int) -> list[Pools]:
    """As equal as they can be, the larger ones first: worker i of a pool is in cell i mod `num_cells`.

    Raises:
        InvalidArgument: a cell would have no decode worker, or some have a prefill worker and some none.
    """
    if num_cells > pools.decode or 0 < pools.prefill < num_cells:
        raise InvalidArgument(
            f"{pools.prefill}:{pools.decode} workers cannot be {num_cells} cells that have some of each pool: let more "
            "play together (--cell-workers)"
        )
    return [
        replace(pools, prefill=_share(pools.prefill, cell, num_cells), decode=_share(pools.decode, cell, num_cells))
        for cell in range(num_cells)
    ]


def _share(count: int, cell: int, num_cells: int) -> int:
    return count // num_cells + (cell < count % num_cells)


def deal(travellers: Sequence[Traveller], cells: Sequence[Pools]) -> list[list[Traveller]]:
    """Each request to the cell that has seen most of its prompt, unless that one has more than its share of the latest
    tokens; else to the one with the least for its workers. `travellers`: by arrival."""
    weights = [cell.prefill + cell.decode for cell in cells]
    tokens, before_s = [0.0] * len(cells), 0.0
    seen: dict[bytes, int] = {}
    found: list[list[Traveller]] = [[] for _ in cells]
    for traveller in travellers:
        kept = traveller.prompt.hashes[::REMEMBERED_EVERY]
        cell = next((seen[one] for one in reversed(kept) if one in seen), None)
        kept_share = math.exp((before_s - traveller.arrival_s) / MEMORY_S)
        before_s, tokens = traveller.arrival_s, [count * kept_share for count in tokens]
        fair = OVERLOAD * (sum(tokens) + traveller.num_slots) / sum(weights)
        if cell is None or tokens[cell] > fair * weights[cell]:
            cell = min(range(len(cells)), key=lambda one: tokens[one] / weights[one])
        tokens[cell] += traveller.num_slots
        seen.update(dict.fromkeys(kept, cell))
        found[cell].append(traveller)
    return found


def play(pools: Pools, cost: CostModel, travellers: Sequence[Traveller], *, num_cells: int, seed: int,
         failures: Sequence[Failure]) -> Outcome:
    """All of it as one outcome. With one cell, exactly what `World` gives."""
    cells = split(pools, num_cells)
    outcomes = [
        World(cell, cost, mine, seed=seed + number, failures=[
            replace(failure, worker_id=_local(failure.worker_id, num_cells))
            for failure in failures if _cell_of(failure.worker_id, num_cells) == number
        ]).run()
        for number, (cell, mine) in enumerate(zip(cells, deal(travellers, cells), strict=True))
    ]
    totals = Totals()
    for outcome in outcomes:
        totals.add(outcome.totals)
    return Outcome(
        travellers=tuple(travellers), totals=totals, span_s=max(outcome.span_s for outcome in outcomes),
        prefill_busy_s=sum(outcome.prefill_busy_s for outcome in outcomes),
        decode_busy_s=sum(outcome.decode_busy_s for outcome in outcomes),
    )


def _cell_of(worker_id: str, num_cells: int) -> int:
    return int(worker_id.rpartition("-")[2]) % num_cells


def _local(worker_id: str, num_cells: int) -> str:
    role, _, number = worker_id.rpartition("-")
    return f"{role}-{int(number) // num_cells}"
