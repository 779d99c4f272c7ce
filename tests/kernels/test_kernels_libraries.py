"""Compiled libraries that cannot be used are refused by name before they are loaded, and nothing is silent."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from pd_engine.errors import FailedPrecondition
from pd_engine.model.random_checkpoint import write_random_checkpoint
from pd_kernels import build
from pd_kernels.backend import OpsUnavailable, load_ops
from pd_kernels.block_checksum import ranges
from pd_kernels.cpu import native
from pd_kernels.cpu.native import LIBRARY_DIRECTORY_VARIABLE, LibraryUnusable, load_library, numerics, usable_isas
from pd_kernels.cpu.ops import CpuOps
from support.engine_cases import load_engine

BEST = (usable_isas() or ["plain"])[-1]
needs_libraries = pytest.mark.skipif(not usable_isas(), reason="no compiled ops")


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A whole copy of the best library, in a directory of its own that processes look into."""
    monkeypatch.setenv(LIBRARY_DIRECTORY_VARIABLE, str(tmp_path))
    path = build.library_path(tmp_path, BEST)
    original = build.library_path(build.PACKAGE / build.LIBRARIES, BEST)
    if original.exists():
        shutil.copy(original, path)
    return path


def cut(path: Path, num_bytes: int) -> None:
    os.truncate(path, num_bytes)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def of_another_version(path: Path) -> None:
    """Whole, without one of the functions that are called: as an older version would have left it."""
    source = path.with_suffix(".c")
    source.write_text('const char* pd_isa(void) { return "avx2"; }')
    compiler = build.find_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    subprocess.run([*compiler, "-x", "c", "-shared", "-fPIC", "-o", str(path), str(source)], check=True)


def sealed_of_other_sources(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: -build.SEAL_BYTES].replace(b"pd-sources-", b"pd-sources_"))
    build.seal(path)


