"""What trainers do with the integrations: each scenario a process, or two ranks (gloo), against the real packages. Prints one JSON object.

Run as `python trainers.py SCENARIO RANK RENDEZVOUS_FILE SOCKET FOLDER`. What packages import and the scenarios do not use (ray and
its like) is replaced by empty stand-ins, where it is not installed.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import importlib.machinery
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import weightsync

SCENARIO, RANK, RENDEZVOUS, SOCKET, FOLDER = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4], Path(sys.argv[5])
LIMIT = 60
STAND_INS = {
    "verl": (
        "ray ray.actor ray.experimental ray.experimental.state ray.experimental.state.api ray.util ray.util.placement_group "
        "ray.util.scheduling_strategies tensordict tensordict.tensorclass omegaconf codetiming orjson"
    ),
    "trl": "pandas datasets",
}


def stand_in_for(package: str) -> None:
    """Lets the real package be imported without what it imports."""
    for name in STAND_INS[package].split():
        stand_in = MagicMock(name=name)
        stand_in.__spec__ = importlib.machinery.ModuleSpec(name, None)
        stand_in.__path__ = []
        stand_in.__name__ = name
        sys.modules[name] = stand_in


def publisher(group: Any = None) -> weightsync.Publisher:
    return weightsync.Publisher.from_env(group, socket=SOCKET, connect_timeout=5, rank_timeout=30)


def moe() -> torch.nn.Module:
    """A small mixture of experts, the same on all ranks; transformers keeps its experts fused."""
    torch.manual_seed(3)
    config = transformers.Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
    )
    return transformers.AutoModelForCausalLM.from_config(config)


def fsdp2() -> dict[str, Any]:
    """A sharded mixture of experts, twice; its checkpoint is what transformers itself writes."""
    from weightsync.integrations import fsdp2

    model = moe()
    if RANK == 0:
        model.save_pretrained(FOLDER / "saved")
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with publisher(dist.group.WORLD) as pub:
        first = pub.publish(fsdp2.source(model), version=1, timeout=LIMIT)
        renamed = fsdp2.source(model, dtype=torch.bfloat16, rename=lambda name: None if "lm_head" in name else f"language_model.{name}")
        second = pub.publish(renamed, version=2, timeout=LIMIT)
    return {"first": first.version, "second": second.version}


def megatron() -> dict[str, Any]:
    """Tensor parallel and expert parallel ranks of a real Megatron-Core model; what they hold is written as a checkpoint by rank."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: F401
    from megatron.core.transformer.transformer_config import TransformerConfig

    from weightsync.integrations import megatron

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, expert_model_parallel_size=2, expert_tensor_parallel_size=1)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=8,
        num_query_groups=4,
        kv_channels=8,
        ffn_hidden_size=48,
        num_moe_experts=4,
        moe_ffn_hidden_size=16,
        moe_router_topk=2,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        qk_layernorm=True,
        tensor_model_parallel_size=2,
        expert_model_parallel_size=2,
        expert_tensor_parallel_size=1,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
    )
    spec = get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False, qk_layernorm=True, normalization="RMSNorm")
    model = GPTModel(
        config, spec, vocab_size=128, max_sequence_length=64, share_embeddings_and_output_weights=False, position_embedding_type="rope"
    )
    parameters = dict(model.named_parameters())
    for number, tensor in enumerate(parameters.values()):
        torch.manual_seed(1000 * RANK + number)
        with torch.no_grad():
            tensor.copy_(torch.randn(tensor.shape))
    # Norms and routers are the same on all tensor parallel ranks.
    for name, tensor in parameters.items():
        if "norm" in name or "router" in name:
            dist.broadcast(tensor.data, 0)
    torch.save({name: tensor.detach() for name, tensor in parameters.items()}, FOLDER / f"rank-{RANK}.pt")
    shape = megatron.Shape(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=8,
        num_query_groups=4,
        kv_channels=8,
        ffn_hidden_size=48,
        vocab_size=100,
        qk_norm=True,
        num_moe_experts=4,
        moe_ffn_hidden_size=16,
    )
    place = megatron.Place(
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        tensor_size=parallel_state.get_tensor_model_parallel_world_size(),
        expert_rank=parallel_state.get_expert_model_parallel_rank(),
        expert_size=parallel_state.get_expert_model_parallel_world_size(),
    )
    with publisher(dist.group.WORLD) as pub:
        for version in (1, 2):
            pub.publish(
                megatron.source(shape, place, lambda: dict(model.named_parameters()), torch.float32), version=version, timeout=LIMIT
            )
    return {"names": sorted(parameters)}


