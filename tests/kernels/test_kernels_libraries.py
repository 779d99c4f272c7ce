"""Compiled libraries that cannot be used are refused by name before they are loaded, and nothing is silent."""

from __future__ import annotations

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
from pd_kernels.cpu.native import LIBRARY_DIRECTORY_VARIABLE, LibraryUnusable, load_library, usable_isas
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


@pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler")
def test_a_compiler_with_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """$CXX may name a program that runs the compiler, and flags; both reach the command. What it builds is sealed."""
    wrapper = tmp_path / "my wrapper"
    wrapper.write_text("\n".join([
        f"#!{sys.executable}", "import sys", f"open({str(tmp_path / 'seen')!r}, 'w').write(' '.join(sys.argv[1:3]))",
        "target, digest = sys.argv[sys.argv.index('-o') + 1], sys.argv[-4].split(chr(34))[1]",
        "open(target, 'w').write(f'pd-sources-{digest}')",
    ]))
    wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", f"'{wrapper}' g++ -m64")
    assert build.find_compiler() == [str(wrapper), "g++", "-m64"]
    [path] = build.build(tmp_path / "lib", isas=["plain"])
    assert (tmp_path / "seen").read_text() == "g++ -m64"
    assert build.problem_of(path) is None
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    (tmp_path / "seen").unlink()
    assert build.build(tmp_path / "lib", isas=["plain"]) == [path]
    assert not (tmp_path / "seen").exists(), "a whole library of these sources is kept"
    flip_a_bit(path)
    build.build(tmp_path / "lib", isas=["plain"])
    assert build.problem_of(path) is None


def test_a_compiler_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    assert build.find_compiler() is None
    assert build.build(tmp_path) == []
    assert "$CXX says 'no-such-compiler -O2', which is not installed" in capsys.readouterr().out
