"""Writes docs/settings.md from the settings' own definitions, or checks that it is what it would write.

    python -m pd_ops.settings_doc            write it
    python -m pd_ops.settings_doc --check    exit status 1 if it is stale
"""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer
from annotated_types import BaseMetadata, Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from pd_engine.settings import Section, Settings

DOCUMENT = Path("docs/settings.md")

HEAD = """# Settings

One YAML file, given with `--config FILE`; flags of a command stand over it. Every key has a default, so a file holds
only what differs, and no file at all is fine. An unknown key is refused, with the nearest known one.

```yaml
model: demo
prefill:
  workers: 2
engine:
  cache_mib: 512
```

This page is written from the definitions in `pd_engine/settings.py` (`make docs`).
"""


def document() -> str:
    """The whole page."""
    sections = [(name, field) for name, field in Settings.model_fields.items() if _is_section(field)]
    top = {name: field for name, field in Settings.model_fields.items() if not _is_section(field)}
    parts = [HEAD, _table("At the top", (Settings.__doc__ or "").replace("The whole file. ", ""), top)]
    for name, field in sections:
        section = field.annotation
        assert isinstance(section, type) and issubclass(section, Section), name
        doc = section.__doc__ if "__doc__" in vars(section) else ""
        parts.append(_table(f"`{name}`", doc or "", section.model_fields))
    return "\n".join(parts)


def _is_section(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, Section)


def _table(title: str, text: str, fields: dict[str, FieldInfo]) -> str:
    lines = [f"## {title}", "", *([" ".join(text.split()), ""] if text else [])]
    lines += ["| key | default | allowed | what it is |", "|---|---|---|---|"]
    for name, field in fields.items():
        default = "none" if field.default is None else _yaml(field.default)
        lines.append(f"| `{name}` | {default} | {_allowed(field)} | {field.description or ''} |")
    return "\n".join([*lines, ""])


def _yaml(value: Any) -> str:
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _allowed(field: FieldInfo) -> str:
    annotation, optional = field.annotation, ""
    if isinstance(annotation, types.UnionType):
        annotation, optional = next(a for a in get_args(annotation) if a is not type(None)), ", or none"
    if get_origin(annotation) is Literal:
        return " ".join(f"`{choice}`" for choice in get_args(annotation)) + optional
    if get_origin(annotation) is tuple:
        section = get_args(annotation)[0]
        return f"a list of {{{', '.join(f'`{name}`' for name in section.model_fields)}}}"
    names = {int: "integer", float: "number", bool: "`true` `false`", str: "text"}
    assert isinstance(annotation, type)
    words = [names[annotation], *filter(None, map(_bound, field.metadata))]
    return " ".join(words) + optional


def _bound(metadata: BaseMetadata | Any) -> str:
    """A bound in words; whatever pydantic adds beside bounds (strictness, say) has none."""
    match metadata:
        case Ge(ge=value):
            return f"≥ {value}"
        case Gt(gt=value):
            return f"> {value}"
        case Le(le=value):
            return f"≤ {value}"
        case Lt(lt=value):
            return f"< {value}"
    pattern = getattr(metadata, "pattern", None)
    return f"like `{pattern}`" if pattern else ""


def main(check: bool = typer.Option(False, "--check", help="write nothing; exit 1 if the page is stale")) -> None:
    path = Path(__file__).resolve().parents[2] / DOCUMENT
    if not check:
        path.write_text(document(), encoding="utf-8")
        print(DOCUMENT)
    elif not path.exists() or path.read_text(encoding="utf-8") != document():
        print(f"{DOCUMENT} is stale; write it again with: make docs", file=sys.stderr)
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
