"""A real vLLM server (CPU, two ranks) with WeightSync's back end, and a trainer that takes it for one of vLLM's own.

One server on a small checkpoint: half a minute on an idle machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import LIMIT, ROOT
from gloo_plane import post
from local_documents import free_port
from test_vllm_plane import ENVIRONMENT, START, healthy

METADATA = "Metadata-Version: 2.1\nName: weightsync\nVersion: 0\n"
ENTRY_POINT = "[vllm.general_plugins]\nweightsync = weightsync.vllm:register\n"
NCCL = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 3, "packed": True}
"""What TRL 1.16 and vLLM's own `nccl` trainer give."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The server's URL."""
    make = [sys.executable, ROOT / "tests/engine/make_checkpoint.py", tmp_path, "--seed", "1", "2"]
    subprocess.run(make, check=True, timeout=LIMIT)
    installed = tmp_path / "packages" / "weightsync-0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text(METADATA)
    (installed / "entry_points.txt").write_text(ENTRY_POINT)
    port = free_port()
    serve = [str(Path(sys.executable).with_name("vllm")), "serve", str(tmp_path / "1"), "--host", "127.0.0.1", "--port", str(port)]
    # In bfloat16 a worker of vLLM 0.32 dies by an illegal instruction in its attention, on a processor with AMX.
    serve += ["--dtype", "float32", "--enforce-eager", "--max-num-seqs", "2", "--max-model-len", "256", "--tensor-parallel-size", "2"]
    serve += ["--num-gpu-blocks-override", "64", "--weight-transfer-config", json.dumps({"backend": "weightsync"})]
    environment = {**os.environ, **ENVIRONMENT}
    environment["PYTHONPATH"] += f":{installed.parent}"
    with open(tmp_path / "vllm.log", "wb") as log:
        process = subprocess.Popen(serve, stdout=log, stderr=log, env=environment, start_new_session=True)
    try:
        deadline = time.monotonic() + START
        while not healthy(port):
            assert process.poll() is None, (tmp_path / "vllm.log").read_text()[-4000:]
            assert time.monotonic() < deadline, "vLLM did not start"
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(LIMIT)


def answered(url: str, init_info: dict[str, Any]) -> tuple[int, str]:
    """Status and text."""
    try:
        return 200, json.dumps(post(url, "/init_weight_transfer_engine", {"init_info": init_info}))
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_anothers_init_is_refused_and_replies_stay_in_step(server: str) -> None:
    for init_info in (NCCL, {"packed": True}, {}):
        status, text = answered(server, init_info)
        assert status != 200, text
        assert "takes weights from a WeightSync agent" in text
        # The next call's replies are its own, of both ranks.
        ranks = post(server, "/collective_rpc", {"method": "get_kv_connector_handshake_metadata"})
        assert ranks == {"results": [None, None]}
    # The words of random weights are no promise: what counts is that both ranks made both tokens.
    body = {"model": f"{server}", "prompt": "The quick", "max_tokens": 2, "ignore_eos": True}
    with urllib.request.urlopen(f"{server}/v1/models", timeout=LIMIT) as models:
        body["model"] = json.load(models)["data"][0]["id"]
    assert post(server, "/v1/completions", body)["usage"]["completion_tokens"] == 2
