"""Steps of few rows, recorded once and repeated without Python between the ops.

At such steps Python costs more than arithmetic: about 5 us an op. A `Recorder` stands in for the library while a
function of ops runs, and notes every call with its arguments. Repeating them gives the function's results for other
inputs, provided that everything lies where it lay: so the function is given copies of its inputs at fixed addresses,
and results of ops are views of slabs that all recordings of one name share. It is the model's own Python that is
recorded; there is no other description of it.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pd_kernels import contract
from pd_kernels.contract import HOST, INT32
from pd_kernels.cpu.native import SIGNATURES
from pd_kernels.index_ranges import OutOfRange
from pd_kernels.ops import Rows

MAX_ROWS = 64             # more are run op by op: arithmetic outweighs Python there
MAX_SLAB_BYTES = 1 << 26  # of one name; a model that needs more is run op by op
MAX_ARGUMENTS = 26

StepFunction = Callable[[tuple[Tensor, ...], Rows], tuple[Tensor, ...]]


_QUERIES = frozenset(
    {"__get__", "data_ptr", "stride", "is_contiguous", "is_neg", "element_size", "size", "dim", "numel"})
_VIEWS = frozenset({"__getitem__", "view", "split", "unsqueeze", "squeeze", "transpose"})


class OnlyOps(TorchFunctionMode):
    """Refuses every torch function that computes: repeating the recording would leave it out."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        assert name in _QUERIES or name in _VIEWS, f"torch's {name} is not an op: a recording would not repeat it"
        result = func(*args, **(kwargs or {}))
        if name in _VIEWS:
            for part in result if isinstance(result, tuple) else (result,):
                assert part.untyped_storage().data_ptr() == args[0].untyped_storage().data_ptr(), f"{name} copies"
        return result


class _Call(ctypes.Structure):
    """cpu/program.h: Call."""

    _fields_ = (("run", ctypes.c_void_p), ("arguments", ctypes.c_uint64 * MAX_ARGUMENTS))


class SlabsFull(Exception):
    """The function's results need more room than `MAX_SLAB_BYTES`."""


