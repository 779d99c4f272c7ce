"""What is found out about a model and the settings before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from pd_engine.errors import FailedPrecondition, InvalidArgument
from pd_engine.model.random_checkpoint import write_random_checkpoint
from pd_engine.settings import load_settings
from pd_ops.checked_model import with_checked_model


def test_fp8_latents_need_whole_groups(tmp_path: Path) -> None:
    path = tmp_path / "model"
    write_random_checkpoint(path)
    settings = load_settings(None, {"model": str(path), "engine.latent_dtype": "fp8"})
    with pytest.raises(InvalidArgument, match=r"latent_dtype: fp8 needs .* multiple of 128, this one has 32"):
        with_checked_model(settings)
    demo = load_settings(None, {"model": "demo", "engine.latent_dtype": "fp8"})
    assert Path(with_checked_model(demo).model).is_dir()


def test_fp8_weights_are_checked_with_their_scales(tmp_path: Path) -> None:
    path = tmp_path / "model"
    write_random_checkpoint(path, fp8=True)
    settings = load_settings(None, {"model": str(path)})
    assert with_checked_model(settings).model == str(path)
    config = path / "config.json"
    config.write_text(config.read_text().replace('"hidden_size": 64', '"hidden_size": 129'))
    with pytest.raises(FailedPrecondition, match=r"misshaped: .*_scale_inv \[1, 1\] instead of \[1, 2\]"):
        with_checked_model(settings)
