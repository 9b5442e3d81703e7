"""A trainer that was written for vLLM's own weight transfer, used with WeightSync.

Run it with a source agent, for example that of `weightsync local -f docs/examples/quickstart -f docs/examples/quickstart/local`.
"""

from __future__ import annotations

import torch
from vllm.distributed.weight_transfer.base import ModuleSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from weightsync.integrations.vllm import WeightSyncTrainerInitInfo


def main() -> None:
    model = torch.nn.Linear(16, 16, dtype=torch.bfloat16)
    engine = WeightTransferTrainerFactory.trainer_init(WeightSyncTrainerInitInfo(rank=0), client=None, source=ModuleSource(model))
    for _ in range(3):
        with torch.no_grad():
            model.weight.mul_(0.9)
        engine.send_weights()
        print(engine.result)


if __name__ == "__main__":
    main()
