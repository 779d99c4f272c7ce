"""Where a checkpoint lies and which tensors its files hold, read from their headers only. Torch-free."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from pd_engine.bounded_file import read_bounded
from pd_engine.errors import FailedPrecondition, InvalidArgument, NotFound
from pd_engine.model.config import CONFIG_FILE, ModelConfig
from pd_engine.model.tensors import EMBEDDING, QUANTIZED_KINDS, TensorKind, TensorSpec, checkpoint_tensors

DEMO_NAME = "demo"
DEMO_PATH = Path(__file__).parent / "demo"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_INDEX_BYTES = 256 * 1024 * 1024
MAX_LISTED = 10  # names of each kind in one error
PLAIN_DTYPES = ("BF16", "F32")
FP8_DTYPE, SCALE_DTYPE = "F8_E4M3", "F32"


def resolve_model(name: str) -> Path:
    """The folder of a checkpoint: "demo" is the one that is shipped with the package, anything else is a path.

    Raises:
        NotFound: there is no such folder, or it has no config.json.
    """
    path = DEMO_PATH if name == DEMO_NAME else Path(name).expanduser()
    if not path.is_dir():
        raise NotFound(f"no model {name!r}: it must be {DEMO_NAME!r} or a folder with a Hugging Face checkpoint")
    if not (path / CONFIG_FILE).is_file():
        raise NotFound(f"no model in {path}: there is no {CONFIG_FILE}")
    return path.resolve()


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """A tensor as a file's header describes it. `dtype` is safetensors' name: BF16, F32, F8_E4M3, ..."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a checkpoint, sorted by name.

    Raises:
        NotFound: there are none, or one that the index names is not there.
        InvalidArgument: the index is broken or names a file outside the folder.
    """
    if (path / WEIGHTS_FILE).is_file():
        return [path / WEIGHTS_FILE]
    if not (path / INDEX_FILE).is_file():
        raise NotFound(f"no weights in {path}: neither {WEIGHTS_FILE} nor {INDEX_FILE}")
    names = sorted(set(_weight_map(path / INDEX_FILE).values()))
    files = [path / name for name in names]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise NotFound(f"{path}: {INDEX_FILE} names files that are not there: {_listed(missing)}")
    return files


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """All tensors of a checkpoint by name.

    Raises:
        NotFound, InvalidArgument: see `weight_files`.
        FailedPrecondition: a file is truncated or no safetensors file, two files hold the same tensor, or the index
            and the files disagree.
    """
    tensors: dict[str, StoredTensor] = {}
    for file in weight_files(path):
        for name, tensor in _read_header(file).items():
            if name in tensors:
                raise FailedPrecondition(f"{name} is both in {tensors[name].file.name} and in {file.name}")
            tensors[name] = tensor
    if not (path / WEIGHTS_FILE).is_file():
        index = _weight_map(path / INDEX_FILE)
        found = {name: tensor.file.name for name, tensor in tensors.items()}
        wrong = [name for name in index.keys() | found.keys() if index.get(name) != found.get(name)]
        if wrong:
            raise FailedPrecondition(f"{path}: {INDEX_FILE} and the files disagree about {_listed(wrong)}")
    return tensors


def check_tensors(
    config: ModelConfig, stored: dict[str, StoredTensor], *, with_mtp: bool = True
) -> dict[str, TensorSpec]:
    """The tensors that the config calls for and that are there, by name.

    Args:
        with_mtp: whether the MTP layer is needed; if not, it may be absent, but only as a whole.

    Raises:
        FailedPrecondition: names are missing, unexpected or misshaped, or have a dtype that is not supported: all in
            the one message, at most `MAX_LISTED` of each kind by name.
    """
    expected = checkpoint_tensors(config)
    mtp_names = {name for name, spec in expected.items() if spec.layer == config.num_hidden_layers}
    has_mtp = bool(mtp_names & stored.keys())
    if not has_mtp and not with_mtp:
        expected = {name: spec for name, spec in expected.items() if name not in mtp_names}
    problems = _problems(config, expected, stored)
    if problems:
        hint = "" if has_mtp or not mtp_names else "; without speculation the MTP layer is not needed"
        raise FailedPrecondition(f"the weights do not fit {CONFIG_FILE}; {'; '.join(problems)}{hint}")
    _check_biases(config, expected, stored)
    return {name: spec for name, spec in expected.items() if name in stored}


def _problems(config: ModelConfig, expected: dict[str, TensorSpec], stored: dict[str, StoredTensor]) -> list[str]:
    """What does not fit, a kind a string, with names."""
    present = [spec for name, spec in expected.items() if name in stored]
    kinds = {
        "missing": [name for name, spec in expected.items() if name not in stored and not spec.optional],
        "unexpected": [name for name in stored if name not in expected and not name.endswith("rotary_emb.inv_freq")],
        "misshaped": [
            f"{spec.name} {list(stored[spec.name].shape)} instead of {list(spec.shape)}"
            for spec in present if stored[spec.name].shape != spec.shape
        ],
    }
    is_fp8 = config.weight_format == "fp8"
    for spec in present:
        allowed = _allowed_dtypes(spec.kind, is_fp8)
        if stored[spec.name].dtype not in allowed:
            kinds.setdefault(f"not {' or '.join(allowed)}", []).append(f"{spec.name} {stored[spec.name].dtype}")
    return [f"{kind}: {_listed(names)}" for kind, names in kinds.items() if names]


def _allowed_dtypes(kind: TensorKind, is_fp8: bool) -> tuple[str, ...]:
    if kind is TensorKind.SCALE:
        return (SCALE_DTYPE,)
    return (FP8_DTYPE,) if is_fp8 and kind in QUANTIZED_KINDS else PLAIN_DTYPES


def checkpoint_dtype(config: ModelConfig, stored: dict[str, StoredTensor]) -> Literal["bf16", "fp32"]:
    """The engine's dtype where the settings say "auto": the config's, else that of the embedding."""
    if config.dtype is not None:
        return "fp32" if config.dtype == "float32" else "bf16"
    return "fp32" if stored[EMBEDDING].dtype == "F32" else "bf16"


def _check_biases(config: ModelConfig, expected: dict[str, TensorSpec], stored: dict[str, StoredTensor]) -> None:
    """Without correction biases implementations disagree on the score of a group (the largest score, or the sum of
    the two largest), so such a checkpoint is taken only where there is one group."""
    biases = [name for name, spec in expected.items() if spec.kind is TensorKind.ROUTER_BIAS]
    missing = [name for name in biases if name not in stored]
    if missing and config.n_group > 1:
        raise FailedPrecondition(f"missing beside n_group {config.n_group}: {_listed(missing)}")


def _read_header(file: Path) -> dict[str, StoredTensor]:
    try:
        with safe_open(file, framework="numpy") as reader:
            slices = {name: reader.get_slice(name) for name in reader.keys()}  # noqa: SIM118
            return {
                name: StoredTensor(file=file, shape=tuple(item.get_shape()), dtype=item.get_dtype())
                for name, item in slices.items()
            }
    except (SafetensorError, OSError) as error:
        raise FailedPrecondition(f"{file} is truncated, broken or no safetensors file: {error}") from None


def _weight_map(file: Path) -> dict[str, str]:
    try:
        data: Any = json.loads(read_bounded(file, MAX_INDEX_BYTES).decode("utf-8"))
    except OSError as error:
        raise InvalidArgument(f"cannot read {file}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{file} is not JSON in UTF-8: {error}") from None
    weight_map = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise InvalidArgument(f"{file} must hold an object weight_map of tensor names to file names")
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name or file_name in ("", ".", ".."):
            raise InvalidArgument(f"{file}: {name} must name a file in the same folder, got {str(file_name)[:80]!r}")
    return weight_map


def _listed(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:MAX_LISTED])
    return shown if len(names) <= MAX_LISTED else f"{shown} and {len(names) - MAX_LISTED} more"
