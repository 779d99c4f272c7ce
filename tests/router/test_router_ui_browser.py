"""The page at /ui in a real browser, where there is one: headless Chromium, which draws it and says what it drew."""

from __future__ import annotations

import asyncio
import re
import shutil
from pathlib import Path

import pytest

from pd_engine.contracts import worker_pb2 as pb
from support.router_lab import eventually, router_lab, settings

BROWSER = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), "")
LOOKS_MS = 5_000  # of the page's own clock, which goes as fast as the router answers
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not BROWSER, reason="NO BROWSER, so the page at /ui is not drawn: there is no chromium here"),
]


async def drawn(address: str, profile: Path) -> tuple[str, str]:
    """(the page's elements after some looks, what its console said)."""
    process = await asyncio.create_subprocess_exec(
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
        f"--user-data-dir={profile}", f"--virtual-time-budget={LOOKS_MS}", "--enable-logging=stderr", "--dump-dom",
        f"http://{address}/ui", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )
    dom, said = await asyncio.wait_for(process.communicate(), 120)
    return dom.decode(), "\n".join(line for line in said.decode().splitlines() if "CONSOLE" in line)


def cells(dom: str) -> list[list[str]]:
    """The texts of the table's rows."""
    body = dom[dom.index('<tbody id="workers">') : dom.index("</tbody>")]
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in body.split("<tr")[1:]]
    return [[re.sub(r"<[^>]*>", "", text) for text in row] for row in rows]


async def test_the_page_is_drawn(tmp_path: Path) -> None:
    async with router_lab(num_decode=2) as lab:
        lab.decode[0].loads = {
            "stages": [pb.StageTime(stage="experts", seconds=0.5)], "watched_seconds": 1.0, "num_blocks_free": 1,
            "num_blocks_total": 4, "experts": [pb.ExpertTokens(tokens=[3, 1])],
        }
        link = lab.router._registry.link("decode-0")
        assert link is not None
        await eventually(lambda: bool(link.load.experts) and link.loads is not None)
        dom, console = await drawn(str(lab.http.base_url).removeprefix("http://"), tmp_path)
    assert console == "", "no error, and nothing that the page's policy refuses"
    assert '<p id="error"></p>' in dom
    rows = cells(dom)
    assert [row[0] for row in rows] == ["prefill", "prefill-0", "decode", "decode-0", "decode-1"]
    assert {len(row) for row in rows} == {dom[: dom.index("</thead>")].count("<th") - 1}, "a cell for each heading"
    assert rows[3][1:3] == ["ready", "75 % of 4"]
    assert rows[2][1] == "2 of 2"
    stages = dom[dom.index('<div id="stages">') : dom.index("<h2>Busiest")]
    assert re.findall(r"<span>([^<]*)</span>", stages) == ["router", "decode pool", "decode-0"]
    assert stages.count(">experts 50 %<") == 2
    assert '<b id="handoffs">0.0</b>' in dom
    assert re.search(r'<p id="experts">decode: 1.50</p>', dom)
    assert len(re.findall(r'<svg viewBox="0 0 300 40"[^>]*><polyline', dom)) >= 5, "pools and workers have a history"
    [history] = re.findall(r'<svg id="line"[^>]*><polyline points="([^"]*)"', dom)
    assert len(history.split()) > 2, "it has looked more than once"


async def test_where_keys_are_needed_it_asks_for_one(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text('{"keys": [{"name": "a", "sha256": "' + "ab" * 32 + '"}]}')
    async with router_lab(settings(router={"api_keys": str(keys)})) as lab:
        dom, _ = await drawn(str(lab.http.base_url).removeprefix("http://"), tmp_path / "profile")
    assert "this router needs an API key" in dom
    assert not re.search(r'<form id="login"[^>]*hidden', dom)
