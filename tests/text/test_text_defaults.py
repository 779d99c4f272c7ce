"""Absent fields, the checkpoint's defaults, and what does not fit."""

from __future__ import annotations

import ctypes
import json
import math
from pathlib import Path
from typing import Any

import pytest

import pd_engine.model
from pd_engine.errors import InvalidArgument
from pd_engine.sampling.params import NO_TOP_K, SamplingParams, seed_from_request_id
from pd_engine.text.defaults import (
    GenerationDefaults,
    ModelLimits,
    SamplingFields,
    check_prompt,
    resolve_sampling,
)

LIMITS = ModelLimits(max_context_length=100, vocab_size=50)


def resolve(fields: SamplingFields, defaults: GenerationDefaults | None = None, prompt: int = 10) -> SamplingParams:
    return resolve_sampling(fields, defaults or GenerationDefaults(), LIMITS, num_prompt_tokens=prompt, request_id="r1")


def test_ours_when_nobody_says_anything() -> None:
    assert resolve(SamplingFields()) == SamplingParams(
        temperature=1.0, top_p=1.0, top_k=NO_TOP_K, seed=seed_from_request_id("r1"), max_tokens=90
    )


def test_the_checkpoints_over_ours_and_the_clients_over_both() -> None:
    defaults = GenerationDefaults(temperature=0.5, top_p=0.75, top_k=5)
    params = resolve(SamplingFields(), defaults)
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.75, 5)
    params = resolve(SamplingFields(temperature=0.0, top_p=1.0, top_k=0, seed=0), defaults)
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.0, 1.0, NO_TOP_K, 0)
    defaults = GenerationDefaults(min_p=0.25, repetition_penalty=1.5)
    params = resolve(SamplingFields(), defaults)
    assert (params.min_p, params.repetition_penalty) == (0.25, 1.5)
    params = resolve(SamplingFields(min_p=0.0, repetition_penalty=1.0), defaults)
    assert (params.min_p, params.repetition_penalty) == (0.0, 1.0)


def test_numbers_are_those_that_travel() -> None:
    """float32, so that one process computes with what a worker is sent; the ends of ranges survive the rounding."""
    params = resolve(SamplingFields(repetition_penalty=0.01, presence_penalty=0.1, logit_bias=((3, 0.3),)))
    assert params.repetition_penalty == ctypes.c_float(0.01).value != 0.01
    assert params.presence_penalty == ctypes.c_float(0.1).value
    assert params.logit_bias == ((3, ctypes.c_float(0.3).value),)


def test_the_demo_checkpoint_sets_its_own() -> None:
    defaults = GenerationDefaults.load(Path(pd_engine.model.__file__).parent / "demo")
    assert defaults == GenerationDefaults(temperature=0.7, top_p=0.95)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, GenerationDefaults()),
        ({"do_sample": True}, GenerationDefaults()),
        ({"do_sample": False, "temperature": 0.6}, GenerationDefaults(temperature=0.0)),
        ({"top_k": 3, "top_p": 1}, GenerationDefaults(top_k=3, top_p=1)),
        ({"top_k": 3.0}, GenerationDefaults(top_k=3)),
        ({"min_p": 0.05, "repetition_penalty": 1.1}, GenerationDefaults(min_p=0.05, repetition_penalty=1.1)),
    ],
)
def test_generation_config(tmp_path: Path, config: dict[str, Any], expected: GenerationDefaults) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert GenerationDefaults.load(tmp_path) == expected


@pytest.mark.parametrize(
    "config",
    [
        {"temperature": -1},
        {"top_p": "x"},
        {"top_k": True},
        {"top_p": 2.0},
        {"top_k": float("nan")},
        {"top_k": float("inf")},
        {"top_k": 1.5},
        {"top_k": 2**31},
        {"min_p": -0.1},
        {"repetition_penalty": 0},
    ],
)
def test_a_broken_generation_config_is_named(tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidArgument, match=rf"generation_config\.json.*{next(iter(config))}"):
        GenerationDefaults.load(tmp_path)


def test_length_edges_of_a_prompt() -> None:
    check_prompt([1] * 98, LIMITS)
    check_prompt([1] * 99, LIMITS)
    with pytest.raises(InvalidArgument, match="the prompt has 100 tokens; the context of 100 tokens allows 99"):
        check_prompt([1] * 100, LIMITS)
    with pytest.raises(InvalidArgument, match="at least one token"):
        check_prompt([], LIMITS)


def test_max_tokens_beyond_the_context_names_the_largest() -> None:
    assert resolve(SamplingFields(max_tokens=90)).max_tokens == 90
    with pytest.raises(InvalidArgument, match=r"max_tokens must be at most 90 .*got 91"):
        resolve(SamplingFields(max_tokens=91))
    assert resolve(SamplingFields(), prompt=99).max_tokens == 1


@pytest.mark.parametrize("bad", [50, 2**32 - 1, -1])
def test_ids_outside_the_vocabulary(bad: int) -> None:
    with pytest.raises(InvalidArgument, match=rf"prompt token ids must be in \[0, 50\), got {bad}"):
        check_prompt([3, bad, 4], LIMITS)
    with pytest.raises(InvalidArgument, match="stop_token_ids must be in"):
        resolve(SamplingFields(stop_token_ids=(bad,)))
    with pytest.raises(InvalidArgument, match=rf"token ids of logit_bias must be in \[0, 50\), got {bad}"):
        resolve(SamplingFields(logit_bias=((3, 1.0), (bad, 1.0))))


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        (SamplingFields(temperature=-0.1), "temperature"),
        (SamplingFields(temperature=math.nan), "temperature"),
        (SamplingFields(temperature=math.inf), "temperature"),
        (SamplingFields(top_p=0.0), "top_p"),
        (SamplingFields(top_p=math.nan), "top_p"),
        (SamplingFields(top_k=-2), "top_k"),
        (SamplingFields(min_p=1.01), "min_p"),
        (SamplingFields(min_p=math.nan), "min_p"),
        (SamplingFields(repetition_penalty=0.0099), "repetition_penalty"),
        (SamplingFields(repetition_penalty=101.0), "repetition_penalty"),
        (SamplingFields(presence_penalty=math.nan), "presence_penalty"),
        (SamplingFields(frequency_penalty=-2.01), "frequency_penalty"),
        (SamplingFields(logit_bias=((1, math.inf),)), "logit_bias"),
        (SamplingFields(logit_bias=((1, 1.0), (1, 2.0))), "logit_bias must name each token once"),
        (SamplingFields(logit_bias=tuple((i % 50, 1.0) for i in range(1025))), "logit_bias has at most 1024"),
        (SamplingFields(min_tokens=5, max_tokens=4), "min_tokens"),
        (SamplingFields(min_tokens=91), "min_tokens"),
        (SamplingFields(seed=2**64), "seed"),
        (SamplingFields(max_tokens=0), "max_tokens"),
        (SamplingFields(stop=("",)), "stop string"),
        (SamplingFields(stop=("x",) * 17), "stop strings"),
        (SamplingFields(stop=("x" * 257,)), "stop string"),
        (SamplingFields(stop_token_ids=(1,) * 65), "stop_token_ids"),
        (SamplingFields(logprobs=21), "logprobs"),
        (SamplingFields(speculate=9), "speculate"),
    ],
)
def test_a_value_out_of_range_is_named(fields: SamplingFields, name: str) -> None:
    with pytest.raises(InvalidArgument, match=name):
        resolve(fields)
