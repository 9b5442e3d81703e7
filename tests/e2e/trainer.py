"""A trainer that trains and publishes with three lines.

It trains a small Qwen3 by SGD with torch; or, with `--numpy`, its numbers alone, and then starts in a tenth of the time. Both publish BF16.

The tests talk to its little HTTP server:

    GET  /health                                   {"pid", "steps"}
    POST /train   {"steps": n}                     runs n SGD steps, answers the loss
    POST /publish {"version": v, "pace": seconds}  publishes the present weights; `pace` slows every tensor down, so that a test can
                                                   catch an update in the middle; answers what `Handle.wait` returned, or the error;
                                                   {"poison": true}: one tensor is replaced by NaN on its way, the model keeps its own
    POST /flow    {"from": v, "every": seconds}    publishes version after version from now on, each with another step of SGD
    POST /halt                                     ends that, and answers what became of each: {"published": [{"version", "installed",
                                                   "began", "ended", "error"}]}, times in seconds since 1970
    POST /save    {"path": dir}                    writes the present weights as a safetensors checkpoint, for a fresh engine
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol

import weightsync


class Weights(Protocol):
    """What is trained."""

    def step(self) -> float:
        """One step of SGD; returns the loss."""

    def state(self) -> dict[str, Any]:
        """Tensors under their checkpoint names; tied weights once."""

    def poisoned(self, name: str) -> Any:
        """A tensor like that one, of NaN."""

    def save(self, file: Path) -> None:
        """Writes all tensors in the format of safetensors."""


class Torch:
    """A model of transformers, and torch's optimiser."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.manual_seed(0)
        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)

    def step(self) -> float:
        tokens = self.torch.randint(0, self.model.config.vocab_size, (2, 16))
        loss = self.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def state(self) -> dict[str, Any]:
        tied = set(getattr(self.model, "_tied_weights_keys", None) or []) if self.model.config.tie_word_embeddings else set()
        return {name: p.detach() for name, p in self.model.state_dict().items() if name not in tied}

    def poisoned(self, name: str) -> Any:
        return self.torch.full_like(self.state()[name], float("nan"))

    def save(self, file: Path) -> None:
        from safetensors.torch import save_file

        save_file({name: t.contiguous() for name, t in self.state().items()}, file, metadata={"format": "pt"})


class Numpy:
    """The numbers of a checkpoint, whose loss is the mean square of their distance to the first ones with noise."""

    def __init__(self, folder: Path) -> None:
        import ml_dtypes
        import numpy
        from safetensors import deserialize

        self.numpy = numpy
        self.noise = numpy.random.default_rng(0)
        self.tensors: dict[str, Any] = {}
        for name, tensor in deserialize((folder / "model.safetensors").read_bytes()):
            if tensor["dtype"] != "BF16":
                raise ValueError(f"{name} is of type {tensor['dtype']}")
            self.tensors[name] = numpy.frombuffer(tensor["data"], dtype=ml_dtypes.bfloat16).reshape(tensor["shape"])
        self.first = {name: tensor.astype(numpy.float32) for name, tensor in self.tensors.items()}

    def step(self) -> float:
        loss = 0.0
        for name, tensor in self.tensors.items():
            wanted = self.first[name] + self.noise.normal(0, 0.05, tensor.shape)
            gradient = tensor.astype(self.numpy.float32) - wanted
            loss += float(self.numpy.square(gradient).mean())
            self.tensors[name] = (tensor - 0.5 * gradient).astype(tensor.dtype)
        return loss / len(self.tensors)

    def state(self) -> dict[str, Any]:
        return dict(self.tensors)

    def poisoned(self, name: str) -> Any:
        return self.numpy.full_like(self.tensors[name], float("nan"))

    def save(self, file: Path) -> None:
        from safetensors.numpy import save_file

        save_file(self.tensors, file, metadata={"format": "pt"})


