"""YAML files that people write: read whole, and refused where they would be read otherwise than they look.

A key that stands twice in one mapping would mean its last value; aliases of aliases may name more values than fit into
memory. Neither is an error in YAML.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from pd_engine.errors import InvalidArgument

MAX_BYTES = 1024 * 1024
MAX_VALUES = 100_000


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Before keys are merged into it: what `<<` brings may stand twice."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            name = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else None
            if name in seen and name is not None:
                raise yaml.composer.ComposerError(
                    "in a mapping", node.start_mark, f"found the key {key.value!r} twice", key.start_mark
                )
            seen.add(name)
        return node


def read_yaml_mapping(path: Path, what: str) -> dict[str, Any]:
    """Empty for an empty file.

    Args:
        what: the file is to whoever reads the message, such as "settings file".

    Raises:
        InvalidArgument: it cannot be read, is too large, no YAML in UTF-8, or no mapping.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise InvalidArgument(f"{what} {path} is larger than {MAX_BYTES} bytes")
        document = _parsed(data.decode("utf-8"))
    except OSError as error:
        raise InvalidArgument(f"cannot read {what} {path}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError) as error:  # such as a date, or a number of digits, that Python does not have
        raise InvalidArgument(f"{what} {path} is not YAML in UTF-8: {error}") from None
    except RecursionError:
        raise InvalidArgument(f"{what} {path} is nested too deeply") from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise InvalidArgument(f"{what} {path} must hold a mapping at the top, got {type(document).__name__}")
    return document


def _parsed(text: str) -> Any:
    """Raises:
    yaml.YAMLError, ValueError, RecursionError: it is no YAML, or more than anybody writes.
    """
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        if _num_values(root, {}) > MAX_VALUES:
            raise ValueError(f"it names more than {MAX_VALUES} values, if aliases are followed")
        return loader.construct_document(root)
    finally:
        loader.dispose()


def _num_values(node: yaml.Node, known: dict[int, float]) -> float:
    """Of a node, aliases followed; without end if it is within itself. `known`: of nodes, by id()."""
    if id(node) not in known:
        known[id(node)] = float("inf")
        children = node.value if isinstance(node, yaml.CollectionNode) else ()
        known[id(node)] = 1 + sum(
            _num_values(one, known) for child in children for one in (child if isinstance(child, tuple) else (child,))
        )
    return known[id(node)]
