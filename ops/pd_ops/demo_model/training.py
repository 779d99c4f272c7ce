"""The run: minutes of learning that may be interrupted and gone on with."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

import torch

from pd_engine.errors import FailedPrecondition
from pd_ops.demo_model.corpus import Corpus, windows
from pd_ops.demo_model.evaluation import evaluate
from pd_ops.demo_model.learning import Learner

SAVE_EVERY_S = 60.0
REPORT_EVERY_S = 15.0


@dataclass(kw_only=True, slots=True)
class Progress:
    """How far a run is. `trained_s` counts learning alone: not saving, not evaluating, not the time in between."""

    step: int = 0
    num_tokens: int = 0
    trained_s: float = 0.0


@contextmanager
def interrupt_flag() -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM set the flag, so that the step under way is finished and saved; a second one ends at once."""
    caught: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(number)

    previous = {number: signal.signal(number, remember) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(caught)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def train(
    learner: Learner, corpus: Corpus, progress: Progress,
    *, seconds: float, state_path: Path, say: Callable[[str], None],
) -> bool:
    """Goes on from `progress` until `seconds` of learning are done; saves to `state_path` every minute and at the end.

    Returns:
        Whether it got there; False after an interrupt, with everything saved.
    """
    clock, saved, reported = time.monotonic, time.monotonic(), time.monotonic()
    with interrupt_flag() as interrupted, ThreadPoolExecutor(learner.recipe.threads) as pool:
        while progress.trained_s < seconds and not interrupted():
            started = clock()
            main, mtp = _step(learner, corpus, progress, seconds, pool)
            now = clock()
            progress.step += 1
            progress.num_tokens += learner.recipe.step_tokens
            progress.trained_s += now - started
            if now - reported >= REPORT_EVERY_S:
                reported = now
                say(report(progress, seconds, main, mtp, learner.recipe.step_tokens / (now - started)))
            if now - saved >= SAVE_EVERY_S:
                save(learner, progress, state_path)
                saved = clock()
        save(learner, progress, state_path)
        return not interrupted()


def _step(
    learner: Learner, corpus: Corpus, progress: Progress, seconds: float, pool: ThreadPoolExecutor
) -> tuple[float, float]:
    recipe = learner.recipe
    seed = (recipe.seed, progress.step)
    batch = windows(corpus.learnt, count=recipe.num_windows, length=recipe.window_tokens, seed=seed)
    return learner.step(batch, step=progress.step, done=progress.trained_s / seconds, pool=pool)


def report(progress: Progress, seconds: float, main: float, mtp: float, tokens_per_s: float) -> str:
    """One line on a run."""
    minutes = f"{progress.trained_s / 60:.1f} of {seconds / 60:.0f} min"
    return f"{minutes}  step {progress.step}  loss {main:.3f}  MTP {mtp:.3f}  {tokens_per_s:.0f} tokens/s"


def save(learner: Learner, progress: Progress, path: Path) -> None:
    """Writes the whole state; an interrupted write leaves the last good one."""
    partial = path.with_suffix(".partial")
    recipe, shape = json.dumps(asdict(learner.recipe)), json.dumps(asdict(learner.model.shape))
    torch.save({**learner.state(), "progress": asdict(progress), "recipe": recipe, "shape": shape}, partial)
    os.replace(partial, path)


def load(learner: Learner, path: Path) -> Progress:
    """Puts the saved state into `learner`.

    Raises:
        FailedPrecondition: there is none, or it is of another recipe or shape.
    """
    if not path.exists():
        raise FailedPrecondition(f"nothing to resume: no {path}")
    state = torch.load(path, weights_only=True)
    for name, mine in (("recipe", learner.recipe), ("shape", learner.model.shape)):
        if json.loads(state[name]) != asdict(mine):
            raise FailedPrecondition(f"{path} was made with another {name}: {state[name]}, now {asdict(mine)}")
    learner.restore(state)
    return Progress(**state["progress"])


def quality_report(learner: Learner, corpus: Corpus, progress: Progress) -> str:
    """What a model card needs, as JSON."""
    quality = evaluate(learner, corpus.held_out, num_batches=16)
    return json.dumps({**asdict(progress), **asdict(quality), "recipe": asdict(learner.recipe)}, indent=2)
