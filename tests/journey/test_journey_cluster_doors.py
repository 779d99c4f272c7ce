"""A cluster with certificates and keys, as `pd-relay serve` starts it: who has both is served, nobody else."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import httpx
import psutil
import pytest

from support.certificates import Files
from support.commands import Serving, run_command

pytestmark = pytest.mark.cluster

KEY = "sk-a-key-of-this-test"
ASKED = (
    "--token-ids", "0,17,300", "--max-tokens", "8", "--seed", "5", "--temperature", "0.7", "--ignore-eos", "--json",
)
BODY = {"prompt": [0, 17, 300], "max_tokens": 8, "seed": 5, "temperature": 0.7, "ignore_eos": True}


def test_mutual_tls_and_keys_at_both_doors(tmp_path: Path) -> None:
    files = Files(tmp_path)
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"keys": [{"name": "a", "sha256": hashlib.sha256(KEY.encode()).hexdigest()}]}))
    config = tmp_path / "settings.yaml"  # JSON is YAML
    config.write_text(json.dumps({"router": {**files.router(mutual=True), "api_keys": str(keys)}}))
    certificates = {
        "PD_RELAY_TLS_CA": files.ca, "PD_RELAY_TLS_CERT": files.client_cert, "PD_RELAY_TLS_KEY": files.client_key,
    }
    state = {"PD_RELAY_STATE_DIR": str(tmp_path / "state")}
    serving = Serving(
        "--cluster", "doors", "--grpc-port", "0", "--http-port", "0", "--config", str(config),
        state_directory=tmp_path / "state", log=tmp_path / "serve.log",
    )
    try:
        ready = serving.event()
        assert ready["event"] == "ready"
        processes = psutil.Process(ready["pid"]).children(recursive=True)
        served = run_command("submit", "--cluster", "doors", *ASKED, **state, **certificates, PD_RELAY_API_KEY=KEY)
        assert served.code == 0, served.stderr
        alone = run_command("generate", *ASKED)
        assert served.document["token_ids"] == alone.document["token_ids"]
        for wrong in ({}, certificates, {**certificates, "PD_RELAY_API_KEY": "another"}, {"PD_RELAY_API_KEY": KEY}):
            refused = run_command("submit", "--cluster", "doors", *ASKED, **state, **wrong)
            assert refused.code != 0, wrong
            assert len(refused.error_lines) == 1, refused.stderr
        url = f"https://{ready['http_address']}/v1/completions"
        bearer = {"authorization": f"Bearer {KEY}"}
        with httpx.Client(verify=files.ssl_context(files.client_cert, files.client_key), timeout=60) as client:
            [choice] = client.post(url, json=BODY, headers=bearer).json()["choices"]
            assert choice["text"] == alone.document["text"]
            assert client.post(url, json=BODY).status_code == 401
        with httpx.Client(verify=files.ssl_context()) as client, pytest.raises(httpx.HTTPError):
            client.post(url, json=BODY, headers=bearer)
        assert run_command("stop", "--cluster", "doors", **state).code == 0
        serving.rest()
        assert psutil.wait_procs(processes, timeout=60)[1] == []
    finally:
        serving.close()
