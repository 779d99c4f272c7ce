"""The page at /ui: whole in itself, open to all but without data, and every field that it reads is told.

No browser runs it here: what is checked is the page's text and its data.
"""

from __future__ import annotations

import json
import os
import re
import threading
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pd_engine.contracts import worker_pb2 as pb
from pd_router import live
from pd_router.live import NUM_PAST, LivePast
from pd_router.openai import UI_PAGE
from support.router_lab import eventually, router_lab, settings

PAGE = UI_PAGE.read_text(encoding="utf-8")


async def test_the_page_and_its_data() -> None:
    async with router_lab(num_decode=2) as lab:
        lab.decode[0].loads = {
            "stages": [pb.StageTime(stage="experts", seconds=0.5)], "watched_seconds": 0.75, "num_blocks_free": 1,
            "num_blocks_total": 4, "experts": [pb.ExpertTokens(tokens=[3, 1]), pb.ExpertTokens(tokens=[0, 0])],
        }
        link = lab.router._registry.link("decode-0")
        assert link is not None
        await eventually(lambda: bool(link.load.experts) and link.loads is not None)
        page = await lab.http.get("/ui")
        assert page.text == PAGE
        assert "default-src 'none'" in page.headers["content-security-policy"]
        data = (await lab.http.get("/ui/data")).json()
        past = (await lab.http.get("/ui/past")).json()
    assert (data["model"], data["requests_running"], data["requests_waiting"]) == ("demo", 0, 0)
    assert [worker["id"] for worker in data["workers"]] == ["prefill-0", "decode-0", "decode-1"]
    worker = data["workers"][1]
    assert (worker["state"], worker["blocks"], worker["blocks_free"]) == ("ready", 4, 1)
    assert worker["stage_seconds"] == {"experts": 0.5}
    assert data["router_stage_seconds"] == {"tokenize": 0, "streaming": 0}
    assert data["expert_max_over_mean"] == {"prefill": [], "decode": [1.5, None]}
    assert past[0].keys() == data.keys(), "from the router's beginning on"
    assert past[0]["clock_s"] < data["clock_s"]
    assert (data["handoffs_total"], data["handoff_bytes_total"]) == (0, 0)
    read = set(re.findall(r'\bgrown\(live, "([a-z_]+)"', PAGE))
    read |= set(re.findall(r"\bw\.([a-z_]+)", PAGE)) | set(re.findall(r"\blive\.([a-z_]+)", PAGE))
    listed = re.search(r"const COUNTS = \[([^\]]*)\]", PAGE)
    assert listed is not None
    read |= set(re.findall(r"[a-z_]+", listed[1])) | set(re.findall(r'\bsum\("([a-z_]+)"\)', PAGE))
    assert len(read) > 15
    assert read <= data.keys() | worker.keys(), "the page reads what nobody tells"


def test_the_page_needs_nothing_else() -> None:
    addresses = set(re.findall(r"https?://[^\"' ]+", PAGE))
    assert addresses == {"http://www.w3.org/2000/svg"}, "a namespace, and nothing that is fetched"
    assert not re.search(r"<(link|img|iframe|script src)", PAGE)
    assert "innerHTML" not in PAGE, "ids of workers are text"
    ids = set(re.findall(r'at\("([a-z]+)"\)', PAGE))
    assert ids == set(re.findall(r'\bid="([a-z]+)"', PAGE)), "every element is used, and is there"


async def test_with_keys_the_page_is_open_and_its_data_are_not(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text('{"keys": [{"name": "a", "sha256": "' + "ab" * 32 + '"}]}')
    async with router_lab(settings(router={"api_keys": str(keys)})) as lab:
        assert (await lab.http.get("/ui")).status_code == 200
        assert (await lab.http.get("/ui/data")).status_code == 401
        assert (await lab.http.get("/ui/past")).status_code == 401


async def test_the_past_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = iter(range(10**6))
    view: Any = SimpleNamespace(document=lambda: {"number": next(documents), "noise": os.urandom(1000).hex()})
    past = LivePast(view)
    assert await past.text() == b"[]"
    for _ in range(NUM_PAST + 5):
        past.look()
    numbers = [one["number"] for one in json.loads(await past.text())]
    assert numbers == list(range(5, NUM_PAST + 5))
    monkeypatch.setattr(live, "MAX_PAST_BYTES", 10_000)
    past.look()
    assert 1 <= len(json.loads(await past.text())) < 10


async def test_the_past_is_unpacked_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    monkeypatch.setattr(live, "zlib", SimpleNamespace(
        compress=zlib.compress, decompress=lambda data: threads.append(threading.get_ident()) or zlib.decompress(data),
    ))
    view: Any = SimpleNamespace(document=lambda: {"number": 1})
    past = LivePast(view)
    past.look()
    assert json.loads(await past.text()) == [{"number": 1}]
    assert len(threads) == 1 and threads[0] != threading.get_ident()