def verl() -> dict[str, Any]:
    """verl's own registry and interface, driven as our manager does it; that itself runs in upstream/verl_manager.py."""
    stand_in_for("verl")
    import verl.checkpoint_engine.base as base

    import weightsync.integrations.verl  # noqa: F401

    backend = base.CheckpointEngineRegistry.get("weightsync")
    assert issubclass(backend, base.CheckpointEngine)
    engine = base.CheckpointEngineRegistry.new("weightsync", bucket_size=1 << 20, is_master=RANK == 0, socket=SOCKET, rank_timeout=30)
    seen: dict[str, Any] = {}
    try:
        backend.build_topology(2, 4, [{}] * 6)
    except RuntimeError as error:
        seen["rollouts"] = "WeightSyncCheckpointManager" in str(error)
    for step in (1, 2, 3):
        actors, rollouts = backend.build_topology(2, 0, [engine.prepare()] * 2)
        assert all(len(values) == 2 for values in actors.values())
        assert rollouts == {}
        engine.init_process_group(**{key: values[RANK] for key, values in actors.items()})

        def per_tensor(step: int = step) -> Iterator[tuple[str, torch.Tensor]]:
            for number in range(6):
                tensor = torch.full((300,), float(10 * step + number + RANK))
                # An export of a sharded actor is collective.
                dist.all_reduce(tensor)
                yield f"layer.{number}.weight", tensor

        seen[f"metrics {step}"] = sorted(asyncio.run(engine.send_weights(per_tensor(), global_steps=step)))
        seen[f"version {step}"] = engine.result.version
        engine.finalize()
    return seen


def xtuner() -> dict[str, Any]:
    """XTuner's calls, in its order; its own class runs in upstream/xtuner_updater.py."""
    from weightsync.integrations.xtuner import WeightSyncTransport

    class Batches:
        """Like its `WeightIterator`: groups of batches, each with a state dict."""

        def __init__(self, step: int) -> None:
            self.step = step

        def iter_batch_groups(self) -> Iterator[Iterator[SimpleNamespace]]:
            for group in range(2):
                yield (
                    SimpleNamespace(state_dict=self.tensors(group, number), train_enable_ep=False, finished=False) for number in range(2)
                )

        def tensors(self, group: int, number: int) -> dict[str, torch.Tensor]:
            tensor = torch.full((200,), float(self.step))
            dist.all_reduce(tensor)
            return {f"group{group}.layer{number}": tensor}

    transport = WeightSyncTransport(group=dist.group.WORLD, rank=RANK, socket=SOCKET, rank_timeout=30)
    versions = []
    for step in (1, 2):
        transport.reset_rollout_info(SimpleNamespace(weight_update_targets=()))
        transport.update(Batches(step))
        versions.append(transport.result.version)
    # The halves of a step, as XTuner asks for them with its checkpoint engine; then a rollout that came back.
    transport.update(Batches(3), need_register=True, need_update=False)
    assert transport.result.version == 2
    for _ in range(2):
        transport.update(None, need_register=False, need_update=True)
        versions.append(transport.result.version)
    assert transport.has_registered_checkpoint()
    transport.teardown()
    return {"versions": versions}


@contextlib.contextmanager
def server() -> Iterator[str]:
    """A server of one model that refuses every change; its URL."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b'{"data": [{"id": "m"}]}'
            self.send_response(200 if self.path in ("/health", "/health/", "/v1/models") else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{running.server_port}"
    finally:
        running.shutdown()
        running.server_close()


def trl() -> dict[str, Any]:
    """A real training loop of transformers with the callback, and TRL's own list of names after `serve`."""
    import accelerate

    from weightsync.integrations.trl import WeightSyncCallback, without_communicator

    torch.manual_seed(5)
    config = transformers.Qwen3Config(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(8)]
    callback = WeightSyncCallback(publisher(), every=2, at_start=True, strict=True)
    settings = transformers.TrainingArguments(
        output_dir=str(FOLDER / "out"), max_steps=5, per_device_train_batch_size=1, report_to=[], save_strategy="no", use_cpu=True
    )
    transformers.Trainer(model=model, args=settings, train_dataset=rows, callbacks=[callback]).train()
    torch.save(model.state_dict(), FOLDER / "trained.pt")
    # After the training: transformers would take the stand-ins for the real data sets.
    stand_in_for("trl")
    from trl.generation.vllm_generation import VLLMGeneration

    with server() as url, without_communicator():
        accelerator = accelerate.Accelerator(cpu=True)
        generation = VLLMGeneration(model, accelerator, None, mode="server", server_base_url=url, server_timeout=LIMIT)
    trainer = SimpleNamespace(model=model, vllm_generation=generation, state=SimpleNamespace(global_step=7))
    served = WeightSyncCallback(publisher(), strict=True)
    served.serve(trainer)
    generation.sync_weights()
    generation.sync_weights()
    return {
        "versions": [result.version for result in callback.results],
        "served": [result.version for result in served.results],
    }


def main() -> None:
    if SCENARIO != "trl":
        dist.init_process_group("gloo", init_method=f"file://{RENDEZVOUS}", rank=RANK, world_size=2)
    seen = globals()[SCENARIO]()
    if SCENARIO != "trl":
        dist.barrier()
    print(json.dumps(seen), flush=True)
    # Some packages leave threads that keep a process from ending.
    os._exit(0)


main()
