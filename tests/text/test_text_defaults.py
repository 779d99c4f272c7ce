"""Absent fields, the checkpoint's defaults, and what does not fit."""

from __future__ import annotations

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
    ],
)
def test_a_broken_generation_config_is_named(tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidArgument, match=r"generation_config\.json.*(temperature|top_p|top_k)"):
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


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        (SamplingFields(temperature=-0.1), "temperature"),
        (SamplingFields(temperature=math.nan), "temperature"),
        (SamplingFields(temperature=math.inf), "temperature"),
        (SamplingFields(top_p=0.0), "top_p"),
        (SamplingFields(top_p=math.nan), "top_p"),
        (SamplingFields(top_k=-2), "top_k"),
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
