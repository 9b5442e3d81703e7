"""prime-rl's own sender by files, watcher and inference pool from a checkout, with the hook as its pool. Run by tests/tools/upstream.sh.

Each round the trainer's class writes a version, and the orchestrator's watcher finds it and has it loaded. Not prime-rl's: the model, and
the modules of its own models and adapters, which import packages for GPUs.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Agent
from packages import bare_packages
from safetensors.torch import load_file

import weightsync
from weightsync.integrations.prime_rl import Admin

LIMIT = 60


@pytest.fixture
def admin(agent: Agent) -> Iterator[Admin]:
    """The hook, serving on this host."""
    with weightsync.Publisher.from_env(socket=agent.socket, connect_timeout=5) as publisher, Admin(("127.0.0.1", 0), publisher) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def url(admin: Admin) -> str:
    return f"http://127.0.0.1:{admin.server_port}"


@pytest.fixture
def prime_rl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """prime-rl's modules, in a group of one rank."""
    bare_packages(monkeypatch, "prime_rl", "trainer.models", "transports.weights")
    adapters = ModuleType("prime_rl.trainer.lora")
    adapters.get_lora_state = adapters.save_lora_config = None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, adapters.__name__, adapters)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    yield importlib.import_module
    dist.destroy_process_group()


def test_each_version_that_prime_rls_watcher_finds_is_published(prime_rl: Any, admin: Admin, agent: Agent, tmp_path: Path) -> None:
    sender = prime_rl("prime_rl.transports.weights.filesystem").FileSystemWeightBroadcast(tmp_path, SimpleNamespace(type="filesystem"))
    client = prime_rl("prime_rl.configs.shared").ClientConfig(base_url=url(admin), admin_base_url=[url(admin)], skip_model_check=True)
    pool = prime_rl("prime_rl.utils.client").InferencePool(client, model_name="m")
    watch = prime_rl("prime_rl.orchestrator.watcher").WeightWatcher
    config, policy = SimpleNamespace(output_dir=tmp_path, max_steps=None), SimpleNamespace(version=0)
    watcher = watch(config, policy=policy, inference=pool, observers=[], lora_name=None)
    model = torch.nn.Sequential(torch.nn.Embedding(37, 8), torch.nn.Linear(8, 53))

    async def rounds() -> None:
        await pool.wait_for_ready("m", timeout=LIMIT)
        for step in (1, 2, 3):
            for parameter in model.parameters():
                torch.nn.init.constant_(parameter, step)
            sender.broadcast_weights(model, step)
            found = watcher.compute_next_ckpt_step()
            assert found == step
            await watcher.apply_policy_update(found)
            arrived = load_file(agent.file(step))
            assert arrived.keys() == model.state_dict().keys()
            assert all(torch.equal(tensor, model.state_dict()[name].to(tensor.dtype)) for name, tensor in arrived.items())
        await pool.stop()

    asyncio.run(rounds())
    assert admin.result is not None
    assert (admin.result.version, watcher.update_count) == (3, 3)
