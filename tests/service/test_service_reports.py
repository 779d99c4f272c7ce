"""A worker's reports go on where it may open no more files."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from pd_engine.contracts import worker_pb2 as pb
from pd_engine.service.identity import rss_bytes
from pd_engine.service.loads import stream_loads


@contextmanager
def no_more_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def sample() -> pb.LoadsReply:
    return pb.LoadsReply(num_running=3, rss_bytes=rss_bytes())


def details() -> pb.LoadsReply:
    return pb.LoadsReply(state=Path("/proc/self/status").read_text())


def test_what_is_resident() -> None:
    assert abs(rss_bytes() - psutil.Process().memory_info().rss) < 64 << 20


async def test_a_report_without_details_where_no_file_can_be_opened() -> None:
    sample()
    reports = stream_loads(pb.LoadsRequest(interval_ms=20), sample, details)
    with no_more_files():
        report = await anext(reports)
    assert report.num_running == 3
    assert report.rss_bytes > 0
    assert not report.state
