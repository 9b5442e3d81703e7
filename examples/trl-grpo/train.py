"""GRPO on a processor: TRL's own trainer, two real vLLM servers, and WeightSync between them. Started by run.py."""

from __future__ import annotations

from pathlib import Path

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from watch import Watch
from weightsync.integrations.trl import WeightSyncCallback, without_communicator

PROMPTS = ["The password is ", "My number: ", "Call me at ", "It costs $"]


def digits(completions: list[str], **_: object) -> list[float]:
    """The reward: the share of digits in each completion."""
    return [sum(character in "0123456789" for character in text) / max(1, len(text)) for text in completions]


def train(model: Path, url: str, watch: Watch) -> None:
    """Trains the model with what the servers at this URL generate, until `watch` has seen enough."""
    settings = GRPOConfig(
        str(watch.folder / "trainer"),
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=url,
        per_device_train_batch_size=32,
        num_generations=16,
        max_completion_length=16,
        max_steps=watch.most_steps,
        learning_rate=7e-4,
        lr_scheduler_type="constant",
        beta=0.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
    )
    prompts = Dataset.from_dict({"prompt": PROMPTS * 16})
    publish = WeightSyncCallback(strict=True)
    # TRL would form an NCCL group with one server here, which needs GPUs.
    with without_communicator():
        trainer = GRPOTrainer(str(model), digits, settings, prompts, callbacks=[publish, watch])
    # TRL's sync of weights is now a publish: it returns when enough servers serve the step's weights.
    publish.serve(trainer)
    watch.begin(trainer, publish)
    trainer.train()
    # TRL syncs before it generates, so the weights of the last step are left.
    trainer.vllm_generation.sync_weights()
    watch.end(trainer.model)
