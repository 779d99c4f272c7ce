"""One process that does it all: what `generate` runs, and what a cluster is compared with."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pd_engine.model.checkpoint import resolve_model
from pd_engine.model.config import ModelConfig
from pd_engine.sampling.params import SamplingParams, seed_of_choice
from pd_engine.settings import Settings
from pd_engine.text.chat import ChatMessage
from pd_engine.text.defaults import GenerationDefaults, ModelLimits, SamplingFields, check_prompt, resolve_sampling
from pd_engine.text.tokenizer import Tokenizer
from pd_ops.request_options import ChatPrompt, Prompt, TextPrompt, TokensPrompt

if TYPE_CHECKING:
    from pd_engine.engine import Engine
    from pd_engine.generate import Delta, Generation


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A prompt as token ids, and its sampling with every default filled in."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    warnings: tuple[str, ...]

    def of_choice(self, choice: int) -> Question:
        """The same with the seed of choice `choice` of n."""
        return replace(self, params=replace(self.params, seed=seed_of_choice(self.params.seed, choice)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Questions:
    """Makes questions as a router does, from a checkpoint's small files alone. Torch-free."""

    tokenizer: Tokenizer
    defaults: GenerationDefaults
    limits: ModelLimits

    @classmethod
    def load(cls, settings: Settings) -> Questions:
        """Raises:
        PdRelayError: the checkpoint is not there, broken or not supported.
        """
        path = resolve_model(settings.model)
        config = ModelConfig.load(path)
        return cls(
            tokenizer=Tokenizer.load(path), defaults=GenerationDefaults.load(path),
            limits=ModelLimits(
                max_context_length=settings.engine.max_context_length or config.max_position_embeddings,
                vocab_size=config.vocab_size,
            ),
        )

    def ask(self, prompt: Prompt, fields: SamplingFields, *, request_id: str) -> Question:
        """Raises:
        InvalidArgument: the prompt or the sampling does not fit the model.
        """
        prompt_ids = self._prompt_ids(prompt)
        check_prompt(prompt_ids, self.limits)
        params = resolve_sampling(
            fields, self.defaults, self.limits, num_prompt_tokens=len(prompt_ids), request_id=request_id
        )
        return Question(
            prompt_ids=tuple(prompt_ids), params=params, warnings=tuple(self.tokenizer.prompt_warnings(prompt_ids))
        )

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        match prompt:
            case TokensPrompt():
                return list(prompt.token_ids)
            case ChatPrompt():
                return self.tokenizer.chat_ids([ChatMessage("user", prompt.text)])
            case TextPrompt():
                return self.tokenizer.encode(prompt.text, parse_special=prompt.parse_special, add_bos=prompt.add_bos)


@dataclass(frozen=True, kw_only=True, slots=True)
class Monolithic:
    """A loaded model in this process."""

    questions: Questions
    engine: Engine
    settings: Settings

    @classmethod
    def load(cls, settings: Settings, questions: Questions) -> Monolithic:
        """Raises:
        PdRelayError: the weights are broken or not supported, or do not fit.
        """
        os.environ.setdefault("OMP_NUM_THREADS", str(settings.engine.threads))  # read when torch is imported
        from pd_engine.engine import Engine

        engine = Engine.load(
            resolve_model(settings.model), settings.engine, max_speculate=settings.decode.speculate
        )
        return cls(questions=questions, engine=engine, settings=settings)

    def stream(self, question: Question, *, checksums: bool = False) -> Iterator[Delta | Generation]:
        """`pd_engine.generate.generate_stream` with the settings' speculation and chunks."""
        from pd_engine.generate import generate_stream

        return generate_stream(
            self.engine, self.questions.tokenizer, question.prompt_ids, question.params,
            chunk_tokens=self.settings.engine.chunk_tokens, speculate=self.settings.decode.speculate,
            checksums=checksums,
        )

    def answer(self, question: Question, *, checksums: bool = False) -> Generation:
        """The whole answer at once."""
        from pd_engine.generate import Generation

        *_, last = self.stream(question, checksums=checksums)
        assert isinstance(last, Generation), last
        return last
