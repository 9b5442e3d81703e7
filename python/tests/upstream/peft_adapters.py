"""Models with PEFT's own adapters, published while they train: the trainer's weights stay as they are. Run by tests/tools/upstream.sh.

The expected weights are PEFT's own: its merge of a copy of the model in float32, rounded once.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from conftest import LIMIT, Agent
from safetensors.torch import load_file

import weightsync
from weightsync.integrations.trl import WeightSyncCallback

PUBLISHES = 50


def base(tied: bool) -> Any:
    """A small Llama in bfloat16."""
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
        attention_bias=True,
    )
    return transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)


def move(model: Any, step: int) -> None:
    """One slow step of everything that is trained."""
    torch.manual_seed(step)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.01 * torch.randn_like(parameter)


def sums(model: Any, trained: bool) -> dict[str, str]:
    """A hash of all bytes of each tensor, of those that are trained or of the others."""
    held = {name: tensor for name, tensor in model.named_parameters(remove_duplicate=False) if tensor.requires_grad == trained}
    if not trained:
        held |= dict(model.named_buffers())
    return {
        name: hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest() for name, tensor in held.items()
    }


def by_peft(model: Any) -> dict[str, torch.Tensor]:
    """What PEFT makes of a copy of the model."""
    whole = copy.deepcopy(model).float().merge_and_unload()
    return {name: tensor.detach().to(torch.bfloat16) for name, tensor in whole.named_parameters()}


ADAPTERS = {
    "linear": (False, peft.LoraConfig(r=16, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)),
    "all layers and the head": (False, peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)),
    "embedding": (False, peft.LoraConfig(r=4, target_modules=["embed_tokens", "o_proj"], init_lora_weights=False)),
    "tied, embedding": (True, peft.LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"], init_lora_weights=False)),
    "tied, head": (True, peft.LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False)),
    "modules that are saved": (
        False,
        peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens"], init_lora_weights=False),
    ),
    "DoRA": (False, peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], use_dora=True, init_lora_weights=False)),
    "tokens": (False, peft.LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=[1, 5], init_lora_weights=False)),
}


@pytest.fixture(params=ADAPTERS.values(), ids=ADAPTERS.keys())
def model(request: pytest.FixtureRequest) -> Any:
    """A Llama with adapters; a model for each case, since PEFT changes the one that it gets."""
    tied, config = request.param
    return peft.get_peft_model(base(tied), copy.deepcopy(config))


@pytest.fixture
def callback(agent: Agent) -> Iterator[WeightSyncCallback]:
    """A callback that publishes to an agent of this test."""
    with weightsync.Publisher.from_env(socket=agent.socket, connect_timeout=5) as publisher:
        yield WeightSyncCallback(publisher, strict=True, timeout=LIMIT)


class State:
    """The part of the trainer's state that the callback reads."""

    global_step = 0


def test_publishes_leave_every_byte_of_the_model(model: Any, callback: WeightSyncCallback, agent: Agent) -> None:
    before, state = sums(model, trained=False), State()
    assert before, "something is frozen"
    for step in range(1, PUBLISHES + 1):
        move(model, step)
        trained = sums(model, trained=True)
        state.global_step = step
        callback.on_step_end(None, state, None, model=model)
        agent.said()  # Else its pipe fills.
        assert sums(model, trained=True) == trained, f"publish {step} wrote into what is trained"
    assert [result.version for result in callback.results][-1] == PUBLISHES
    changed = [name for name, digest in sums(model, trained=False).items() if before[name] != digest]
    assert not changed, f"{len(changed)} of {len(before)} frozen tensors: {changed[:3]}"
    compare(load_file(agent.file(PUBLISHES)), by_peft(model))


def compare(sent: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Names, types and elements."""
    assert sent.keys() == expected.keys()
    for name, tensor in expected.items():
        assert sent[name].dtype == tensor.dtype, name
        assert torch.equal(sent[name], tensor), name


def test_hooks_and_gradients_of_the_trainer_are_left_alone(callback: WeightSyncCallback, agent: Agent) -> None:
    model = peft.get_peft_model(base(False), peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    model.enable_input_require_grads()
    calls: list[int] = []
    layer = model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
    layer.register_forward_hook(lambda *_: calls.append(1))
    model(input_ids=torch.arange(6)[None], labels=torch.arange(6)[None]).loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert gradients
    assert calls == [1]
    state = State()
    state.global_step = 1
    callback.on_step_end(None, state, None, model=model)
    assert calls == [1]
    assert not layer.merged_adapters
    assert all(torch.equal(dict(model.named_parameters())[name].grad, gradient) for name, gradient in gradients.items())


def test_merged_by_its_owner_model_is_published_as_it_is(callback: WeightSyncCallback, agent: Agent) -> None:
    model = peft.get_peft_model(base(False), peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    model.merge_adapter()
    state = State()
    state.global_step = 1
    callback.on_step_end(None, state, None, model=model)
    name = "model.layers.0.self_attn.q_proj.weight"
    weight = model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj").base_layer.weight
    assert torch.equal(load_file(agent.file(1))[name], weight)


def test_quantised_base_is_refused_by_name(callback: WeightSyncCallback, tmp_path: Path) -> None:
    model = peft.get_peft_model(base(False), peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    layer = model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
    layer.base_layer.weight = torch.nn.Parameter(torch.zeros(32, 32, dtype=torch.uint8), requires_grad=False)
    state = State()
    state.global_step = 1
    with pytest.raises(TypeError, match=r"layers\.0\.self_attn\.q_proj.*quantised"):
        callback.on_step_end(None, state, None, model=model)
