"""How far a simulation can be trusted: said with its result, in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from pd_ops.bench.measured_process import Document
from pd_ops.sizing.cost_model import CostModel

NEAR = 0.8          # busy share of a prefill pool from which waits hang on a cost's last percents
COST_ERROR = 0.05   # of a prompt's cost, as fits of one load differ
BEYOND = 1.25       # times what the fit has seen


def limits(cost: CostModel, rows: Sequence[Document], *, most_prompt_tokens: int) -> list[str]:
    """Args:
    rows: summaries of simulations.
    most_prompt_tokens: of the longest prompt of the load.
    """
    found = [f"the fit: {cost.fit_limit}"] if cost.fit_limit else []
    if cost.most_prompt_tokens and most_prompt_tokens > BEYOND * cost.most_prompt_tokens:
        found.append(
            f"the load has prompts of up to {most_prompt_tokens:,} tokens, costs were fitted with up to "
            f"{cost.most_prompt_tokens:,}: what longer ones take is extrapolated"
        )
    for row in rows:
        pools = f"{row['prefill']}:{row['decode']}"
        if cost.most_sequences and row["mean_batch"] > BEYOND * cost.most_sequences:
            found.append(
                f"{pools}: batches of {row['mean_batch']:.1f} on average, costs were fitted with up to "
                f"{cost.most_sequences:.1f}: times between tokens are extrapolated"
            )
        if row["prefill_busy_share"] >= NEAR:
            found.append(f"{pools}: prefill workers are {row['prefill_busy_share']:.0%} busy: {_waits(row)}")
    return list(dict.fromkeys(found))


def _waits(row: Document) -> str:
    """What prompts that cost more do to waits: these go with 1 / (1 - busy)."""
    busy = row["prefill_busy_share"]
    if busy * (1 + COST_ERROR) >= 1:
        return "they cannot keep up, and first tokens only say for how long the load was played"
    longer = (1 - busy) / (1 - busy * (1 + COST_ERROR)) - 1
    return f"if prompts cost {COST_ERROR:.0%} more, they wait some {longer:.0%} longer"
