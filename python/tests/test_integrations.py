"""Trainers that exist, with their real packages, publish to the real socket: names and bytes are those of a checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from conftest import LIMIT, ROOT, Agent

from weightsync.integrations import megatron


@pytest.fixture(scope="session")
def packages() -> Path:
    """The real packages, without what they depend on."""
    made = subprocess.run([ROOT / "tests/cluster/trainer-packages.sh"], stdout=subprocess.PIPE, text=True, check=True, timeout=600)
    return Path(made.stdout.strip())


Play = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def play(agent: Agent, packages: Path, tmp_path: Path) -> Play:
    """Plays a scenario of trainers.py to its end; what each rank saw."""

    def play(scenario: str, ranks: int = 2) -> list[dict[str, Any]]:
        here = Path(__file__).parent
        environment = {**os.environ, "PYTHONPATH": f"{here.parent}:{packages}", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, str(here / "trainers.py"), scenario]
        arguments = [str(tmp_path / "rendezvous"), agent.socket, str(tmp_path)]
        processes = [
            subprocess.Popen([*command, str(rank), *arguments], stdout=subprocess.PIPE, text=True, env=environment) for rank in range(ranks)
        ]
        try:
            said = [process.communicate(timeout=4 * LIMIT)[0] for process in processes]
            assert [process.returncode for process in processes] == [0] * ranks, said
        finally:
            for process in processes:
                process.kill()
        return [json.loads(text.splitlines()[-1]) for text in said]

    return play


def version(agent: Agent, number: int) -> dict[str, torch.Tensor]:
    """The tensors that arrived."""
    arrived: dict[str, torch.Tensor] = safetensors.torch.load_file(agent.file(number))
    return arrived


def test_sharded_experts_arrive_as_transformers_saves_them(play: Play, agent: Agent, tmp_path: Path) -> None:
    assert play("fsdp2") == [{"first": 1, "second": 2}] * 2
    saved = safetensors.torch.load_file(tmp_path / "saved" / "model.safetensors")
    first, second = version(agent, 1), version(agent, 2)
    assert set(first) == set(saved)
    assert all(torch.equal(first[name], tensor) for name, tensor in saved.items())
    assert set(second) == {f"language_model.{name}" for name in saved if "lm_head" not in name}
    assert all(torch.equal(tensor, saved[name.removeprefix("language_model.")].to(torch.bfloat16)) for name, tensor in second.items())


def whole(shape: megatron.Shape, seed: int = 0) -> dict[str, torch.Tensor]:
    """A checkpoint of random numbers."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(full, generator=generator) for name, full in megatron.tensors(shape)}


