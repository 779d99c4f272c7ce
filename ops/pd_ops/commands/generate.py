"""`pd-relay generate`: one completion in one process, without a cluster. What a cluster gives is compared with it."""

from __future__ import annotations

import secrets

import typer

from pd_engine.settings import load_settings
from pd_ops.checked_model import with_checked_model
from pd_ops.commands import options
from pd_ops.monolithic import Monolithic, Question, Questions
from pd_ops.output import Document, Interrupted, Output
from pd_ops.request_options import read_prompt, read_sampling
from pd_ops.results import delta_document, generation_document, interrupted_document, summary_line


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
    stop: options.Stop = None,
    ignore_eos: options.IgnoreEos = False,
    logprobs: options.Logprobs = None,
    speculate: options.Speculate = None,
    dtype: options.Dtype = None,
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
    overrides = options.overrides(
        model=model, decode__speculate=speculate, engine__dtype=dtype, engine__ops=ops
    )
    settings = with_checked_model(load_settings(config, overrides))
    questions = Questions.load(settings)
    asked = questions.ask(question, fields, request_id=secrets.token_hex(16))
    monolithic = Monolithic.load(settings, questions)
    streams = not as_json if stream is None else stream
    _answer(monolithic, asked, output, streams=streams)


def _answer(monolithic: Monolithic, question: Question, output: Output, *, streams: bool) -> None:
    from pd_engine.generate import Generation

    for warning in question.warnings:
        output.note(f"warning: {warning}")
    events: list[Document] = []
    try:
        for step in monolithic.stream(question):
            if isinstance(step, Generation):
                document = generation_document(step, question.warnings)
                output.document({"event": "complete", **document} if streams else document)
                output.text("" if streams else step.text)
                output.note(summary_line(document))
            else:
                events.append(delta_document(step))
                if streams:
                    output.document(events[-1])
                    output.text(step.text, end="")
    except KeyboardInterrupt:
        document = interrupted_document(events)
        output.document({"event": "interrupted", **document} if streams else document)
        output.text("" if streams else document["text"])
        output.note("[interrupted]")
        raise Interrupted from None
