"""The demo checkpoint's recipe on a model of the same structure that learns in a second."""

from __future__ import annotations

import json
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from pd_engine.errors import EXIT_USAGE, FailedPrecondition, InvalidArgument
from pd_engine.model.config import ModelConfig
from pd_ops.demo_model.__main__ import main, make
from pd_ops.demo_model.corpus import Corpus, windows
from pd_ops.demo_model.evaluation import evaluate
from pd_ops.demo_model.export import checkpoint_tensors, write_checkpoint
from pd_ops.demo_model.learning import Learner, Recipe
from pd_ops.demo_model.muon import orthogonalized
from pd_ops.demo_model.network import DemoModel
from pd_ops.demo_model.schedule import LOWEST_RATE, WARM_UP_STEPS, learning_rate_factor, router_bias_rate
from pd_ops.demo_model.shape import Shape
from pd_ops.demo_model.training import Progress, load, save, train
from support.checkout import ROOT

SMALL = Shape(
    vocab_size=320, hidden_size=32, num_hidden_layers=2, intermediate_size=48, num_attention_heads=2, q_lora_rank=16,
    kv_lora_rank=24, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, moe_intermediate_size=16, n_routed_experts=8,
    n_group=4, topk_group=2, num_experts_per_tok=2, max_position_embeddings=64,
)
RECIPE = Recipe(num_windows=4, window_tokens=16)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def corpus() -> Corpus:
    """A text with a rule: each token is the one before plus one, so that there is something to learn."""
    rule = np.tile(np.arange(5, 45, dtype=np.uint16), 40)
    return Corpus(learnt=rule, held_out=rule[:400].copy())


def new_learner() -> Learner:
    torch.manual_seed(0)
    return Learner(DemoModel(SMALL), RECIPE)


def steps(learner: Learner, corpus: Corpus, numbers: range) -> tuple[float, float]:
    """Takes these steps; the losses of the last one."""
    last = (0.0, 0.0)
    with ThreadPoolExecutor(RECIPE.threads) as pool:
        for step in numbers:
            batch = windows(corpus.learnt, count=RECIPE.num_windows, length=RECIPE.window_tokens, seed=(0, step))
            last = learner.step(batch, step=step, done=0.0, pool=pool)
    return last


def weights(learner: Learner) -> torch.Tensor:
    return torch.cat([value.flatten().float() for value in learner.model.state_dict().values()])


def test_both_heads_learn(corpus: Corpus) -> None:
    learner = new_learner()
    before = evaluate(learner, corpus.held_out, num_batches=2)
    steps(learner, corpus, range(50))
    quality = evaluate(learner, corpus.held_out, num_batches=2)
    assert before.top1 < 0.1
    assert quality.loss < before.loss - 2
    assert quality.mtp_loss < before.mtp_loss - 2
    assert quality.top1 > 0.9
    assert quality.mtp_top1 > 0.9
    assert quality.greedy_acceptance > 0.9
    assert 0 < quality.sampled_acceptance <= 1


def test_a_step_is_the_same_whenever_it_is_taken(corpus: Corpus) -> None:
    first, second = new_learner(), new_learner()
    steps(first, corpus, range(3))
    steps(second, corpus, range(3))
    assert torch.equal(weights(first), weights(second))


def test_balancing_moves_the_bias_towards_idle_experts(corpus: Corpus) -> None:
    learner = new_learner()
    loads = learner.new_loads()
    loads[0, 3] = 100
    learner._balance(loads, 0.01)
    bias = learner.model.moe_layers()[0].gate.e_score_correction_bias
    assert bias[3] == pytest.approx(-0.01)
    assert torch.allclose(bias[[0, 1, 2, 4, 5, 6, 7]], torch.tensor(0.01))
    assert not learner.model.moe_layers()[1].gate.e_score_correction_bias.any()


def test_a_saved_run_goes_on_as_if_it_had_not_stopped(corpus: Corpus, tmp_path: Path) -> None:
    whole = new_learner()
    steps(whole, corpus, range(6))
    half = new_learner()
    steps(half, corpus, range(3))
    save(half, Progress(step=3, num_tokens=192, trained_s=1.5), tmp_path / "state.pt")
    torch.manual_seed(99)
    resumed = Learner(DemoModel(SMALL), RECIPE)
    progress = load(resumed, tmp_path / "state.pt")
    assert progress == Progress(step=3, num_tokens=192, trained_s=1.5)
    steps(resumed, corpus, range(3, 6))
    assert torch.equal(weights(whole), weights(resumed))


def test_a_run_of_another_recipe_is_not_resumed(tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition, match="nothing to resume"):
        load(new_learner(), tmp_path / "state.pt")
    save(new_learner(), Progress(), tmp_path / "state.pt")
    with pytest.raises(FailedPrecondition, match="another recipe"):
        load(Learner(DemoModel(SMALL), Recipe(seed=1)), tmp_path / "state.pt")


def test_training_ends_by_its_time_and_says_how_far_it_is(corpus: Corpus, tmp_path: Path) -> None:
    learner, progress = new_learner(), Progress()
    assert train(learner, corpus, progress, seconds=0.2, state_path=tmp_path / "state.pt", say=lambda line: None)
    assert progress.trained_s >= 0.2
    assert progress.num_tokens == progress.step * RECIPE.step_tokens
    assert load(new_learner(), tmp_path / "state.pt") == progress


