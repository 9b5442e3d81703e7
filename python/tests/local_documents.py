"""The two documents that `weightsync local` reads, for tests and scripts: a WeightSync object, and what runs on this host."""

from __future__ import annotations

import contextlib
import json
import random
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

VERSION = "weightsync.dev/v1alpha1"


def free_port() -> int:
    """A port of this host that is free at this moment.

    Another process of the tests is unlikely to take it before its server does: it is drawn at random, from ports that the kernel gives
    to no connection by itself.
    """
    while True:
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port := random.randrange(15_000, 30_000)))
            return port


def simulated_vllm(program: str | Path, model: str | Path, port: int) -> list[str]:
    """The command of a simulated engine; `program` is weightsync-dev."""
    return [str(program), "simulate-engine", "--engine", "vllm", "--model", str(model), "--port", str(port)]


def write_documents(
    file: Path,
    name: str,
    rollouts: Sequence[dict[str, Any]],
    *,
    state: Path,
    engine: str = "VLLM",
    trainer_gpu: str | None = None,
    **spec: Any,
) -> Path:
    """Writes both into `file`, which it returns: one role of rollouts with engines of one kind, and `spec` over that.

    A rollout has what LocalProcesses gives it: name, port, and perhaps command, environment and gpus.
    """
    whole = {
        "trainer": {"selector": {"matchLabels": {"part": "trainer"}}},
        "rollouts": [{"name": "rollouts", "selector": {"matchLabels": {"part": "rollout"}}, "engine": {"kind": engine}}],
        **spec,
    }
    weightsync = {"apiVersion": VERSION, "kind": "WeightSync", "metadata": {"name": name}, "spec": whole}
    processes = {"apiVersion": VERSION, "kind": "LocalProcesses", "directory": str(state), "rollouts": list(rollouts)}
    if trainer_gpu is not None:
        processes["trainer"] = {"gpu": trainer_gpu}
    file.write_text(f"{json.dumps(weightsync)}\n---\n{json.dumps(processes)}\n")
    return file
