"""JSON files of a checkpoint, read with typed errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pd_engine.bounded_file import read_bounded
from pd_engine.errors import InvalidArgument

MAX_JSON_BYTES = 32 * 1024 * 1024


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file, or {} if there is no such file.

    Raises:
        InvalidArgument: it cannot be read, is larger than `MAX_JSON_BYTES`, is not JSON in UTF-8, or holds something
            else than an object.
    """
    try:
        value = json.loads(read_bounded(path, MAX_JSON_BYTES).decode("utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise InvalidArgument(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{path} is not JSON in UTF-8: {error}") from None
    if not isinstance(value, dict):
        raise InvalidArgument(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value