def as_megatron_holds_it(
    shape: megatron.Shape, place: megatron.Place, layers: range, full: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The way of a checkpoint into a rank of Megatron-Core, written for the test alone, tensor by tensor."""
    tp, t = place.tensor_size, place.tensor_rank

    def rows(tensor: torch.Tensor, size: int = tp, rank: int = t) -> torch.Tensor:
        return tensor.chunk(size)[rank]

    def columns(tensor: torch.Tensor, size: int = tp, rank: int = t) -> torch.Tensor:
        return tensor.chunk(size, dim=1)[rank]

    padding = torch.zeros(-shape.vocab_size % (8 * tp), shape.hidden_size)
    held = {"decoder.final_layernorm.weight": full["model.norm.weight"]}
    held["embedding.word_embeddings.weight"] = rows(torch.cat([full["model.embed_tokens.weight"], padding]))
    held["output_layer.weight"] = held["embedding.word_embeddings.weight"]
    if not shape.tied_embeddings:
        held["output_layer.weight"] = rows(torch.cat([full["lm_head.weight"], padding]))
    for local, layer in enumerate(layers):
        at, to = f"model.layers.{layer}", f"decoder.layers.{local}"
        for kind in ("weight", "bias") if shape.qkv_bias else ("weight",):
            q, k, v = (full[f"{at}.self_attn.{letter}_proj.{kind}"] for letter in "qkv")
            groups = [torch.cat([a, b, c]) for a, b, c in zip(*(tensor.chunk(shape.num_query_groups) for tensor in (q, k, v)), strict=True)]
            held[f"{to}.self_attention.linear_qkv.{kind}"] = rows(torch.cat(groups))
        held[f"{to}.self_attention.linear_proj.weight"] = columns(full[f"{at}.self_attn.o_proj.weight"])
        held[f"{to}.self_attention.linear_qkv.layer_norm_weight"] = full[f"{at}.input_layernorm.weight"]
        if shape.qk_norm:
            held[f"{to}.self_attention.q_layernorm.weight"] = full[f"{at}.self_attn.q_norm.weight"]
            held[f"{to}.self_attention.k_layernorm.weight"] = full[f"{at}.self_attn.k_norm.weight"]

        def gated(name: str, size: int = tp, rank: int = t) -> tuple[torch.Tensor, torch.Tensor]:
            gate, up, down = (full[f"{name}.{word}_proj.weight"] for word in ("gate", "up", "down"))
            return torch.cat([rows(gate, size, rank), rows(up, size, rank)]), columns(down, size, rank)

        if not shape.has_experts(layer):
            held[f"{to}.mlp.linear_fc1.layer_norm_weight"] = full[f"{at}.post_attention_layernorm.weight"]
            held[f"{to}.mlp.linear_fc1.weight"], held[f"{to}.mlp.linear_fc2.weight"] = gated(f"{at}.mlp")
            continue
        held[f"{to}.pre_mlp_layernorm.weight"] = full[f"{at}.post_attention_layernorm.weight"]
        held[f"{to}.mlp.router.weight"] = full[f"{at}.mlp.gate.weight"]
        own = range(shape.num_moe_experts)[place.expert_rank :: 1][: shape.num_moe_experts // place.expert_size]
        own = range(place.expert_rank * len(own), (place.expert_rank + 1) * len(own))
        for number, expert in enumerate(own):
            first, second = gated(f"{at}.mlp.experts.{expert}", place.expert_tensor_size, place.expert_tensor_rank)
            held[f"{to}.mlp.experts.linear_fc1.weight{number}"], held[f"{to}.mlp.experts.linear_fc2.weight{number}"] = first, second
        if shape.shared_expert_hidden_size:
            shared = f"{to}.mlp.shared_experts"
            held[f"{shared}.linear_fc1.weight"], held[f"{shared}.linear_fc2.weight"] = gated(f"{at}.mlp.shared_expert")
    return held


DENSE = megatron.Shape(4, 32, 8, 4, 8, 48, 100, qkv_bias=True, tied_embeddings=True)
EXPERTS = megatron.Shape(
    4, 32, 8, 4, 8, 48, 100, qk_norm=True, num_moe_experts=8, moe_ffn_hidden_size=16, shared_expert_hidden_size=24, moe_layers=(1, 2, 3)
)


@pytest.mark.parametrize("shape", [DENSE, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize(("tp", "pp", "ep", "etp"), [(1, 1, 1, 1), (2, 1, 1, 1), (4, 2, 1, 1), (2, 2, 4, 1), (2, 1, 2, 2)])
def test_parts_of_all_ranks_make_their_checkpoint(shape: megatron.Shape, tp: int, pp: int, ep: int, etp: int) -> None:
    full = whole(shape)
    found = {name: torch.full_like(tensor, float("nan")) for name, tensor in full.items()}
    order = list(full)
    for stage in range(pp):
        layers = range(stage * shape.num_layers // pp, (stage + 1) * shape.num_layers // pp)
        for rank in range(max(tp, ep * etp)):
            place = megatron.Place(rank % tp, tp, rank // etp % ep, ep, rank % etp, etp, layers.start)
            seen = []
            for name, tensor, start in megatron.parts(shape, place, as_megatron_holds_it(shape, place, layers, full)):
                found[name][tuple(slice(at, at + length) for at, length in zip(start, tensor.shape, strict=True))] = tensor
                seen.append(order.index(name))
            assert seen == sorted(seen), "parts come in the order of the list"
    for name, tensor in full.items():
        assert torch.equal(found[name], tensor), name


def test_unknown_parameter_is_an_error() -> None:
    for name in ("decoder.layers.0.mlp.experts.weight1", "decoder.layers.0.self_attention.linear_q_down_proj.weight", "position.weight"):
        with pytest.raises(ValueError, match="know"):
            list(megatron.parts(EXPERTS, megatron.Place(), {name: torch.zeros(4, 4)}))
    with pytest.raises(ValueError, match="does not have"):
        list(megatron.parts(DENSE, megatron.Place(), {"decoder.layers.9.input_layernorm.weight": torch.zeros(32)}))


def test_real_megatron_ranks_arrive_as_one_checkpoint(play: Play, agent: Agent, tmp_path: Path) -> None:
    play("megatron")
    zero, one = (torch.load(tmp_path / f"rank-{rank}.pt", weights_only=True) for rank in (0, 1))
    for arrived in (version(agent, 1), version(agent, 2)):
        embedding = torch.cat([held["embedding.word_embeddings.weight"] for held in (zero, one)])
        assert torch.equal(arrived["model.embed_tokens.weight"], embedding[:100])
        assert torch.equal(
            arrived["model.layers.1.self_attn.o_proj.weight"],
            torch.cat([held["decoder.layers.1.self_attention.linear_proj.weight"] for held in (zero, one)], dim=1),
        )
        fused = one["decoder.layers.0.self_attention.linear_qkv.weight"].reshape(2, 4, 8, 32)
        assert torch.equal(arrived["model.layers.0.self_attn.q_proj.weight"][32:], fused[:, :2].reshape(32, 32))
        assert torch.equal(arrived["model.layers.0.self_attn.v_proj.weight"][16:], fused[:, 3].reshape(16, 32))
        third = one["decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight"]
        assert torch.equal(arrived["model.layers.0.mlp.experts.2.gate_proj.weight"], third[:16])
        assert torch.equal(arrived["model.layers.0.mlp.experts.2.up_proj.weight"], third[16:])


def test_verl_interface_sends_each_step_from_all_actors(play: Play, agent: Agent) -> None:
    zero, one = play("verl")
    assert zero == one
    assert [zero[f"version {step}"] for step in (1, 2, 3)] == [1, 2, 3]
    assert zero["rollouts"] is True
    assert "weightsync/installed" in zero["metrics 1"]
    for step in (1, 2, 3):
        arrived = version(agent, step)
        assert len(arrived) == 6
        assert all(torch.equal(arrived[f"layer.{n}.weight"], torch.full((300,), float(2 * (10 * step + n) + 1))) for n in range(6))


def test_batches_in_xtuners_order_arrive_as_one_version(play: Play, agent: Agent) -> None:
    assert play("xtuner") == [{"versions": [1, 2, 3, 3]}] * 2
    for step in (1, 2, 3):
        arrived = version(agent, step)
        assert set(arrived) == {f"group{group}.layer{layer}" for group in (0, 1) for layer in (0, 1)}
        assert all(torch.equal(tensor, torch.full((200,), 2.0 * step)) for tensor in arrived.values())


def test_callback_publishes_while_transformers_trains(play: Play, agent: Agent, tmp_path: Path) -> None:
    (seen,) = play("trl", ranks=1)
    assert seen == {"versions": [0, 2, 4, 5], "served": [7]}
    trained = torch.load(tmp_path / "trained.pt", weights_only=True)
    assert all(torch.equal(version(agent, 5)[name], trained[name]) for name in version(agent, 5))
    assert not torch.equal(version(agent, 0)["model.norm.weight"], trained["model.norm.weight"])
    assert set(version(agent, 7)) == set(version(agent, 5))
