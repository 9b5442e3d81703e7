"""A front of FastDeploy's routes around the real `DynamicWeightManager`, for tests on a processor without a GPU.

Runs as `python -m fastdeploy.entrypoints.openai.api_server`, as the real server does, so that an adapter finds its process. From upstream
and unmodified: `rl/dynamic_weight_manager.py`, the file that WEIGHTSYNC_FD_MANAGER names, and Paddle. Made here: a model of plain
parameters (`state_dict`, `load_weights`), the routes, and stand-ins for the modules that only name things. Prints a line when it serves.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import logging
import os
import sys
import threading
import types
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import paddle


def stand_ins() -> None:
    """Modules of FastDeploy and paddleformers of which the manager uses names alone; values as upstream has them."""
    envs = types.ModuleType("fastdeploy.envs")
    envs.FD_USE_GDR_CHECKPOINT_TRANSFER = os.environ.get("FD_USE_GDR_CHECKPOINT_TRANSFER", "0") == "1"  # type: ignore[attr-defined]
    config = types.ModuleType("fastdeploy.config")
    config.FDConfig = object  # type: ignore[attr-defined]
    signals = types.ModuleType("fastdeploy.inter_communicator")
    signals.ModelWeightsStatus = SimpleNamespace(NORMAL=0, UPDATING=1, CLEARING=-1, CLEARED=-2)  # type: ignore[attr-defined]
    signals.KVCacheStatus = SimpleNamespace(NORMAL=0, UPDATING=1, CLEARING=-1, CLEARED=-2)  # type: ignore[attr-defined]
    log = types.ModuleType("paddleformers.utils.log")
    log.logger = logging.getLogger("fastdeploy")  # type: ignore[attr-defined]
    importlib.import_module("fastdeploy").envs = envs  # type: ignore[attr-defined]
    sys.modules.update({each.__name__: each for each in (envs, config, signals, log)})
    sys.modules.update({name: types.ModuleType(name) for name in ("paddleformers", "paddleformers.utils")})


def manager_class() -> Any:
    spec = importlib.util.spec_from_file_location("fastdeploy.rl.dynamic_weight_manager", os.environ["WEIGHTSYNC_FD_MANAGER"])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.DynamicWeightManager


class Model:
    """Parameters alone. Its loader passes over names that it does not know, as FastDeploy's do."""

    def __init__(self, shapes: dict[str, tuple[str, list[int]]]) -> None:
        self.parameters = {name: paddle.zeros(shape, dtype=dtype) for name, (dtype, shape) in shapes.items()}

    def state_dict(self) -> dict[str, Any]:
        return self.parameters

    def load_weights(self, weights: Iterator[tuple[str, Any]]) -> None:
        for name, tensor in weights:
            if name in self.parameters:
                self.parameters[name].set_value(tensor)


class Draft(Model):
    """A model of the MTP kind: these two say which layers are its own."""

    mtp_start_layer_idx = 2
    num_mtp_layers = 1