def test_an_interrupt_saves_what_was_learnt(corpus: Corpus, tmp_path: Path) -> None:
    learner, progress = new_learner(), Progress()
    with ThreadPoolExecutor(1) as pool:
        kill = pool.submit(lambda: _interrupt_after(progress, 2))
        done = train(learner, corpus, progress, seconds=3600, state_path=tmp_path / "state.pt", say=lambda line: None)
        kill.result()
    assert not done
    assert load(new_learner(), tmp_path / "state.pt").step == progress.step >= 2


def _interrupt_after(progress: Progress, num_steps: int) -> None:
    while progress.step < num_steps:
        os.sched_yield()
    os.kill(os.getpid(), signal.SIGINT)


def test_muon_brings_singular_values_near_one() -> None:
    torch.manual_seed(0)
    stack = torch.randn(3, 24, 16)
    singular = torch.linalg.svdvals(orthogonalized(stack))
    assert singular.shape == (3, 16)
    assert ((singular > 0.6) & (singular < 1.3)).all()
    u, _, vt = torch.linalg.svd(stack[0], full_matrices=False)
    assert torch.nn.functional.cosine_similarity(orthogonalized(stack)[0].flatten(), (u @ vt).flatten(), dim=0) > 0.97


def test_the_schedule_rises_stays_and_falls() -> None:
    assert learning_rate_factor(0, 0.0) == pytest.approx(1 / WARM_UP_STEPS)
    assert learning_rate_factor(WARM_UP_STEPS, 0.1) == 1.0
    assert learning_rate_factor(1000, 0.7) == pytest.approx(0.5)
    assert learning_rate_factor(1000, 1.2) == LOWEST_RATE
    assert router_bias_rate(0.9) < router_bias_rate(0.1)


def test_the_exported_names_and_shapes_are_the_shipped_checkpoints() -> None:
    made = {name: (list(t.shape), str(t.dtype)) for name, t in checkpoint_tensors(DemoModel(Shape())).items()}
    demo = ROOT / "pd_engine" / "model" / "demo"
    with safe_open(demo / "model.safetensors", framework="pt") as file:
        names = list(file.keys())
        shipped = {name: (list(file.get_tensor(name).shape), str(file.get_tensor(name).dtype)) for name in names}
    assert made == shipped
    mine, theirs = Shape().config_json(), json.loads((demo / "config.json").read_text())
    assert {key: mine[key] for key in theirs} == theirs
    assert mine.keys() == theirs.keys()


def test_the_exported_model_computes_what_was_trained(corpus: Corpus, tmp_path: Path) -> None:
    """Main logits against transformers, on the weights as they are stored."""
    from transformers import DeepseekV3ForCausalLM
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3PreTrainedModel

    learner = new_learner()
    steps(learner, corpus, range(5))
    write_checkpoint(learner.model, tmp_path)
    assert ModelConfig.load(tmp_path).kv_lora_rank == SMALL.kv_lora_rank
    ignored = DeepseekV3PreTrainedModel._keys_to_ignore_on_load_unexpected
    DeepseekV3PreTrainedModel._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{SMALL.num_hidden_layers}\..*"]
    try:
        oracle = DeepseekV3ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    finally:
        DeepseekV3PreTrainedModel._keys_to_ignore_on_load_unexpected = ignored
    with torch.no_grad():
        for parameter in learner.model.parameters():
            parameter.copy_(parameter.bfloat16().float())
        batch = windows(corpus.learnt, count=2, length=16, seed=(5, 5))
        main, _ = learner.model(batch[:, :-2], batch[:, 1:-1], learner.new_loads())
        difference = (main.float() - oracle(batch[:, :-2]).logits).abs().max()
    assert difference < (0.1 if torch.cpu._is_avx512_bf16_supported() else 1e-4)


def test_the_way_from_a_text_to_a_checkpoint(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"document {i}: {i} and {i + 1} make {2 * i + 1}, and so on" for i in range(60)))
    out = tmp_path / "out"
    recipe = Recipe(num_windows=2, window_tokens=8, threads=1)
    assert make(text, out, minutes=0.005, resume=False, recipe=recipe, shape=SMALL)
    wanted = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in out.iterdir()} == wanted | {"training"}
    numbers = json.loads((out / "training" / "quality.json").read_text())
    assert numbers["step"] >= 1
    assert 0 < numbers["loss"] < 20
    with pytest.raises(InvalidArgument, match="--resume"):
        make(text, out, minutes=0.005, resume=False, recipe=recipe, shape=SMALL)
    assert make(text, out, minutes=0.01, resume=True, recipe=recipe, shape=SMALL)
    assert json.loads((out / "training" / "quality.json").read_text())["step"] > numbers["step"]


def test_the_command_refuses_a_text_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(text=tmp_path / "no-such-text", out=tmp_path / "out")
    assert ended.value.code == EXIT_USAGE
    assert re.match(r"error: cannot read the text .*no-such-text", capsys.readouterr().err)
