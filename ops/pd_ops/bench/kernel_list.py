"""What ops there are, what implements each of them, and what was last measured of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pd_kernels
import pd_ops
from pd_engine.errors import FailedPrecondition
from pd_kernels.build import isa_names
from pd_kernels.cpu.native import usable_isas
from pd_ops.bench.measured_process import Document
from pd_ops.tables import table

FIGURES = Path(pd_ops.__file__).resolve().parents[2] / "docs" / "benchmarks" / "kernels.json"
PACKAGE = Path(pd_kernels.__file__).resolve().parent
FLOATS = ("bf16", "fp16", "fp32")  # fp16: of the reference and of Triton

# One line each; an op without a line computes in FLOATS. FP8 beside them: weights of linear and moe_experts, latents of
# latent_write and mla_attention; fp8_gemm and fp8_quant are of activations that are quantized too, on GPUs.
DTYPES = {
    "linear": (*FLOATS, "fp8"), "moe_experts": (*FLOATS, "fp8"), "latent_write": (*FLOATS, "fp8"),
    "mla_attention": (*FLOATS, "fp8"),
    "block_checksum": ("bytes",), "block_copy": ("bytes",), "block_stream": ("bytes",),
    "elementary": ("fp32",), "sample": ("fp32",),
    "verify_drafts": ("int32",), "fp8_gemm": ("fp8",), "fp8_quant": ("fp8",), "latent_fp8": ("fp8",),
}
# What the compile gate and the roofline call its uses.
USES = {"mla_attention": ("mla_decode", "mla_prefill"), "moe_experts": ("grouped_gemm",)}
CPU_SOURCES = ("cpu.cpp",)
TRITON_SOURCES = ("triton.py",)
REFERENCE_SOURCES = ("reference.py",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One measurement: CPU microseconds of a call with so many rows (`case` names the sizes)."""

    op: str
    implementation: str
    dtype: str
    case: str
    num_rows: int
    microseconds: float

    def to_json(self) -> Document:
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Implementation:
    """`usable` here: "cpu-avx512" is built only where it was, and runs only on such a processor."""

    name: str
    usable: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class OpEntry:
    op: str
    implementations: tuple[Implementation, ...]
    dtypes: tuple[str, ...]
    measured: tuple[Figure, ...]

    def to_json(self) -> Document:
        return {
            "op": self.op, "uses": list(USES.get(self.op, ())),
            "implementations": [one.name for one in self.implementations],
            "usable_here": [one.name for one in self.implementations if one.usable], "dtypes": list(self.dtypes),
            "measured": [figure.to_json() for figure in self.measured],
        }


def list_ops(figures: Sequence[Figure], package: Path = PACKAGE) -> list[OpEntry]:
    """Every folder of `pd_kernels` that has a reference."""
    return [
        OpEntry(
            op=folder.name, implementations=tuple(_implementations(folder)),
            dtypes=DTYPES.get(folder.name, FLOATS),
            measured=tuple(figure for figure in figures if figure.op == folder.name),
        )
        for folder in sorted(package.iterdir()) if _has(folder, REFERENCE_SOURCES)
    ]


def read_figures(path: Path) -> tuple[Document, list[Figure]]:
    """(identity of the measurement, its figures); nothing if there is no such file.

    Raises:
        FailedPrecondition: it is not what `kernels measure` writes.
    """
    if not path.is_file():
        return {}, []
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        return document["identity"], [Figure(**figure) for figure in document["figures"]]
    except (ValueError, KeyError, TypeError) as error:
        raise FailedPrecondition(f"{path} holds no figures of kernels: {error}") from None


def ops_text(entries: Sequence[OpEntry]) -> str:
    """For people: one line an op, with the figures of one row and of the most rows."""
    rows = []
    for entry in entries:
        names = ", ".join(one.name if one.usable else f"({one.name})" for one in entry.implementations)
        name = f"{entry.op} ({', '.join(USES[entry.op])})" if entry.op in USES else entry.op
        rows.append((name, names, ", ".join(entry.dtypes), _figures_text(entry.measured)))
    return table(("op", "implementations (not here)", "dtypes", "last measured"), rows)


def figures_text(figures: Sequence[Figure]) -> str:
    rows = [(one.op, one.implementation, one.dtype, one.case, one.num_rows, f"{one.microseconds:.1f} µs")
            for one in figures]
    return table(("op", "implementation", "dtype", "case", "rows", "CPU time"), rows)


def _implementations(folder: Path) -> list[Implementation]:
    found = [Implementation(name="reference", usable=True)]
    if _has(folder, CPU_SOURCES):
        usable = usable_isas()
        found += [Implementation(name=f"cpu-{isa}", usable=isa in usable) for isa in isa_names()]
    if _has(folder, TRITON_SOURCES):
        found.append(Implementation(name="triton", usable=_has_gpu()))
    return found


def _has(folder: Path, names: Sequence[str]) -> bool:
    return any((folder / name).is_file() for name in names)


def _has_gpu() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*"))


def _figures_text(figures: Sequence[Figure]) -> str:
    """The quickest implementation in bf16 (or the only dtype), at its fewest and its most rows."""
    dtypes = {figure.dtype for figure in figures}
    dtype = "bf16" if "bf16" in dtypes else max(dtypes, default="")
    wanted = [figure for figure in figures if figure.dtype == dtype and not figure.case.endswith((", head", ", FP8"))]
    parts = []
    for count in sorted({figure.num_rows for figure in wanted}):
        best = min((figure for figure in wanted if figure.num_rows == count), key=lambda figure: figure.microseconds)
        parts.append(f"{count} rows {best.microseconds:.1f} µs ({best.implementation})")
    return "; ".join([parts[0], parts[-1]] if len(parts) > 1 else parts) or "not measured"
