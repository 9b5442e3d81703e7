"""AReaL's own `FSDPEngine` and rollout engine from its wheel, on one rank without a GPU. Run by tests/tools/upstream.sh.

AReaL's engine writes each version and has the hook's engine load it. Not AReaL's: the model and its step, and the server, which only
says that it is healthy.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from areal.api import WeightUpdateMeta
from areal.api.cli_args import InferenceEngineConfig, NameResolveConfig, TrainEngineConfig
from areal.engine.fsdp_engine import FSDPEngine
from areal.utils import name_resolve
from conftest import Agent
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from weightsync.integrations.areal import WeightSyncEngine, WeightSyncPPOTrainer

NAMED = {"experiment_name": "e", "trial_name": "t"}


class Server(BaseHTTPRequestHandler):
    """A vLLM server that takes no change."""

    changes: list[str] = []  # noqa: RUF012, of all requests

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        self.changes.append(self.path)
        self.do_GET()


@pytest.fixture
def rollout(agent: Agent, tmp_path: Path) -> Iterator[WeightSyncEngine]:
    """The hook's engine, connected."""
    name_resolve.reconfigure(NameResolveConfig(type="nfs", nfs_record_root=str(tmp_path / "names")))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    engine = WeightSyncEngine(InferenceEngineConfig(backend="vllm:d1", **NAMED), socket=agent.socket)
    engine.initialize(addr=f"127.0.0.1:{server.server_port}", train_data_parallel_size=1)
    yield engine
    engine.destroy()
    server.shutdown()
    server.server_close()


@pytest.fixture
def trained(tmp_path: Path) -> Iterator[FSDPEngine]:
    """AReaL's train engine with a small model."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    shape = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
    )
    shape.save_pretrained(tmp_path / "model")
    engine = FSDPEngine(TrainEngineConfig(backend="fsdp:d1", path=str(tmp_path / "model"), **NAMED))
    engine.model, engine.tokenizer, engine.processor = LlamaForCausalLM(shape), None, None
    engine._cpu_group, engine._initialized = dist.group.WORLD, True
    yield engine
    dist.destroy_process_group()


def test_each_update_by_areals_engine_is_its_version(rollout: WeightSyncEngine, trained: FSDPEngine, agent: Agent, tmp_path: Path) -> None:
    meta = WeightUpdateMeta.from_disk(**NAMED, file_root=str(tmp_path))
    trained.connect_engine(rollout, meta)
    for step in (0, 1, 2):
        for parameter in trained.model.parameters():
            torch.nn.init.constant_(parameter, step)
        # As AReaL's trainer does after each step.
        version = step + 1
        versioned = meta.with_version(version)
        trained.update_weights(versioned)
        trained.set_version(version)
        rollout.set_version(version)
        arrived: dict[str, Any] = load_file(agent.file(version))
        assert "model.layers.0.self_attn.q_proj.weight" in arrived
        assert all(torch.equal(tensor, torch.full_like(tensor, step)) for tensor in arrived.values())
        assert versioned.path is not None
        assert not Path(versioned.path).exists(), "AReaL's folder is cleared after the load"
    assert rollout.result is not None
    assert rollout.result.version == 3
    assert Server.changes == [], "the server was neither paused nor loaded by AReaL"


def test_areals_own_servers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AREAL_SPMD_MODE", raising=False)
    with pytest.raises(ValueError, match="AREAL_SPMD_MODE"):
        object.__new__(WeightSyncPPOTrainer)._init_rollout(None)
