"""What is compared: each is started for its turn, with two servers on two cores, and ended after it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from pd_engine.errors import Unavailable
from pd_engine.settings import load_settings
from pd_ops.bench.harness import Seat, log_tail, running
from pd_ops.bench.identity import installed
from pd_ops.bench.measured_process import Document
from pd_ops.bench.serve.http_sender import Endpoint, get_json

START_TIMEOUT_S = 1800.0  # vLLM compiles
END_TIMEOUT_S = 20.0
POLL_S = 0.5
MAX_BATCH = 64
NIXL_CONFIG = '{"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}'
VLLM_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
}


class System(Enum):
    """`value` names its folder."""

    PD_RELAY = "pd-relay"             # one prefill and one decode worker
    ONE_POOL = "pd-relay-one-pool"    # two workers that each read and continue prompts
    VLLM = "vllm-nixl"                # vLLM's CPU build, one prefill and one decode server, NIXL, vllm-router


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """What all systems share.

    Attributes:
        model: the checkpoint's folder.
        cores: of our two workers. vLLM's servers, of two processes each, run on any, as do routers.
        peers_python: of the environment that has vLLM, NIXL and vllm-router.
    """

    model: Path
    dtype: str
    max_context: int
    cores: tuple[int, int]
    peers_python: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """`flags`: of `bench serve`: where it is, and its identity."""

    url: str
    flags: tuple[str, ...]


@asynccontextmanager
async def serving(system: System, stage: Stage, log_directory: Path) -> AsyncIterator[Serving]:
    """Ready; every process of it has ended with the context.

    Raises:
        Unavailable: it did not start.
    """
    if system is System.VLLM:
        async with _vllm(stage, log_directory) as url:
            versions = await _versions(stage.peers_python)
            yield _described(stage, url, f"vllm-cpu {versions['vllm-cpu']}, vllm-router {versions['vllm-router']}, "
                             f"NIXL {versions['nixl']}", {"prefill": 1, "decode": 1}, {"max_num_seqs": MAX_BATCH})
        return
    roles = ("prefill", "decode") if system is System.PD_RELAY else ("decode", "decode")
    settings = load_settings(None, {
        "model": str(stage.model), "engine.dtype": stage.dtype, "engine.cache_mib": 512, "decode.max_batch": MAX_BATCH,
        "router.grpc_port": 0, "router.http_port": 0,
    })
    seats = [Seat(role=role, core=core) for role, core in zip(roles, stage.cores, strict=True)]
    async with running(settings, log_directory, seats) as doors:
        topology = {role: roles.count(role) for role in sorted(set(roles))}
        yield _described(stage, f"http://{doors['http']}", f"pd-relay {installed('pd-relay')}", topology,
                         {"max_batch": MAX_BATCH, "cache_mib": 512})


def _described(
    stage: Stage, url: str, engine: str, topology: Mapping[str, int], settings: Mapping[str, int]
) -> Serving:
    pairs = [*(f"{name}={count}" for name, count in topology.items()), "cores=2"]
    return Serving(url=url, flags=(
        "--url", url, "--checkpoint", str(stage.model), "--engine", engine, "--precision", stage.dtype,
        "--max-context", str(stage.max_context), *(word for pair in pairs for word in ("--topology", pair)),
        *(word for name, value in settings.items() for word in ("--engine-setting", f"{name}={value}")),
    ))


@asynccontextmanager
async def _vllm(stage: Stage, log_directory: Path) -> AsyncIterator[str]:
    python = stage.peers_python
    async with AsyncExitStack() as stack:
        servers: list[tuple[str, Path, asyncio.subprocess.Process]] = []
        for name in ("prefill", "decode"):
            port, side_port, log = free_port(), free_port(), log_directory / f"vllm-{name}.log"
            process = await stack.enter_async_context(_server(
                [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(stage.model),
                 "--served-model-name", "model", "--dtype", VLLM_DTYPES[stage.dtype], "--host", "127.0.0.1",
                 "--port", str(port), "--max-model-len", str(stage.max_context), "--max-num-seqs", str(MAX_BATCH),
                 "--kv-transfer-config", NIXL_CONFIG],
                log, {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port)},
            ))
            servers.append((f"http://127.0.0.1:{port}", log, process))
        for server in servers:
            await _until_ready(*server)
        port, log = free_port(), log_directory / "vllm-router.log"
        process = await stack.enter_async_context(_server(
            [str(python.parent / "vllm-router"), "--vllm-pd-disaggregation", "--prefill", servers[0][0], "--decode",
             servers[1][0], "--policy", "round_robin", "--host", "127.0.0.1", "--port", str(port), "--log-level",
             "warning", "--prometheus-port", str(free_port()), "--worker-startup-check-interval", "1"],
            log, {},
        ))
        url = f"http://127.0.0.1:{port}"
        await _until_ready(url, log, process)
        yield url


@asynccontextmanager
async def _server(
    command: Sequence[str], log: Path, more: Mapping[str, str]
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Running, in a process group of its own, which is gone afterwards."""
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
            env={**os.environ, **VLLM_ENVIRONMENT, **more},
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_TIMEOUT_S):
                await process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def _until_ready(url: str, log: Path, process: asyncio.subprocess.Process) -> None:
    """Raises:
    Unavailable: it ended, or lists no model within `START_TIMEOUT_S`.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(START_TIMEOUT_S):
            while process.returncode is None:
                with contextlib.suppress(Unavailable):
                    await get_json(Endpoint.parse(url), "/v1/models")
                    return
                await asyncio.sleep(POLL_S)
    raise Unavailable(f"{log.stem} did not start: {log_tail(log)}")


async def _versions(python: Path) -> Document:
    """Of what is compared with, as installed there."""
    names = ("vllm-cpu", "vllm-router", "nixl")
    code = f"import importlib.metadata as m; print(*(m.version(name) for name in {names!r}))"
    process = await asyncio.create_subprocess_exec(str(python), "-c", code, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    if process.returncode:
        raise Unavailable(f"{python} lacks one of {', '.join(names)}: ops/peers/setup.sh DIR vllm-pd installs them")
    return dict(zip(names, out.decode().split(), strict=True))


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
