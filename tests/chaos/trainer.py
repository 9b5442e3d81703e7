"""A trainer's process: publishes checkpoints when it is asked to, one JSON object a line in and out, and never ends by itself.

`{"op": "publish", "version": 1, "path": "...", "gate": 2}` publishes; before the tensor `gate` is read for the first time it says
`{"event": "gate"}` and waits for `{"op": "go"}`. The outcome is `published` or `failed`.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import weightsync

PATIENCE = 60.0
"""No one opens a gate for longer than this: the test is gone."""

said = threading.Lock()
gate_open = threading.Event()


def say(**event: Any) -> None:
    """One line to the test."""
    with said:
        print(json.dumps(event), flush=True)


def tensors_of(path: Path) -> list[tuple[str, memoryview[float]]]:
    """The float32 tensors of a safetensors file, in the order of their bytes."""
    data = memoryview(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    header: dict[str, Any] = json.loads(bytes(data[8:start]))
    rows = sorted((entry["data_offsets"], name) for name, entry in header.items() if name != "__metadata__")
    return [(name, data[start + begin : start + end].cast("f")) for (begin, end), name in rows]


def publish(publisher: weightsync.Publisher, version: int, path: str, gate: int | None) -> None:
    """Publishes one checkpoint and says what became of it."""
    tensors = tensors_of(Path(path) / "model.safetensors")
    waits = [gate is not None]

    def read() -> Iterator[tuple[str, memoryview[float]]]:
        for number, tensor in enumerate(tensors):
            if waits[0] and number == gate:
                waits[0] = False
                say(event="gate", version=version)
                gate_open.wait(PATIENCE)
            yield tensor

    metas = [(name, "F32", (len(tensor),)) for name, tensor in tensors]
    try:
        result = publisher.publish(weightsync.stream(read, metas), version, timeout=15)
        say(event="published", version=version, result=result.plain())
    except weightsync.WeightSyncError as error:
        kind, member = type(error).__name__, error.member or ""
        say(event="failed", version=version, kind=kind, message=str(error), member=member, retryable=error.retryable)


def main() -> None:
    """Until the test closes our input."""
    publisher = weightsync.Publisher.from_env()
    say(event="started")
    for line in sys.stdin:
        order = json.loads(line)
        if order["op"] == "go":
            gate_open.set()
        else:
            gate_open.clear()
            words = (publisher, order["version"], order["path"], order["gate"])
            threading.Thread(target=publish, args=words, daemon=True).start()


if __name__ == "__main__":
    main()
