"""TRL's own `AsyncGRPOTrainer` and `GRPOTrainer` train on a CPU and send their weights through WeightSync. Run by tests/tools/upstream.sh.

Constructors, callbacks, loops, losses and syncs are TRL's. Not TRL's: what is generated (fixed samples), and the attention kernel of
`AsyncGRPOTrainer`, which is for GPUs only.
"""

from __future__ import annotations

import http.server
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from conftest import LIMIT, Agent
from safetensors.torch import load_file
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample
from trl.generation.vllm_client import VLLMClient

import weightsync
from weightsync.integrations.trl import WeightSyncCallback, WeightSyncTransfer, without_communicator

STEPS = 3
ON_A_CPU: dict[str, Any] = {
    "max_steps": STEPS,
    "per_device_train_batch_size": 2,
    "learning_rate": 0.1,
    "report_to": [],
    "save_strategy": "no",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
}
"""What the settings of TRL's trainers share."""


class Worker:
    """Generates nothing: gives samples of the version that TRL last called live."""

    def __init__(self) -> None:
        self.rollout_buffer: queue.Queue[RolloutSample] = queue.Queue()
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self.versions: list[int] = []

    def start(self) -> None:
        for number in range(64):
            ids = np.arange(8) + number % 4
            mask, old = np.array([0] * 4 + [1] * 4), np.array([0.0] * 4 + [-3.0] * 4, dtype=np.float32)
            self.rollout_buffer.put(RolloutSample([], [], ids, mask, old, 1.0 - 2 * (number % 2), 0, number // 2, {"reward": 1.0}))

    def stop(self) -> None:
        """Nothing runs."""

    def update_model_version(self, model_version: int) -> None:
        self.versions.append(model_version)

    def check_health(self, stale_after_s: float) -> None:
        raise AssertionError("the samples ran out")


class Kernel:
    """FlashAttention's function for packed sequences, in torch."""

    @staticmethod
    def flash_attn_varlen_func(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, _q: int, _k: int, softmax_scale: Any, **_: Any) -> Any:
        out = []
        for start, end, first, last in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True):
            rows, columns = int(end - start), int(last - first)
            mask = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
            parts = (part.transpose(0, 1)[None] for part in (q[start:end], k[first:last], v[first:last]))
            done = torch.nn.functional.scaled_dot_product_attention(*parts, attn_mask=mask, scale=softmax_scale, enable_gqa=True)
            out.append(done[0].transpose(0, 1))
        return torch.cat(out)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A small Qwen3 with a tokenizer, as a checkpoint."""
    folder = tmp_path / "model"
    torch.manual_seed(5)
    config = transformers.Qwen3Config(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{n}": n for n in range(31)} | {"<eos>": 31}, unk_token="w0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<eos>").save_pretrained(folder)
    return folder


@pytest.fixture
def trainer_of(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes TRL's trainer with a transfer."""
    import datasets

    monkeypatch.setattr(packing, "_flash_attn", lambda: Kernel)
    # For its figures, TRL asks CUDA what the device can do.
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: 1.0)

    def make(transfer: Any, worker: Worker) -> AsyncGRPOTrainer:
        settings = AsyncGRPOConfig(
            str(tmp_path / "out"),
            gradient_accumulation_steps=1,
            weight_sync_steps=1,
            token_budget=0,
            max_staleness=1000,
            **ON_A_CPU,
        )
        rows = datasets.Dataset.from_dict({"prompt": ["w1"] * 4})
        return AsyncGRPOTrainer(str(model), None, settings, rows, rollout_worker=worker, **transfer.argument_of(AsyncGRPOTrainer))

    return make


def transfer(agent: Agent, **named: Any) -> WeightSyncTransfer:
    return WeightSyncTransfer(weightsync.Publisher.from_env(socket=agent.socket, connect_timeout=5), timeout=LIMIT, **named)


