"""Readers of published traces, with files that are right and files that are broken; scaling; built-in kinds."""

from __future__ import annotations

import gzip
import io
import json
import random
import statistics
import tarfile
from itertools import islice, pairwise
from pathlib import Path

import pytest

from pd_engine.errors import InvalidArgument, NotFound
from pd_ops.bench.serve.arrivals import renewal, weibull_shape
from pd_ops.bench.serve.kinds import KINDS, draw
from pd_ops.bench.serve.load import LoadPlan, build_load
from pd_ops.bench.serve.prompts import PromptMaker
from pd_ops.bench.serve.traced import TracedRequest, fitting_scale, scale_lengths, scale_rate
from pd_ops.bench.serve.traces import guess_format, read_trace

MOONCAKE = [
    {"timestamp": 500, "input_length": 1000, "output_length": 5, "hash_ids": [7, 8]},
    {"timestamp": 1500, "input_length": 513, "output_length": 6, "hash_ids": [7, 9]},
    {"timestamp": 1500, "input_length": 512, "output_length": 7, "hash_ids": [7]},
]
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,8\n"
)
SERVEGEN_TRACE = "0,0,0,,0,0\n600,2.0,1.0,Gamma,1,0.5\n1200,1.0,2.0,Weibull,0.5,1\n"
SERVEGEN_LENGTHS = json.dumps({
    "0": {"input_tokens": "{}", "output_tokens": "{}", "reason_ratio": "{}"},
    "600": {"input_tokens": "{10: 0.5, 20: 0.5}", "output_tokens": "{3: 1.0}", "reason_ratio": "{}"},
})


def _mooncake(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _servegen(folder: Path, trace: str = SERVEGEN_TRACE, lengths: str = SERVEGEN_LENGTHS) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "chunk-3-trace.csv").write_text(trace)
    (folder / "chunk-3-dataset.json").write_text(lengths)
    return folder


def test_mooncake(tmp_path: Path) -> None:
    path = _mooncake(tmp_path / "trace.jsonl", MOONCAKE)
    requests = read_trace(path)
    assert [(one.arrival_s, one.prompt_tokens, one.output_tokens, one.prefix) for one in requests] == [
        (0.0, 1000, 5, (7, 8)), (1.0, 513, 6, (7, 9)), (1.0, 512, 7, (7,)),
    ]
    packed = tmp_path / "trace.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert read_trace(packed) == requests
    assert [one.output_tokens for one in read_trace(path, most=1, skip=1)] == [6]


