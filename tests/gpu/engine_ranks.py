"""One rank of an engine's weight group, for `benches/gpu`: the group code is the engine's own, from its wheel (`engine_code.py`).

Reads one JSON object a line and answers each with one. `join`, `receive` and `leave` make the calls that the engine's server makes of that
code for its routes; what an engine has besides (a model, requests, a server) is not here. Every byte that was received is compared with the
pattern of `benches/gpu/pattern.rs` where it lies. The engine `torch` is rank 0 instead, without a GPU: for rehearsals over gloo.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import engine_code
import torch
import torch.distributed as dist

P = 0x9E3779B97F4A7C15
Q = 0xD1B54A32D192ED03
TIMEOUT = datetime.timedelta(seconds=120)

Weights = list[tuple[str, torch.Tensor]]
Message = dict[str, Any]


def signed(number: int) -> int:
    number &= (1 << 64) - 1
    return number - (1 << 64) if number >> 63 else number


def pattern(bucket: int, length: int, device: str) -> torch.Tensor:
    words = torch.arange(1, (length + 7) // 8 + 1, dtype=torch.int64, device=device) * signed(P) + signed(bucket * Q)
    return words.view(torch.uint8)[:length]


class Engine(Protocol):
    """What a server does with its group. A refusal is an exception with the engine's message."""

    def join(self, ask: Message) -> None: ...

    def receive(self, ask: Message) -> Weights: ...

    def leave(self, ask: Message) -> None: ...


def must(answer: tuple[bool, str]) -> None:
    if not answer[0]:
        raise RuntimeError(answer[1])


class Sglang:
    """`WeightUpdater` as a model runner makes it; `managers/scheduler_components/weight_updater.py` calls it so."""

    def __init__(self, a: argparse.Namespace) -> None:
        module = importlib.import_module("sglang.srt.model_executor.model_runner_components.weight_updater")
        self.backend = a.backend
        nothing = dict.fromkeys(["model_config", "get_model", "update_model_fields", "recapture_cuda_graph", "get_model_runner"])
        self.updater = module.WeightUpdater(
            tp_rank=a.tp_rank, device=a.device.partition(":")[0], gpu_id=a.gpu, custom_weight_loaders={}, **nothing
        )

    def join(self, ask: Message) -> None:
        place = (ask["master_address"], ask["master_port"], ask["rank_offset"], ask["world_size"], ask["group_name"])
        must(self.updater.init_weights_update_group(*place, self.backend))

    def receive(self, ask: Message) -> Weights:
        words = {name: ask[name] for name in ("names", "dtypes", "shapes", "group_name", "load_format")}
        weights: Weights = self.updater.receive_weights_from_distributed(**words)
        return weights

    def leave(self, ask: Message) -> None:
        must(self.updater.destroy_weights_update_group(ask["group_name"]))


class Lmdeploy:
    """The methods of `BaseModelAgent` on an agent that has what they touch, and takes the weights instead of a model."""

    def __init__(self, a: argparse.Namespace) -> None:
        self.agent = importlib.import_module("lmdeploy.pytorch.engine.model_agent.agent").BaseModelAgent
        self.backend = a.backend
        self.took: Weights = []
        if a.device == "cpu":  # A rehearsal: it allocates on this.
            torch.cuda.current_device = lambda: "cpu"
        tp_group = SimpleNamespace(rank=a.tp_rank)
        self.self = SimpleNamespace(
            all_context=contextlib.nullcontext,
            dist_ctx=SimpleNamespace(tp_group=tp_group),
            _model_update_group={},
            _load_updated_weight_bucket=lambda weights, _: self.took.extend(weights),
        )

    def join(self, ask: Message) -> None:
        must(self.agent.init_weights_update_group(self.self, SimpleNamespace(**ask, backend=self.backend)))

    def receive(self, ask: Message) -> Weights:
        self.took.clear()
        must(self.agent.update_weights_from_distributed(self.self, SimpleNamespace(**ask, finished=False)))
        return self.took

    def leave(self, ask: Message) -> None:
        must(self.agent.destroy_weights_update_group(self.self, SimpleNamespace(**ask)))


class Vllm:
    """`NCCLWeightTransferEngine` as a GPU worker makes it, with a model that keeps what it is given."""

    def __init__(self, a: argparse.Namespace) -> None:
        # Its own detection wants its kernels: the platform is set here, and the rest of its interface stays.
        interface = importlib.import_module("vllm.platforms.interface")
        platform = type("CudaPlatform", (interface.Platform,), {"_enum": interface.PlatformEnum.CUDA, "device_type": "cuda"})
        importlib.import_module("vllm.platforms").__dict__["current_platform"] = platform()
        module = importlib.import_module("vllm.distributed.weight_transfer.nccl_engine")
        self.took: Weights = []
        parallel = SimpleNamespace(data_parallel_index=0, world_size=a.tp_size, rank=a.tp_rank)
        config = SimpleNamespace(parallel_config=parallel, model_config=None)
        model = type("Model", (), {"load_weights": staticmethod(self.took.extend)})()
        self.engine = module.NCCLWeightTransferEngine(None, config, torch.device(a.device), model)

    def join(self, ask: Message) -> None:
        ask = {name: value for name, value in ask.items() if name != "group_name"}
        self.engine.init_transfer_engine(self.engine.parse_init_info(ask))

    def receive(self, ask: Message) -> Weights:
        self.took.clear()
        self.engine.update_weights({"names": ask["names"], "dtype_names": ask["dtypes"], "shapes": ask["shapes"]})
        return self.took

    def leave(self, _: Message) -> None:
        self.engine.shutdown()


