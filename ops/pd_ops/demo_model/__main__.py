"""python -m pd_ops.demo_model: makes a demo checkpoint from a text. See `--help`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from tokenizers import Tokenizer

from pd_engine.errors import InvalidArgument, PdRelayError
from pd_ops.demo_model.corpus import Corpus, encode, read_documents, split
from pd_ops.demo_model.export import write_checkpoint
from pd_ops.demo_model.learning import Learner, Recipe
from pd_ops.demo_model.network import DemoModel
from pd_ops.demo_model.shape import Shape
from pd_ops.demo_model.training import Progress, load, quality_report, train
from pd_ops.demo_model.vocabulary import train_tokenizer, write_tokenizer

EXIT_INTERRUPTED = 130


def make(text: Path, out: Path, *, minutes: float, resume: bool, recipe: Recipe, shape: Shape) -> bool:
    """The whole way from a text to a checkpoint in `out`; False if it was interrupted (and can be resumed).

    Raises:
        InvalidArgument: the text cannot be used, or `out` holds something already and `resume` is off.
        FailedPrecondition: there is nothing to resume, or it was begun differently.
    """
    if not resume and out.exists() and any(out.iterdir()):
        raise InvalidArgument(f"{out} is not empty; take another folder, or --resume to go on with what is in it")
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    torch.manual_seed(recipe.seed)
    learner = Learner(DemoModel(shape), recipe)
    state_path = out / "training" / "state.pt"
    progress = load(learner, state_path) if resume else Progress()
    state_path.parent.mkdir(exist_ok=True)
    corpus = _corpus(text, out, shape)
    _say(f"{len(corpus.learnt)} tokens to learn from, {len(corpus.held_out)} held out")
    if not train(learner, corpus, progress, seconds=minutes * 60, state_path=state_path, say=_say):
        return False
    write_checkpoint(learner.model, out)
    numbers = quality_report(learner, corpus, progress)
    (out / "training" / "quality.json").write_text(numbers + "\n", encoding="utf-8")
    _say(numbers)
    return True


def _corpus(text: Path, out: Path, shape: Shape) -> Corpus:
    """Reads the text; trains the tokenizer, or takes the one that an interrupted run has written."""
    learnt, held_out = split(read_documents(text))
    if not (out / "tokenizer.json").exists():
        write_tokenizer(train_tokenizer(learnt, shape.vocab_size), shape, out)
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    return Corpus(learnt=encode(tokenizer, learnt), held_out=encode(tokenizer, held_out))


def _say(line: str) -> None:
    typer.echo(line, err=True)


def main(
    text: Annotated[Path, typer.Option(help="a folder of .rst files, or a file with an empty line between documents")],
    out: Annotated[Path, typer.Option(help="folder of the checkpoint; the training state is kept in it too")],
    minutes: Annotated[float, typer.Option(min=0.01, help="of learning, on all --threads")] = 60.0,
    threads: Annotated[int, typer.Option(min=1, help="cores to use")] = 2,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="go on with an interrupted run")] = False,
) -> None:
    """Makes a demo checkpoint. Ctrl-C stops after the step under way, with everything saved; --resume goes on."""
    try:
        recipe = Recipe(seed=seed, threads=threads)
        finished = make(text, out, minutes=minutes, resume=resume, recipe=recipe, shape=Shape())
    except PdRelayError as error:
        _say(f"error: {error.message}")
        sys.exit(error.exit_code)
    if not finished:
        _say(f"interrupted; go on with: python -m pd_ops.demo_model --text {text} --out {out} --resume")
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    typer.run(main)