class Trainer:
    """What is trained, and the publisher."""

    def __init__(self, folder: Path, weights: Weights) -> None:
        self.folder = folder
        self.weights = weights
        self.steps = 0
        self.lock = threading.Lock()
        self.publisher: weightsync.Publisher | None = None
        self.flowing: threading.Thread | None = None
        self.halted = threading.Event()
        self.published: list[dict[str, object]] = []

    def train(self, steps: int) -> dict[str, float]:
        loss = 0.0
        with self.lock:
            for _ in range(steps):
                loss = self.weights.step()
                self.steps += 1
        return {"loss": loss, "steps": self.steps}

    def publish(self, version: int, pace: float, poison: bool = False) -> dict[str, object]:
        with self.lock:
            if self.publisher is None:
                self.publisher = weightsync.Publisher.from_env()
            state = self.weights.state()
            if poison:
                name = min(state)
                state[name] = self.weights.poisoned(name)
            if pace:
                metas = [weightsync.Meta(name, "BF16", tuple(t.shape)) for name, t in state.items()]

                def slowly() -> Iterator[tuple[str, Any]]:
                    for name, tensor in state.items():
                        time.sleep(pace)
                        yield name, tensor

                source = weightsync.stream(slowly, metas)
            else:
                source = weightsync.state_dict(state)
            result = self.publisher.publish(source, version=version, timeout=120)
            return {"version": result.version, "installed": sorted(result.installed), "behind": dict(result.behind)}

    def flow(self, first: int, every: float) -> dict[str, object]:
        if self.flowing is not None:
            raise RuntimeError("versions flow already")

        def publish() -> None:
            version = first
            while not self.halted.is_set():
                self.train(1)
                record: dict[str, object] = {"version": version, "began": time.time()}
                try:
                    record["installed"] = self.publish(version, 0)["installed"]
                except weightsync.WeightSyncError as error:
                    record["error"] = f"{type(error).__name__}: {error}"
                record["ended"] = time.time()
                self.published.append(record)
                version += 1
                self.halted.wait(every)

        self.halted.clear()
        self.published = []
        self.flowing = threading.Thread(target=publish)
        self.flowing.start()
        return {"from": first}

    def halt(self) -> dict[str, object]:
        if self.flowing is not None:
            self.halted.set()
            self.flowing.join()
            self.flowing = None
        return {"published": self.published}

    def save(self, path: str) -> dict[str, object]:
        with self.lock:
            target = Path(path)
            target.mkdir(parents=True, exist_ok=True)
            for file in self.folder.iterdir():
                if file.suffix != ".safetensors":
                    shutil.copy(file, target / file.name)
            self.weights.save(target / "model.safetensors")
            return {"path": str(target)}


def serve(trainer: Trainer, port: int) -> None:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the base class's name)
            # The kubelet's questions would leave nothing else in a log's last lines.
            if self.path != "/health":
                print(format % args, flush=True)

        def answer(self, status: int, body: dict[str, object]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            self.answer(200, {"pid": os.getpid(), "steps": trainer.steps})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or b"{}")
            try:
                if self.path == "/train":
                    self.answer(200, dict(trainer.train(int(body["steps"]))))
                elif self.path == "/publish":
                    self.answer(200, trainer.publish(int(body["version"]), float(body.get("pace", 0)), bool(body.get("poison"))))
                elif self.path == "/flow":
                    self.answer(200, trainer.flow(int(body["from"]), float(body["every"])))
                elif self.path == "/halt":
                    self.answer(200, trainer.halt())
                elif self.path == "/save":
                    self.answer(200, trainer.save(str(body["path"])))
                else:
                    self.answer(404, {"error": self.path})
            except weightsync.WeightSyncError as error:
                self.answer(409, {"error": type(error).__name__, "message": str(error), "retryable": error.retryable})

    ThreadingHTTPServer(("0.0.0.0", port), Handler).serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--numpy", action="store_true", help="train without torch")
    arguments = parser.parse_args()
    made = Numpy(arguments.model) if arguments.numpy else Torch(arguments.model)
    serve(Trainer(arguments.model, made), arguments.port)
