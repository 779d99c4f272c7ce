"""`pd-relay simulate faults`: many small clusters with many faults, each from its seed, and what must always hold."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pd_engine.errors import EXIT_CHECK_FAILED, InvalidArgument
from pd_ops.commands import options
from pd_ops.output import Output

if TYPE_CHECKING:
    from pd_ops.simulation.run import Played

NUM_SEEDS = 200
NOTE_EVERY = 50  # seeds
MAX_FAILED = 5   # then it ends


def command(
    context: typer.Context,
    seeds: Annotated[str, typer.Option(metavar="A..B", help="From A up to, not including, B.")] = f"0..{NUM_SEEDS}",
    seed: Annotated[int | None, typer.Option(min=0, help="Only this one.")] = None,
    story: Annotated[bool, typer.Option("--story", help="With --seed: print what happens in it, in order.")] = False,
    as_json: options.Json = False,
) -> None:
    """Play router, workers and handoffs in one process on a virtual clock, with crashes, drains, stops, cuts, delays,
    lost and doubled calls and bad fetches. Exit status 1 if a request fails, differs or leaks; its seed plays again
    exactly."""
    output = options.start(context, as_json)
    if story and seed is None:
        raise InvalidArgument("--story is for one seed: give --seed N as well")
    from pd_ops.simulation.run import play  # imports torch

    if seed is not None:
        played = [play(seed, with_story=story)]
    else:
        played = _play_many(parse_seeds(seeds), output)
    failed = [each for each in played if each.violation is not None]
    output.document({
        "seeds": len(played), "requests": sum(each.num_requests for each in played),
        "troubles": sum(each.num_troubles for each in played), "events": sum(each.num_events for each in played),
        "virtual_seconds": sum(each.virtual_s for each in played), "seconds": sum(each.seconds for each in played),
        "failed": [_failed_json(each) for each in failed],
        **({"digest": played[0].digest, "story": played[0].story} if story else {}),
    })
    output.text(_text(played, failed, story=story))
    if failed:
        raise typer.Exit(EXIT_CHECK_FAILED)


def parse_seeds(text: str) -> range:
    """Raises:
    InvalidArgument: it is not A..B with A < B.
    """
    match = re.fullmatch(r"([0-9]{1,12})\.\.([0-9]{1,12})", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise InvalidArgument(f"--seeds must be A..B with A below B, such as 0..200, got {text[:64]!r}")
    return range(int(match[1]), int(match[2]))


def _play_many(seeds: range, output: Output) -> list[Played]:
    """In order; ends early when many have failed."""
    from pd_ops.simulation.run import play_all

    num_failed = 0

    def goes_on(played: Played) -> bool:
        nonlocal num_failed
        num_failed += played.violation is not None
        if (played.seed - seeds.start + 1) % NOTE_EVERY == 0:
            output.note(f"seed {played.seed}: {num_failed} failed so far")
        return num_failed < MAX_FAILED

    return play_all(seeds, goes_on)


def _failed_json(played: Played) -> dict[str, Any]:
    return {"seed": played.seed, "violation": played.violation, "story": played.story}


def _text(played: list[Played], failed: list[Played], *, story: bool) -> str:
    lines = [played[0].story] if story else [each.story for each in failed[:1]]
    virtual_s, seconds = sum(each.virtual_s for each in played), sum(each.seconds for each in played)
    lines.append(
        f"{len(played)} seeds, {sum(each.num_requests for each in played)} requests, "
        f"{sum(each.num_troubles for each in played)} troubles, {sum(each.num_events for each in played)} events, "
        f"{virtual_s:.0f} s of virtual time in {seconds:.0f} s: {len(failed)} failed"
    )
    lines += [f"  seed {each.seed}: {each.violation}" for each in failed]
    lines += [f"  again: pd-relay simulate faults --seed {each.seed} --story" for each in failed[:1]]
    return "\n".join(lines)