class Engine:
    def __init__(self, words: argparse.Namespace) -> None:
        shapes = json.loads(os.environ["WEIGHTSYNC_FD_SHAPES"])
        models: list[Model] = [Model(shapes)]
        if words.mtp:
            models.append(Draft({name: shape for name, shape in shapes.items() if "layers.2." in name}))
        parallel = SimpleNamespace(
            tensor_parallel_rank=0, tensor_parallel_size=1, enable_expert_parallel=False, local_data_parallel_id=0,
            expert_parallel_rank=0, local_engine_worker_queue_port=words.port,
        )  # fmt: skip
        config = SimpleNamespace(
            load_config=SimpleNamespace(load_strategy=words.load_strategy, rsync_config=json.loads(words.rsync_config)),
            parallel_config=parallel,
            model_config=SimpleNamespace(model=str(words.model)),
        )
        self.models, self.words = models, words
        self.status = SharedMemory(create=True, size=4, name=f"model_weights_status.{words.port}")
        self.manager = manager_class()(config, models, local_rank=0)
        self.paused, self.asleep = False, False
        self.turn = threading.Lock()

    def control(self, method: str, body: dict[str, Any], tags: list[str]) -> Any:
        if method == "pause":
            self.paused = True
        elif method == "resume":
            self.paused = False
        elif method == "sleep":
            self.paused = True
            if "weight" in tags and not self.asleep:
                self.manager.clear_model_weight()
                self.asleep = True
        elif method == "wakeup":
            if "weight" in tags and self.asleep:
                self.manager.reload_model_weights()
                self.asleep = False
            self.paused = False
        elif method == "update_weights":
            if not self.paused:
                raise RuntimeError("Pause LLM Engine first before calling updating weights")
            update = self.manager.update_weights_by_rdma
            if self.manager.use_gdr_checkpoint_transfer:
                update = self.manager.update_weights_by_gdr
            answer = update(body.get("version"), body.get("verify_checksum", False))
            self.manager.finalize_update()
            return [answer]
        else:
            raise RuntimeError(f"unknown control method:{method}")
        return None

    def parameters(self) -> list[dict[str, str]]:
        """What each model holds, in hex."""
        return [{name: tensor.numpy().tobytes().hex() for name, tensor in model.parameters.items()} for model in self.models]


class Handler(BaseHTTPRequestHandler):
    engine: Engine

    def reply(self, status: int, body: Any = None) -> None:
        text = b"" if body is None else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        if status != 304:
            self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_GET(self) -> None:
        engine, path = self.engine, urlsplit(self.path).path
        with engine.turn:
            if path == "/v1/is_paused":
                self.reply(200, {"status": "success", "result": {"is_paused": engine.paused}})
            elif path == "/parameters":
                self.reply(200, {"models": engine.parameters(), "handle": id(engine.manager._gdr_ct_handle)})
            elif engine.asleep:
                self.reply(304)
            elif path == "/health":
                self.reply(200)
            elif path == "/v1/models":
                self.reply(200, {"object": "list", "data": [{"id": "m", "root": str(engine.words.model)}]})
            else:
                self.reply(404)

    def do_POST(self) -> None:
        engine, parts = self.engine, urlsplit(self.path)
        sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = json.loads(sent) if sent else {}
        if parts.path == "/v1/completions":
            return self.reply(200, {"usage": {"completion_tokens": 1}})
        method = parts.path.removeprefix("/v1/")
        with engine.turn:
            try:
                result = engine.control(method, body, parse_qs(parts.query).get("tags", ["weight,kv_cache"])[0].split(","))
            except Exception as error:
                message = f"Failed run control method {method}: Call Worker error: {error}"
                return self.reply(500, {"request_id": "control", "status": "error", "error_message": message, "result": None})
        return self.reply(200, {"request_id": "control", "status": "success", "error_message": "Success", "result": result})

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
        """Says nothing: the test reads standard output."""


def until_closed(server: ThreadingHTTPServer) -> None:
    """The test ends it by closing its standard input."""
    sys.stdin.read()
    server.shutdown()


def main() -> None:
    words = argparse.ArgumentParser()
    words.add_argument("--port", type=int, required=True)
    words.add_argument("--model", type=Path, required=True)
    words.add_argument("--dynamic-load-weight", action="store_true", required=True)
    words.add_argument("--load_strategy", required=True)
    words.add_argument("--rsync_config", default="{}")
    words.add_argument("--mtp", action="store_true")
    stand_ins()
    Handler.engine = Engine(words.parse_args())
    server = ThreadingHTTPServer(("127.0.0.1", Handler.engine.words.port), Handler)
    print("serving", flush=True)
    try:
        threading.Thread(target=until_closed, args=[server], daemon=True).start()
        server.serve_forever()
    finally:
        Handler.engine.status.close()
        Handler.engine.status.unlink()


main()