class Slabs:
    """Room for the results of a function's ops, one slab a result, for up to `MAX_ROWS` rows."""

    def __init__(self) -> None:
        self._slabs: list[Tensor] = []
        self._num_bytes = 0

    def take(self, number: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The result `number` of the function, [rows, ...], in its slab.

        Raises:
            SlabsFull: there is no room for it.
        """
        row_bytes = dtype.itemsize
        for size in shape[1:]:
            row_bytes *= size
        if number == len(self._slabs):
            self._num_bytes += row_bytes * MAX_ROWS
            if self._num_bytes > MAX_SLAB_BYTES:
                raise SlabsFull
            self._slabs.append(torch.empty(row_bytes * MAX_ROWS, dtype=torch.uint8))
        return self._slabs[number][: row_bytes * shape[0]].view(dtype).view(shape)


class Recorder:
    """Stands in for the library and for torch.empty: passes calls on, and notes them."""

    def __init__(self, library: ctypes.CDLL, slabs: Slabs) -> None:
        self._library = library
        self._slabs = slabs
        self._num_results = 0
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._library, name)

        def call(*arguments: Any) -> Any:
            self.calls.append((name, arguments))
            return function(*arguments)

        return call

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        self._num_results += 1
        with torch._C.DisableTorchFunction():
            return self._slabs.take(self._num_results - 1, shape, dtype)


class Program:
    """Recorded calls, ready for `pd_run`."""

    def __init__(self, library: ctypes.CDLL, calls: list[tuple[str, tuple[Any, ...]]]) -> None:
        self._library = library
        self._names = [name for name, _ in calls]
        self._calls = (_Call * len(calls))()
        self._address = ctypes.addressof(self._calls)
        self._refused = ctypes.c_long()
        self._refused_address = ctypes.addressof(self._refused)
        for call, (name, arguments) in zip(self._calls, calls, strict=True):
            call.run = library.pd_find_caller(name.encode())
            assert call.run, f"{name} cannot be recorded"
            for index, (kind, value) in enumerate(zip(SIGNATURES[name][1], arguments, strict=True)):
                call.arguments[index] = _bits(kind, value)

    def run(self) -> None:
        """Raises:
        OutOfRange: an op refused its input, such as a position beyond the table or a block beyond the cache.
        """
        refused = self._library.pd_run(self._address, len(self._names), self._refused_address)
        if refused >= 0:
            raise OutOfRange(f"{self._names[refused]} refused row or entry {self._refused.value}: out of range")


def _bits(kind: type, value: Any) -> int:
    """An argument as cpu/program.h's `Argument` holds it."""
    if kind is ctypes.c_float:
        return int.from_bytes(struct.pack("<d", value), "little")
    return int(value or 0) & 0xFFFFFFFFFFFFFFFF


class FixedInputs:
    """Copies of a step's inputs at fixed addresses: rows of any number up to `MAX_ROWS`, tables of one width.

    What is not of this step in the tables is -1: an op refuses to follow it.
    """

    def __init__(self, tensors: tuple[Tensor, ...], table_width: int) -> None:
        self.table_width = table_width
        self._tensors = [torch.zeros(MAX_ROWS, *t.shape[1:], dtype=t.dtype) for t in tensors]
        self._positions = torch.zeros(MAX_ROWS, dtype=torch.int32)
        self._sequences = torch.zeros(MAX_ROWS, dtype=torch.int32)
        self._slots = torch.zeros(MAX_ROWS, dtype=torch.int64)
        self._tables = torch.full((MAX_ROWS, table_width), -1, dtype=torch.int32)
        self._rows = [
            (to.dtype, to.data_ptr(), tuple(to.shape[1:]), to[0].nbytes)
            for to in (*self._tensors, self._positions, self._sequences, self._slots)
        ]
        self._table_rows = self._tables.numpy()
        self._num_tables = 0

    def of(self, num_rows: int) -> tuple[tuple[Tensor, ...], Rows]:
        """The inputs of a step of that many rows, as the function sees them. Contents: those last `put`."""
        return tuple(t[:num_rows] for t in self._tensors), Rows(
            positions_T=self._positions[:num_rows], sequence_T=self._sequences[:num_rows],
            block_tables_SB=self._tables, slots_T=self._slots[:num_rows],
        )

    def put(self, tensors: tuple[Tensor, ...], rows: Rows) -> None:
        """At most `MAX_ROWS` rows and sequences, tables no wider than these.

        Raises:
            WrongArgument: an input has another dtype, layout, place or number of rows than the others, or another
                width than when the function was first called.
        """
        T, (S, B) = rows.positions_T.shape[0], rows.block_tables_SB.shape
        sources = (*tensors, rows.positions_T, rows.sequence_T, rows.slots_T)
        for (dtype, address, shape, row_bytes), source in zip(self._rows, sources, strict=True):
            if not (source.dtype is dtype and source.shape == (T, *shape) and source.is_contiguous() and source.is_cpu
                    and not source.is_neg()):
                raise contract.wrong(
                    f"repeat: an input of {T} rows", source, frozenset({dtype}), f"{[T, *shape]}, contiguous", HOST)
            ctypes.memmove(address, source.data_ptr(), T * row_bytes)
        contract.on_device("repeat: block tables", rows.block_tables_SB, INT32, HOST)
        self._table_rows[:S, :B] = rows.block_tables_SB.numpy()
        self._table_rows[:S, B:] = -1
        if self._num_tables > S:
            self._table_rows[S : self._num_tables] = -1
        self._num_tables = S


@dataclass(slots=True)
class Recording:
    """A program for one number of rows, and its results."""

    program: Program
    results: tuple[Tensor, ...]


class Recordings:
    """All recordings of one function."""

    def __init__(self, tensors: tuple[Tensor, ...], table_width: int) -> None:
        self.inputs = FixedInputs(tensors, table_width)
        self.slabs = Slabs()
        self.by_rows: dict[tuple[int, int], Recording] = {}  # by their number and the variant
        self.too_large = False