def test_each_sync_of_trls_loop_is_a_version(trainer_of: Any, agent: Agent) -> None:
    worker, ours = Worker(), transfer(agent)
    trainer = trainer_of(ours, worker)
    trainer.train()
    # One when training begins, and one a step.
    assert [result.version for result in ours.results] == [1, 2, 3, 4]
    assert worker.versions == [1, 2, 3, 4]
    first, last = load_file(agent.file(1)), load_file(agent.file(4))
    trained = dict(trainer.model.named_parameters())
    assert last.keys() == trained.keys() == first.keys()
    assert all(torch.equal(last[name], tensor) for name, tensor in trained.items())
    assert not torch.equal(first["model.norm.weight"], last["model.norm.weight"])


def test_failed_sync_ends_trls_loop_after_the_whole_pass(trainer_of: Any, start_agent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = start_agent("--bucket-bytes", "4096", "--slots", "2", "--die-after", "3")
    worker, read = Worker(), [0]
    own = AsyncGRPOTrainer._streaming_iter

    def counted(self: Any) -> Iterator[Any]:
        yield from own(self)
        read[0] += 1

    monkeypatch.setattr(AsyncGRPOTrainer, "_streaming_iter", counted)
    with pytest.raises(weightsync.WeightSyncError):
        trainer_of(transfer(agent), worker).train()
    assert read[0] == 1, "other ranks wait in the gathers of the rest"
    assert worker.versions == []


def test_trainer_goes_on_after_the_versions_of_an_earlier_one(trainer_of: Any, agent: Agent) -> None:
    with weightsync.Publisher.from_env(socket=agent.socket) as before:
        before.publish({"w": torch.ones(3)}, version=41, timeout=LIMIT)
    ours = transfer(agent)
    trainer_of(ours, Worker()).train()
    assert [result.version for result in ours.results] == [42, 43, 44, 45]


class Handler(http.server.BaseHTTPRequestHandler):
    """A server of one model that refuses every change, TRL's group with it too."""

    changes: list[str] = []  # noqa: RUF012, of all requests

    def do_GET(self) -> None:
        body = b'{"data": [{"id": "m"}], "vllm_config": {"model_config": {"logprobs_mode": "processed_logprobs"}}}'
        known = ("/health", "/v1/models", "/server_info")
        self.send_response(200 if self.path.partition("?")[0].rstrip("/") in known else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.changes.append(self.path)
        self.send_response(400)
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.fixture
def server() -> Iterator[str]:
    """Its URL."""
    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{running.server_port}"
    running.shutdown()
    running.server_close()


def generated(client: VLLMClient, prompts: list[list[int]], n: int = 1, **_: Any) -> dict[str, Any]:
    """As the server's answers come out of TRL's client."""
    completions = [[1 + (number + at) % 30 for at in range(4)] for number in range(n * len(prompts))]
    return {
        "prompt_ids": prompts,
        "completion_ids": completions,
        "logprobs": [[[-3.0]] * 4 for _ in completions],
        "logprob_token_ids": [[[token] for token in ids] for ids in completions],
    }


def test_grpo_in_server_mode_publishes_what_it_would_broadcast(
    model: Path, server: str, agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr(VLLMClient, "generate", generated)
    settings = GRPOConfig(
        str(tmp_path / "out"),
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=server,
        num_generations=2,
        max_completion_length=4,
        **ON_A_CPU,
    )
    rows = datasets.Dataset.from_dict({"prompt": ["w1"] * 8})
    callback = WeightSyncCallback(weightsync.Publisher.from_env(socket=agent.socket, connect_timeout=5), strict=True, timeout=LIMIT)

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(number) for number in range(len(completions))]

    with without_communicator():
        trainer = GRPOTrainer(str(model), reward, settings, rows, callbacks=[callback])
    callback.serve(trainer)
    trainer.train()
    # Before each step's generation, as TRL does it.
    assert [result.version for result in callback.results] == list(range(STEPS))
    first, last = load_file(agent.file(0)), load_file(agent.file(STEPS - 1))
    assert first.keys() == {name for name, _ in trainer.model.named_parameters()}
    assert not torch.equal(first["model.norm.weight"], last["model.norm.weight"])
    assert Handler.changes == [], "TRL changes nothing in the server"
