"""The model that --model names: a known one, or a checkpoint's folder."""

from __future__ import annotations

import json
from pathlib import Path

from pd_engine.bounded_file import read_bounded
from pd_engine.errors import InvalidArgument, NotFound
from pd_engine.model.checkpoint import DEMO_NAME, resolve_model
from pd_engine.model.config import CONFIG_FILE, MAX_CONFIG_BYTES, ModelConfig
from pd_ops.capacity import deepseek_v3 as v3
from pd_ops.capacity import deepseek_v4_config as v4
from pd_ops.capacity.architecture import Architecture
from pd_ops.capacity.deepseek_v4 import deepseek_v4

NAMES = ("deepseek-v3", "deepseek-v4-pro", "deepseek-v4-flash")


def architecture(name: str) -> Architecture:
    """Raises:
    NotFound: there is no such model.
    InvalidArgument: its config.json is of another family, or broken.
    """
    match name:
        case "deepseek-v3":
            return v3.deepseek_v3(name, ModelConfig.parse(v3.DEEPSEEK_V3), v3.PUBLISHED)
        case "deepseek-v4-pro":
            return deepseek_v4(name, v4.parse_v4(v4.PRO), v4.PRO_PUBLISHED)
        case "deepseek-v4-flash":
            return deepseek_v4(name, v4.parse_v4(v4.FLASH), v4.FLASH_PUBLISHED)
    if name != DEMO_NAME and not Path(name).expanduser().is_dir():
        raise NotFound(f"no model {name!r}: it must be {', '.join(NAMES)}, {DEMO_NAME} or a checkpoint's folder")
    path = resolve_model(name)
    if _model_type(path) == "deepseek_v4":
        return deepseek_v4(str(path), v4.load_v4(path))
    return v3.deepseek_v3(str(path), ModelConfig.load(path))


def _model_type(path: Path) -> object:
    """As far as it can be told; the family's own reader says what is wrong with the rest."""
    try:
        data = json.loads(read_bounded(path / CONFIG_FILE, MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError, InvalidArgument):
        return None
    return data.get("model_type") if isinstance(data, dict) else None
