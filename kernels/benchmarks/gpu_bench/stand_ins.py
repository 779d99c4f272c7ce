"""What the model end to end imports and a machine with torch and Triton alone does not have.

The workers' cores compute with torch and the kernels only; their modules also import what workers talk with, and what
reads settings and checkpoints. Of a package that is missing, or too old to be imported, there is a stand-in: nothing in
it is called, but for pydantic's models, which take the numbers that they are given, unchecked.
"""

from __future__ import annotations

import importlib
import sys
import types
import typing
from collections.abc import Callable
from typing import Any, Self

NAMES = ("grpc", "psutil", "safetensors", "yaml", "pydantic", "pd_engine.contracts.worker_pb2")
MISSING = object()


class Anything:
    """Whatever is looked up in a stand-in: an object of any use until it is called for something."""

    def __getattr__(self, name: str) -> Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __or__(self, other: object) -> Any:
        return typing.Any

    __ror__ = __or__

    def __mro_entries__(self, bases: tuple[object, ...]) -> tuple[type, ...]:
        return (Exception,)


class StandIn(types.ModuleType):
    """A module that has every name."""

    def __getattr__(self, name: str) -> Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


class BaseModel:
    """As much of pydantic's as `pd_engine.model.config` and `pd_engine.settings` need: fields with defaults, nested."""

    def __init__(self, **values: Any) -> None:
        for name, hint in typing.get_type_hints(type(self)).items():
            if name != "model_config":
                setattr(self, name, _field(type(self), name, hint, values.get(name, MISSING)))

    @classmethod
    def model_validate(cls, values: dict[str, Any]) -> Self:
        return cls(**values)


def _field(model: type, name: str, hint: Any, value: Any) -> Any:
    if value is MISSING:
        value = getattr(model, name, None)
    nested = [kind for kind in (hint, *typing.get_args(hint)) if isinstance(kind, type) and issubclass(kind, BaseModel)]
    return nested[0](**value) if nested and isinstance(value, dict) else value


def field(default: Any = None, *, default_factory: Callable[[], Any] | None = None, **limits: Any) -> Any:
    """pydantic's `Field`: its default."""
    return default if default_factory is None else default_factory()


def install() -> list[str]:
    """Puts stand-ins where something is missing, before any module of the engine is imported. Returns their names."""
    missing = []
    for name in NAMES:
        try:
            importlib.import_module(name)
        except Exception:  # noqa: BLE001  (protobuf has an error of its own for code that is newer than it)
            missing.append(name)
            sys.modules[name] = StandIn(name)
    if "pydantic" in missing:
        vars(sys.modules["pydantic"]).update(
            BaseModel=BaseModel, Field=field, ConfigDict=dict, ValidationError=ValueError,
            model_validator=lambda **_: lambda method: method)
    return missing
