"""Asks a router one request after the other until its standard input ends; prints how many, and how many failed.

    python -m support.lab_client ADDRESS
"""

from __future__ import annotations

import asyncio
import json
import sys

from pd_engine.errors import PdRelayError
from pd_engine.text.defaults import SamplingFields
from pd_ops.client import router_client
from pd_ops.request_options import TokensPrompt, to_request

NUM_CLIENTS = 3


async def ask(address: str, stop: asyncio.Event, counts: dict[str, int], first: int) -> None:
    number = first
    async with router_client(address) as client:
        while not stop.is_set():
            number += NUM_CLIENTS
            prompt = TokensPrompt(token_ids=tuple(5 + (number * 7 + place) % 900 for place in range(100)))
            sampling = SamplingFields(temperature=0.8, seed=number, max_tokens=64, ignore_eos=True, logprobs=0)
            counts["requests"] += 1
            try:
                await client.complete(to_request(prompt, sampling))
            except PdRelayError as error:
                counts["failed"] += 1
                print(error.message, file=sys.stderr)


async def main(address: str) -> None:
    stop, counts = asyncio.Event(), {"requests": 0, "failed": 0}
    clients = [asyncio.create_task(ask(address, stop, counts, first)) for first in range(NUM_CLIENTS)]
    await asyncio.to_thread(sys.stdin.read)
    stop.set()
    await asyncio.gather(*clients)
    print(json.dumps(counts))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