class Torch:
    """Rank 0 of a rehearsal: a client of the same store."""

    def __init__(self, _: argparse.Namespace) -> None:
        self.group: dist.ProcessGroup | None = None

    def join(self, ask: Message) -> None:
        store = dist.TCPStore(ask["master_address"], ask["master_port"], is_master=False, timeout=TIMEOUT)
        name = ask["group_name"]
        prefixed = dist.PrefixStore(name, store)
        helper = dist.distributed_c10d._new_process_group_helper
        group, _ = helper(ask["world_size"], 0, [], "gloo", prefixed, group_name=name, timeout=TIMEOUT)
        dist.distributed_c10d._world.pg_group_ranks[group] = {i: i for i in range(ask["world_size"])}
        self.group = group

    def receive(self, ask: Message) -> Weights:
        """Sends: the pattern, in as many broadcasts as are asked for."""
        sent = pattern(ask["bucket"], sum(ask["lengths"]), "cpu")
        for part in torch.split(sent, ask["lengths"]):
            dist.broadcast(part.contiguous(), src=0, group=self.group)
        return []

    def leave(self, _: Message) -> None:
        dist.destroy_process_group(self.group)


ENGINES: dict[str, Callable[[argparse.Namespace], Engine]] = {"sglang": Sglang, "lmdeploy": Lmdeploy, "vllm": Vllm, "torch": Torch}


def compare(weights: Weights, ask: Message) -> Message:
    """What came, in the order of the wire, against the pattern; and that it is what was announced."""
    announced = list(zip(ask["names"], ask["dtypes"], ask["shapes"], strict=True))
    came = [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in weights]
    if came != announced:
        raise ValueError(f"announced were {announced}, the engine took {came}")
    wrong = length = 0
    parts = [tensor.contiguous().reshape(-1).view(torch.uint8) for _, tensor in weights]
    expected = pattern(ask["bucket"], sum(part.numel() for part in parts), str(parts[0].device))
    for part in parts:
        wrong += int((part != expected[length : length + part.numel()]).sum().item())
        length += part.numel()
    return {"bytes": length, "wrong": wrong}


def answers(a: argparse.Namespace) -> Iterator[Message]:
    version = "torch" if a.engine == "torch" else engine_code.use(a.engine, a.code)
    if a.device != "cpu":
        torch.cuda.set_device(a.gpu)
    if a.engine == "vllm" and torch.cuda.is_available() and torch.cuda.nccl.version() < (2, 29, 7):
        # vLLM's own setting: the machine's NCCL after two functions that vLLM wants to find there (`engine_code.sh`).
        os.environ["VLLM_NCCL_SO_PATH"] = str(a.code / "libnccl-suspend.so")
        version += " with libnccl-suspend.so"
    # The ranks of an engine are in a group of their own, as in a server.
    dist.init_process_group(a.backend, init_method=f"file://{a.meet}", rank=a.tp_rank, world_size=a.tp_size, timeout=TIMEOUT)
    engine = ENGINES[a.engine](a)
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if a.device != "cpu" else "none"
    yield {"ok": True, "message": f"{version}, torch {torch.__version__}, NCCL {nccl}, rank {a.tp_rank} of {a.tp_size} on {a.device}"}
    for line in sys.stdin:
        ask: Message = json.loads(line)
        what, begun, answer = ask.pop("do"), time.monotonic(), {"ok": True, "message": ""}
        try:
            if what == "receive":
                weights = engine.receive(ask)
                answer |= compare(weights, ask) if weights else {}
            else:
                getattr(engine, what)(ask)
        except Exception as error:
            traceback.print_exc()
            answer |= {"ok": False, "message": f"{type(error).__name__}: {error}"}
        yield answer | {"seconds": time.monotonic() - begun}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("engine", choices=sorted(ENGINES))
    parser.add_argument("--code", type=Path, default=Path())
    parser.add_argument("--meet", required=True)
    parser.add_argument("--gpu", type=int, default=-1, help="-1: a rehearsal on the processor, over gloo")
    for name in ("--tp-rank", "--tp-size"):
        parser.add_argument(name, type=int, required=True)
    a = parser.parse_args()
    a.device, a.backend = ("cpu", "gloo") if a.gpu < 0 else (f"cuda:{a.gpu}", "nccl")
    # Engines write to stdout: answers have a descriptor of their own.
    to_caller = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for answer in answers(a):
        print(json.dumps(answer), file=to_caller, flush=True)
    # What is left of a group would be waited for.
    os._exit(0)


if __name__ == "__main__":
    main()
