"""`pd-relay kernels`: the ops, what implements them, and how fast that was when it was last measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from pd_engine.errors import FailedPrecondition, InvalidArgument
from pd_kernels.cpu.native import LibraryUnusable, usable_isas
from pd_ops.bench.identity import identity, identity_text
from pd_ops.bench.kernel_list import FIGURES, figures_text, list_ops, ops_text, read_figures
from pd_ops.bench.kernel_roofline import read_roofline, roofline_text
from pd_ops.commands import options

DTYPES = ("bf16", "fp32")
ROW_COUNTS = (1, 16, 256)

app = typer.Typer(help="The ops and their implementations.", no_args_is_help=True, rich_markup_mode=None)


@app.command("list")
def list_command(
    context: typer.Context,
    figures: Annotated[Path | None, typer.Option(help="File of `kernels measure`; default: the committed one.")] = None,
    roofline: Annotated[
        bool, typer.Option("--roofline", help="The GPU kernels' least work and time on an H200, and what was reached.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """List the ops: implementations, dtypes and last measured figures."""
    output = options.start(context, as_json)
    if roofline:
        document = read_roofline()
        output.document({"roofline": document})
        output.text(roofline_text(document))
        return
    about, measured = read_figures(figures or FIGURES)
    entries = list_ops(measured)
    output.document({"identity": about or None, "ops": [entry.to_json() for entry in entries]})
    output.text(ops_text(entries))
    if about:
        output.text(f"measured: {identity_text(about)}")


@app.command("measure")
def measure_command(
    context: typer.Context,
    dtype: Annotated[
        list[str] | None, typer.Option(help="bf16 or fp32; may be given several times. Default: both.")
    ] = None,
    rows: Annotated[
        list[int] | None, typer.Option(min=1, max=512, help="Rows of a call; repeatable. Default: 1, 16, 256.")
    ] = None,
    output_file: Annotated[
        Path | None, typer.Option("--output", help="Where to write the figures, for `kernels list`.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Time each op on this CPU, one thread: every usable instruction set, and the reference."""
    output = options.start(context, as_json)
    options.checked_file(output_file)
    dtypes = list(dict.fromkeys(dtype or DTYPES))
    if unknown := [name for name in dtypes if name not in DTYPES]:
        raise InvalidArgument(f"--dtype must be {' or '.join(DTYPES)}, got {unknown[0]!r}")
    about = identity()
    import torch

    from pd_kernels.cpu.ops import CpuOps
    from pd_kernels.ops import Ops
    from pd_kernels.reference import ReferenceOps
    from pd_ops.bench.kernel_cases import measure_ops

    torch.set_num_threads(1)
    try:
        all_ops: list[Ops] = [ReferenceOps(), *(CpuOps(isa, threads=1) for isa in usable_isas())]
    except LibraryUnusable as error:
        raise FailedPrecondition(str(error)) from None
    figures = measure_ops(all_ops, dtypes=dtypes, row_counts=rows or ROW_COUNTS, note=output.note)
    document = {"identity": about, "figures": [figure.to_json() for figure in figures]}
    if output_file is not None:
        output_file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    output.document(document)
    output.text(f"{identity_text(about)}\n{figures_text(figures)}")