DAMAGES = {
    "cut in the middle": lambda path: cut(path, path.stat().st_size // 3),
    "without its end": lambda path: cut(path, path.stat().st_size - 1),
    "empty": lambda path: cut(path, 0),
    "a flipped bit": flip_a_bit,
    "of another version": of_another_version,
    "of other sources": sealed_of_other_sources,
}


@needs_libraries
def test_a_whole_library_is_loaded(library: Path) -> None:
    assert build.problem_of(library) is None
    assert CpuOps(BEST, threads=1, directory=library.parent).name == f"cpu-{BEST}"


@needs_libraries
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_library_that_must_not_be_loaded(
    damage: str, library: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The engine names the library and what to do; settings that do without it are served."""
    DAMAGES[damage](library)
    what = "built from other sources" if damage == "of other sources" else "damaged or were built by another version"
    words = rf"the compiled ops in {library} (are|were) {what}; `python -m pd_kernels.build` builds them anew"
    with pytest.raises(LibraryUnusable, match=words):
        load_library(BEST)
    for name in ("auto", "cpu"):
        with pytest.raises(OpsUnavailable, match=words):
            load_ops(name, threads=1)  # type: ignore[arg-type]
    assert load_ops("reference", threads=1).name == "reference"
    model = tmp_path_factory.mktemp("model") / "m"
    write_random_checkpoint(model, {"num_hidden_layers": 1}, seed=1)
    with pytest.raises(FailedPrecondition, match=f"settings: engine.ops: auto: {words}"):
        load_engine(model, ops="auto")


@needs_libraries
def test_transfers_do_without_a_damaged_library_and_say_so(library: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Settings that ask for compiled ops were refused before; those that ask for the reference are served."""
    flip_a_bit(library)
    with caplog.at_level(logging.WARNING):
        assert ranges.compiled.__wrapped__() is None
    assert [record.message for record in caplog.records] == [
        f"checksums and copies of blocks run in numpy: the compiled ops in {library} are damaged or were built by "
        "another version; `python -m pd_kernels.build` builds them anew"
    ]


def test_without_compiled_ops_the_reference_says_that_it_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning: commands show those on stderr. Whoever asks for the reference, or for compiled ops, knows."""
    monkeypatch.setenv(LIBRARY_DIRECTORY_VARIABLE, str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert load_ops("auto", threads=1).name == "reference"
    assert [record.message for record in caplog.records] == [
        "the torch reference serves, many times slower: the compiled CPU ops are not built for this CPU in "
        f"{tmp_path}; `python -m pd_kernels.build` builds them where there is a C++ compiler"
    ]
    caplog.clear()
    load_ops("reference", threads=1)
    with pytest.raises(OpsUnavailable, match="are not built for this CPU"):
        load_ops("cpu", threads=1)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@needs_libraries
def test_a_library_under_the_name_of_another_instruction_set(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its stamp before it is loaded; by what it says itself where the compiler was asked for another."""
    other = "avx2" if BEST == "plain" else "plain"
    path = library.rename(build.library_path(library.parent, other))
    with pytest.raises(LibraryUnusable, match=rf"in {path} are those of another instruction set than {other}; `python"):
        load_library(other)
    monkeypatch.setattr(native, "problem_of", lambda path: None)
    with pytest.raises(LibraryUnusable, match=f"in {path} are those of {BEST} instead of {other}; `python"):
        load_library(other)


needs_compiler = pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler")
TINY = """
#ifdef __FAST_MATH__
#error other bits
#endif
#pragma GCC visibility push(default)
extern "C" const char* pd_isa() { return "plain"; }
extern "C" const char* pd_sources() { return "pd-sources-" PD_SOURCES; }
"""


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that takes a compiler and its arguments, notes them, and has a tiny library compiled instead."""
    monkeypatch.delenv("CXX", raising=False)
    (tmp_path / "tiny.cpp").write_text(TINY)
    path = tmp_path / "my wrapper"
    path.write_text("\n".join([
        f"#!{sys.executable} -IS", "import os, sys", f"open({str(tmp_path / 'seen')!r}, 'w').write(' '.join(sys.argv))",
        f"os.execvp(sys.argv[1], [*sys.argv[1:-1], {str(tmp_path / 'tiny.cpp')!r}])",
    ]))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def build_plain(tmp_path: Path) -> Path:
    [path] = build.build(tmp_path / "lib", isas=["plain"])
    assert build.problem_of(path) is None
    assert list(path.parent.iterdir()) == [path]
    return path


@needs_compiler
def test_a_compiler_with_arguments(tmp_path: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """$CXX may name a program that runs the compiler, and flags; both reach the command. What it builds is sealed, and
    kept as long as sources and flags are the same."""
    monkeypatch.setenv("CXX", f"'{compiler}' g++ -O1")
    assert build.find_compiler() == [str(compiler), "g++", "-O1"]
    path, seen = build_plain(tmp_path), tmp_path / "seen"
    assert seen.read_text().split()[2:4] == ["g++", "-O1"]
    seen.unlink()
    build_plain(tmp_path)
    assert not seen.exists(), "a whole library of these sources is kept"
    flip_a_bit(path)
    build_plain(tmp_path)
    assert seen.exists()
    seen.unlink()
    monkeypatch.setenv("CXX", f"'{compiler}' g++")
    build_plain(tmp_path)
    assert seen.exists(), "one with other flags is built anew"


@needs_compiler
def test_flags_that_would_change_bits_are_undone(
    tmp_path: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And libraries of other flags have other numerics, whatever those flags are."""
    names = set()
    for flags in ("", "-ffast-math", "-Ofast", "-fassociative-math -ffp-contract=fast"):
        monkeypatch.setenv("CXX", f"'{compiler}' g++ {flags}")
        library = ctypes.CDLL(str(build_plain(tmp_path).rename(tmp_path / f"{len(names)}.so")))
        library.pd_sources.restype = ctypes.c_char_p
        library.pd_arithmetic = lambda: b"plain"
        names.add(numerics(library))
        assert (tmp_path / "seen").read_text().split("-o ")[0].split()[-len(build.EXACT_FLAGS) - 1 :][:-1] == [
            *build.EXACT_FLAGS]
    assert len(names) == 4
    assert f"cpu-{build.source_digest()}/plain" in names


@needs_compiler
def test_a_sanitizers_library_does_not_stay(
    tmp_path: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", f"'{compiler}' g++")
    [path] = build.build(tmp_path / "lib", isas=["plain"], extra_flags=("-g",))
    build_plain(tmp_path)
    assert build.identity("plain").encode() + b"\0" in path.read_bytes()
    monkeypatch.setattr(sys, "argv", ["build", "--sanitize"])
    with pytest.raises(SystemExit, match="2"):
        build.main()
    assert "--sanitize needs --output" in capsys.readouterr().err


@pytest.mark.parametrize(("command", "reason"), [
    ("true", "ended well, but has not written the library"),
    ("false", "failed"),
    ("'{folder}/no program'", "cannot be run: Exec format error"),
    pytest.param("'{folder}/my wrapper' g++ -DUSELESS", "undefined symbol: ", marks=needs_compiler),
    pytest.param("'{folder}/my wrapper' g++ -DOTHER", "it holds ops for avx2", marks=needs_compiler),
])
def test_what_cannot_be_loaded_is_left_out(
    command: str, reason: str, tmp_path: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The library that was there is not replaced, and nothing else is left."""
    useless = "#ifdef USELESS\nint missing(); int one = missing();\n#endif\n"
    (tmp_path / "tiny.cpp").write_text(useless + "#ifdef OTHER\n" + TINY.replace('"plain"', '"avx2"')
                                       + "#else\n" + TINY + "#endif\n")
    (tmp_path / "no program").write_bytes(b"\0\1\2")
    (tmp_path / "no program").chmod(0o755)
    monkeypatch.setenv("CXX", command.format(folder=tmp_path))
    there = build.library_path(tmp_path / "lib", "plain")
    there.parent.mkdir()
    there.write_bytes(b"of others")
    assert build.build(tmp_path / "lib", isas=["plain"]) == []
    said = capfd.readouterr().err
    assert "plain left out" in said
    assert reason in said
    assert [file.read_bytes() for file in there.parent.iterdir()] == [b"of others"]


def test_an_interrupted_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one that was killed has left is taken away by a later one."""
    monkeypatch.setenv("CXX", "true")
    abandoned, other = (tmp_path / f"{build.SCRATCH}{name}" for name in ("abandoned", "of-now"))
    for folder in (abandoned, other):
        folder.mkdir()
        (folder / "library.so").touch()
    os.utime(abandoned, (0, 0))

    def interrupted(command: list[str], made: Path, what: str) -> str | None:
        made.touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(build, "_compile", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build.build(tmp_path, isas=["plain"])
    assert list(tmp_path.iterdir()) == [other]


@pytest.mark.parametrize(("says", "reason"), [
    ("no-such-compiler -O2", "$CXX says 'no-such-compiler -O2', which is not installed"),
    ("'g++", "which cannot be read: No closing quotation"),
])
def test_a_compiler_that_is_not_there(
    says: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", says)
    assert build.find_compiler() is None
    assert build.build(tmp_path) == []
    said = capsys.readouterr().out
    assert "no compiler: $CXX says" in said
    assert reason in said
