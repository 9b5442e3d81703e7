"""The admin address that prime-rl calls: what it publishes, and after which answers prime-rl repeats its call (5xx alone)."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import LIMIT, Agent
from safetensors.torch import load_file, save_file

import weightsync
from weightsync.integrations.prime_rl import LONGEST_BODY, Admin


@pytest.fixture
def url(agent: Agent) -> Iterator[str]:
    """Where it serves."""
    with weightsync.Publisher.from_env(socket=agent.socket, connect_timeout=1) as publisher, Admin(("127.0.0.1", 0), publisher) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_orchestrator_reaches_it_at_an_ipv6_address(agent: Agent) -> None:
    with weightsync.Publisher.from_env(socket=agent.socket, connect_timeout=1) as publisher, Admin(("::1", 0), publisher) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with urllib.request.urlopen(f"http://[::1]:{server.server_port}/health", timeout=LIMIT) as answer:
            assert answer.status == 200
        server.shutdown()


def posted(url: str, path: str, body: Any) -> tuple[int, str]:
    """Status and message of the answer."""
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=LIMIT) as answer:
            return answer.status, json.load(answer)["message"]
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["message"]


def written(folder: Path, value: float) -> Path:
    """A checkpoint of two files."""
    folder.mkdir()
    for name in ("a", "b"):
        save_file({name: torch.full((300,), value)}, folder / f"{name}.safetensors")
    return folder


def test_a_folder_is_the_version_in_its_name(url: str, agent: Agent, tmp_path: Path) -> None:
    status, message = posted(url, "/update_weights", {"weight_dir": str(written(tmp_path / "step_7", 3))})
    assert (status, message) == (200, "version 7: 1 replicas serve it")
    assert {name: tensor.unique().tolist() for name, tensor in load_file(agent.file(7)).items()} == {"a": [3], "b": [3]}


def test_version_that_agents_refuse_is_answered_with_409(url: str, tmp_path: Path) -> None:
    assert posted(url, "/update_weights", {"weight_dir": str(written(tmp_path / "step_7", 3))})[0] == 200
    assert posted(url, "/update_weights", {"weight_dir": str(written(tmp_path / "step_6", 3))})[0] == 409


def test_an_agent_that_is_gone_is_asked_for_again(url: str, agent: Agent, tmp_path: Path) -> None:
    agent.stop()
    assert posted(url, "/update_weights", {"weight_dir": str(written(tmp_path / "step_7", 3))})[0] == 503


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/pause?mode=keep&clear_cache=false", {}, 200),
        ("/resume", {}, 200),
        ("/update_weights", {"weight_dir": None}, 400),
        ("/update_weights", [], 400),
        ("/update_weights", {"weight_dir": "/nowhere/step_1"}, 400),
        ("/update_weights", {"weight_dir": "/nowhere/latest"}, 400),
        ("/update_weights", {"weight_dir": "x" * LONGEST_BODY}, 413),
        ("/load_lora_adapter", {}, 400),
    ],
)
def test_a_call_that_cannot_be_met_is_not_repeated(url: str, path: str, body: Any, status: int) -> None:
    assert posted(url, path, body)[0] == status
