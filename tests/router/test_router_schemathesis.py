"""schemathesis, a public fuzzer, makes requests of what the HTTP door publishes of itself, right and wrong, and
holds the answers against it."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from pathlib import Path

from support.router_lab import PROMPT, router_lab, settings
from support.toy_model import toy_generate

# Not every request that the schema allows is a right one: a prompt may be longer than the context.
UNFIT = "positive_data_acceptance"


async def test_requests_that_a_public_fuzzer_makes(tmp_path: Path) -> None:
    """What it finds it prints."""
    async with router_lab(settings(router={"max_running_requests": 16})) as lab:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "schemathesis.cli", "run", f"{lab.http.base_url}/openapi.json",
            "--phases", "examples,fuzzing", "--max-examples", "5", "--exclude-checks", UNFIT, "--seed", "1",
            "--request-timeout", "60", "--suppress-health-check", "all", "--generation-database", "none",
            "--warnings", "off", "--no-color",
            cwd=tmp_path, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT,
        )
        try:
            output, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
        assert process.returncode == 0, output.decode()
        await lab.assert_no_leaks()
        assert [link.state.value for link in lab.router._registry.links()] == ["ready", "ready"]
        assert list((await lab.generate()).output_ids) == toy_generate(PROMPT, 8)