def test_azure(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    first, second = read_trace(path)
    assert (first.arrival_s, first.prompt_tokens, first.output_tokens) == (0.0, 4808, 10)
    assert second.arrival_s == pytest.approx(0.052)
    assert second.prefix == ()


def test_requests_that_are_not_in_order_and_marks_of_editors(tmp_path: Path) -> None:
    header, first, second = AZURE.splitlines()
    path = tmp_path / "azure.csv"
    path.write_text("\ufeff" + "\n".join([header, second, "", first]), encoding="utf-8")
    assert [one.prompt_tokens for one in read_trace(path)] == [4808, 3180]
    path.write_text(AZURE.replace(",4808", "+01:00,4808").replace(",3180", "+00:00,3180"))
    assert read_trace(path)[1].arrival_s == pytest.approx(3600.052)
    lines = _mooncake(tmp_path / "t.jsonl", MOONCAKE[::-1])
    lines.write_text("\ufeff\n" + lines.read_text(), encoding="utf-8")
    assert [(one.arrival_s, one.prompt_tokens) for one in read_trace(lines)] == [(0.0, 1000), (1.0, 512), (1.0, 513)]


def test_servegen_draws_from_its_windows(tmp_path: Path) -> None:
    folder = _servegen(tmp_path / "clients")
    requests = read_trace(folder, seed=1)
    assert {one.prompt_tokens for one in requests} == {10, 20}
    assert {one.output_tokens for one in requests} == {3}
    assert len(requests) == pytest.approx(2.0 * 600 + 1.0 * 600, rel=0.2)
    assert requests[-1].arrival_s < 1200  # the first window is silent, the last one as long as the others
    assert read_trace(folder, seed=1, most=5) == requests[:5]
    assert read_trace(folder, seed=2) != requests
    archive = tmp_path / "clients.tar.xz"
    with tarfile.open(archive, "w:xz") as tar:
        tar.add(folder, "data/clients")
    assert read_trace(archive, seed=1) == requests


@pytest.mark.parametrize(("change", "said"), [
    ({"input_length": "1000"}, "no whole number"),
    ({"input_length": -1, "hash_ids": []}, "prompt of -1 tokens"),
    ({"hash_ids": [1]}, "1 hash_ids for 1000 tokens"),
    ({"hash_ids": 3}, "request 1"),
    ({"timestamp": "x"}, "could not convert"),
    ({"timestamp": float("nan")}, "arrival at nan"),
    ({"output_length": True}, "no whole number"),
])
def test_broken_mooncake_is_refused_with_its_place(tmp_path: Path, change: dict[str, object], said: str) -> None:
    path = _mooncake(tmp_path / "t.jsonl", [MOONCAKE[0] | change])
    with pytest.raises(InvalidArgument, match="request 1") as caught:
        read_trace(path, "mooncake")
    assert said in caught.value.message


@pytest.mark.parametrize(("text", "said"), [
    ('{"timestamp": 1}\n', "KeyError"),
    ('{"timestamp": 1\n', "JSONDecodeError"),
    ("[1]\n", "it begins with '[1]"),
    ("", "it begins with ''"),
    (AZURE.replace("4808", "many"), "request 1"),
    (AZURE.replace("4808", "-5"), "prompt of -5 tokens"),
    (AZURE.replace(",8\n", "\n"), "request 2"),
    (AZURE.replace("2023-11-16 18:17:04", "yesterday"), "request 2"),
    (AZURE.splitlines()[0] + "\n", "holds no request"),
    ("TIMESTAMP,Tokens\n", "columns"),
])
def test_broken_files_are_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(InvalidArgument) as caught:
        read_trace(path)
    assert said in caught.value.message


def test_bytes_that_are_no_text_or_no_gzip_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidArgument, match="cannot be read"):
        read_trace(path)
    packed = tmp_path / "trace.jsonl.gz"
    packed.write_bytes(b"no gzip")
    with pytest.raises(InvalidArgument, match="cannot be read"):
        read_trace(packed)
    packed.write_bytes(gzip.compress(b'{"timestamp": 1}\n' * 1000)[:-20])
    with pytest.raises(InvalidArgument):
        read_trace(packed)
    with pytest.raises(NotFound, match="no trace"):
        read_trace(tmp_path / "nothing")


