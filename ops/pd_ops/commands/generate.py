"""`pd-relay generate`: one completion in one process, without a cluster. What a cluster gives is compared with it."""

from __future__ import annotations

import secrets

import typer

from pd_engine.settings import load_settings
from pd_ops.answers import AnswerView
from pd_ops.checked_model import with_checked_model
from pd_ops.commands import options
from pd_ops.monolithic import Monolithic, Question, Questions
from pd_ops.output import Interrupted
from pd_ops.request_options import read_num_choices, read_prompt, read_sampling
from pd_ops.results import delta_document, generation_document


def command(
    context: typer.Context,
    model: options.Model = None,
    prompt: options.Prompt = None,
    prompt_file: options.PromptFile = None,
    token_ids: options.TokenIds = None,
    chat: options.Chat = False,
    add_bos: options.AddBos = None,
    parse_special: options.ParseSpecial = False,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    presence_penalty: options.PresencePenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
    logit_bias: options.LogitBias = None,
    min_tokens: options.MinTokens = None,
    seed: options.Seed = None,
    n: options.NumChoices = 1,
    stop: options.Stop = None,
    ignore_eos: options.IgnoreEos = False,
    logprobs: options.Logprobs = None,
    speculate: options.Speculate = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    ops: options.Ops = None,
    stream: options.Stream = None,
    config: options.Config = None,
    as_json: options.Json = False,
) -> None:
    """Complete a prompt in this process alone: no cluster, no router, one request."""
    output = options.start(context, as_json)
    question = read_prompt(
        prompt=prompt, prompt_file=prompt_file, token_ids=token_ids, chat=chat, add_bos=add_bos,
        parse_special=parse_special,
    )
    fields = read_sampling(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=stop or [],
        ignore_eos=ignore_eos, logprobs=logprobs, speculate=speculate, min_p=min_p,
        repetition_penalty=repetition_penalty, presence_penalty=presence_penalty, frequency_penalty=frequency_penalty,
        logit_bias=logit_bias or [], min_tokens=min_tokens,
    )
    num_choices = read_num_choices(n)
    overrides = options.overrides(
        model=model, decode__speculate=speculate, engine__dtype=dtype, engine__device=device, engine__ops=ops
    )
    settings = with_checked_model(load_settings(config, overrides))
    questions = Questions.load(settings)
    asked = questions.ask(question, fields, request_id=secrets.token_hex(16))
    monolithic = Monolithic.load(settings, questions)
    for warning in asked.warnings:
        output.note(f"warning: {warning}")
    view = AnswerView(output, streams=not as_json if stream is None else stream, num_choices=num_choices)
    try:
        for choice in range(num_choices):
            _answer(monolithic, asked.of_choice(choice), choice, view)
    except KeyboardInterrupt:
        view.interrupt()
        raise Interrupted from None
    view.close()


def _answer(monolithic: Monolithic, question: Question, choice: int, view: AnswerView) -> None:
    from pd_engine.generate import Generation

    for step in monolithic.stream(question):
        if isinstance(step, Generation):
            view.end(choice, generation_document(step, question.warnings))
        else:
            view.step(choice, delta_document(step))