@pytest.mark.parametrize(("trace", "lengths", "said"), [
    ("600,1\n", SERVEGEN_LENGTHS, "columns"),
    ("600,x,1,Gamma,1,1\n", SERVEGEN_LENGTHS, "chunk-3-trace.csv"),
    ("600,nan,1,Gamma,1,1\n", SERVEGEN_LENGTHS, "rate nan"),
    ("600,1,1,G,1,1\n0,1,1,G,1,1\n", SERVEGEN_LENGTHS, "not in order"),
    (SERVEGEN_TRACE, "[", "chunk-3-dataset.json"),
    (SERVEGEN_TRACE, '{"0": {}}', "KeyError"),
    (SERVEGEN_TRACE, json.dumps({"0": {"input_tokens": "print(1)", "output_tokens": "{1: 1}"}}), "ValueError"),
    (SERVEGEN_TRACE, json.dumps({"0": {"input_tokens": "{-4: 1}", "output_tokens": "{1: 1}"}}), "no request has"),
    (SERVEGEN_TRACE, json.dumps({"0": {"input_tokens": "{1e999: 1}", "output_tokens": "{1: 1}"}}), "OverflowError"),
    (SERVEGEN_TRACE, json.dumps({"0": {"input_tokens": "{4: 1e999}", "output_tokens": "{1: 1}"}}), "probability"),
    (SERVEGEN_TRACE, json.dumps({"0": {"input_tokens": "{4: -1}", "output_tokens": "{1: 1}"}}), "probability"),
    (SERVEGEN_TRACE, json.dumps({"0": {"input_tokens": "-" * 100_000 + "1", "output_tokens": ""}}), "is broken"),
    ("0,1,1,G,1,1\ninf,1,1,G,1,1\n", SERVEGEN_LENGTHS, "no time"),
    ("nan,1,1,G,1,1\n", SERVEGEN_LENGTHS, "no time"),
])
def test_broken_servegen_is_refused_by_file(tmp_path: Path, trace: str, lengths: str, said: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        read_trace(_servegen(tmp_path / "clients", trace, lengths))
    assert said in caught.value.message


def test_servegen_with_half_a_client_or_none_is_refused(tmp_path: Path) -> None:
    folder = _servegen(tmp_path / "clients")
    (folder / "chunk-3-dataset.json").unlink()
    with pytest.raises(InvalidArgument, match="client 3 has only"):
        read_trace(folder)
    (folder / "chunk-3-trace.csv").unlink()
    with pytest.raises(InvalidArgument, match="there is no chunk-N"):
        read_trace(folder)
    archive = tmp_path / "broken.tar.xz"
    archive.write_bytes(io.BytesIO(b"no archive").getvalue())
    with pytest.raises(InvalidArgument, match="cannot be read"):
        read_trace(archive)


def test_an_archive_that_is_broken_inside_is_refused(tmp_path: Path) -> None:
    archive = tmp_path / "clients.tar.xz"
    with tarfile.open(archive, "w:xz") as tar:
        for number in range(3):
            noise = random.Random(number).randbytes(100_000)
            info = tarfile.TarInfo(f"chunk-{number}-trace.csv")
            info.size = len(noise)
            tar.addfile(info, io.BytesIO(noise))
    whole = bytearray(archive.read_bytes())
    whole[len(whole) // 2 : len(whole) // 2 + 64] = bytes(64)
    archive.write_bytes(whole)
    with pytest.raises(InvalidArgument, match="cannot be read"):
        read_trace(archive)


def test_requests_of_no_length_have_one_token(tmp_path: Path) -> None:
    path = _mooncake(tmp_path / "t.jsonl", [MOONCAKE[0] | {"input_length": 0, "output_length": 0, "hash_ids": []}])
    [request] = build_load(LoadPlan(trace=path, num_requests=1), 4096).requests
    assert (request.prompt_tokens, request.output_tokens) == (1, 1)


def test_a_moment_has_no_rate(tmp_path: Path) -> None:
    """It was said to be one a second, and a rate that was asked for was not kept."""
    path = _mooncake(tmp_path / "t.jsonl", [row | {"timestamp": 7} for row in MOONCAKE])
    load = build_load(LoadPlan(trace=path, num_requests=3), 4096)
    assert load.description["rate_per_s"] is None
    with pytest.raises(InvalidArgument, match="at one moment"):
        build_load(LoadPlan(trace=path, num_requests=3, rate_per_s=2.0), 4096)
    spread = build_load(LoadPlan(trace=path, num_requests=3, rate_per_s=2.0, variation=0.0), 4096)
    assert [one.arrival_s for one in spread.requests] == [0.0, 0.5, 1.0]
    alone = build_load(LoadPlan(trace=path, num_requests=1, rate_per_s=2.0), 4096)
    assert alone.requests[0].arrival_s == 0


def test_formats_are_told_apart(tmp_path: Path) -> None:
    azure = tmp_path / "a"
    azure.write_text(AZURE)
    assert guess_format(azure) == "azure"
    assert guess_format(_mooncake(tmp_path / "m", MOONCAKE)) == "mooncake"
    assert guess_format(tmp_path) == "servegen"


def test_scaled_prompts_share_what_the_trace_shares(tmp_path: Path) -> None:
    requests = scale_lengths(read_trace(_mooncake(tmp_path / "m", MOONCAKE)), 0.1, 4096).requests
    assert [(one.prompt_tokens, one.output_tokens, one.block_tokens) for one in requests] == [
        (100, 1, 51), (51, 1, 51), (51, 1, 51),
    ]
    maker = PromptMaker(vocab_size=4096)
    prompts = [maker.token_ids(one, number) for number, one in enumerate(requests)]
    assert [len(one) for one in prompts] == [100, 51, 51]
    assert prompts[0][:51] == prompts[1] == prompts[2]
    assert {0} == {one[0] for one in prompts}
    assert all(512 <= token < 3072 for one in prompts for token in one[1:])
    assert PromptMaker(vocab_size=4096, salt="x").token_ids(requests[0], 0)[1:] != prompts[0][1:]


def test_prompts_without_prefixes_differ() -> None:
    maker = PromptMaker(vocab_size=4096, bos=None)
    request = TracedRequest(arrival_s=0, prompt_tokens=40, output_tokens=1)
    assert maker.token_ids(request, 0) != maker.token_ids(request, 1)
    assert maker.token_ids(request, 1) == maker.token_ids(request, 1)


def test_what_does_not_fit_is_clipped_and_counted() -> None:
    requests = [TracedRequest(arrival_s=0, prompt_tokens=tokens, output_tokens=10) for tokens in (10, 90, 91, 500)]
    clipped = scale_lengths(requests, 1.0, 100)
    assert [one.prompt_tokens for one in clipped.requests] == [10, 90, 90, 90]
    assert clipped.num_clipped == 2
    longest = scale_lengths([TracedRequest(arrival_s=0, prompt_tokens=5, output_tokens=1000)], 1.0, 100)
    assert [(one.prompt_tokens, one.output_tokens) for one in longest.requests] == [(1, 99)]
    assert fitting_scale(requests, 255) == 0.5
    assert fitting_scale(requests, 10_000) == 1.0


def test_rates_scale_and_patterns_stay() -> None:
    requests = [TracedRequest(arrival_s=at, prompt_tokens=1, output_tokens=1) for at in (0.0, 1.0, 4.0)]
    assert [one.arrival_s for one in scale_rate(requests, 2.0)] == [0.0, 0.25, 1.0]
    assert [one.arrival_s for one in scale_rate(requests[:1], 2.0)] == [0.0]


@pytest.mark.parametrize(("variation", "family"), [(0.0, "gamma"), (1.0, "gamma"), (3.0, "gamma"), (2.0, "weibull")])
def test_gaps_have_the_rate_and_the_variation(variation: float, family: str) -> None:
    times = list(islice(renewal(4.0, variation, random.Random(5), family=family), 40_000))
    gaps = [after - before for before, after in pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.05)
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(variation, rel=0.1, abs=1e-6)


def test_weibull_shape_of_poisson_is_one() -> None:
    assert weibull_shape(1.0) == pytest.approx(1.0)


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_have_their_median_and_share_their_beginning(kind: str) -> None:
    requests = draw([kind], range(2000), seed=3)
    assert statistics.median(one.prompt_tokens for one in requests) == pytest.approx(KINDS[kind].prompt_median, rel=0.1)
    assert statistics.median(one.output_tokens for one in requests) == pytest.approx(KINDS[kind].output_median, rel=0.1)
    long = [one for one in requests if one.prompt_tokens > 2 * KINDS[kind].shared_tokens]
    assert len({one.prefix[0] for one in long}) == KINDS[kind].num_shared
    assert len({one.prefix[-1] for one in long}) == len(long)


def test_load_is_what_was_asked_for(tmp_path: Path) -> None:
    path = _mooncake(tmp_path / "m", MOONCAKE)
    load = build_load(LoadPlan(trace=path, num_requests=3, rate_per_s=4.0), 4096)
    assert [one.arrival_s for one in load.requests] == [0.0, 0.5, 0.5]
    assert load.description["arrivals"] == "the trace's, rescaled"
    assert load.description["shared_block_share"] == pytest.approx(1 - 3 / 5)
    bursty = build_load(LoadPlan(trace=path, num_requests=3, variation=2.0), 4096)
    assert bursty.requests[0].arrival_s == 0
    assert bursty.requests[1].arrival_s not in (0.0, 1.0)
    closed = build_load(LoadPlan(kinds=("short", "reasoning"), num_requests=50, concurrency=4), 4096)
    assert (closed.description["loop"], closed.description["arrivals"]) == ("closed", None)
    assert {one.kind for one in closed.requests} == {"short", "reasoning"}


@pytest.mark.parametrize(("fields", "said"), [
    ({"trace": Path("x"), "kinds": ("short",)}, "not both"),
    ({"kinds": ("long",)}, "short, documents, reasoning"),
    ({"concurrency": 2, "rate_per_s": 1.0}, "closed loop"),
    ({"skip": 3}, "of a --trace"),
    ({"trace_format": "azure"}, "of a --trace"),
])
def test_loads_that_make_no_sense_are_refused(fields: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        build_load(LoadPlan(num_requests=1, **fields), 4096)  # type: ignore[arg-type]
