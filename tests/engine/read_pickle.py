"""Reads pickles (one a line, in hex) that our own tests wrote, and prints what is in each as a line of JSON.

With torch it is torch that is found in them; without, stand-ins that remember their names. `--torch` demands torch.
For tests only: a pickle of
somebody else is never read.
"""

from __future__ import annotations

import json
import pickle
import sys
import types
from typing import Any

try:
    import torch
except ImportError:
    if "--torch" in sys.argv:
        raise
    torch = None


class Named:
    """Stands for a global of a module that is not here."""

    def __init__(self, name: str) -> None:
        self.name = name


class Size(tuple):  # type: ignore[type-arg]
    """Stands for torch.Size."""


class Stated:
    """Stands for a dataclass of an engine."""


def stand_ins() -> None:
    for path in ("lmdeploy.utils", "sglang.srt.weight_sync.tensor_bucket"):
        stated = type("FlattenedTensorMetadata", (Stated,), {"__module__": path})
        add(path, {"FlattenedTensorMetadata": stated})
    if torch is None:
        dtypes = "bool uint8 int8 float8_e5m2 float8_e4m3fn float8_e8m0fnu float8_e4m3fnuz float8_e5m2fnuz int16 uint16"
        dtypes += " float16 bfloat16 int32 uint32 float32 complex64 float64 int64 uint64"
        plain: dict[str, Any] = {name: Named(f"torch.{name}") for name in dtypes.split()}
        add("torch", plain | {"Size": Size, "Tensor": Named("torch.Tensor")})
        add("torch.storage", {"TypedStorage": Named("torch.storage.TypedStorage")})
        rebuild = Named("torch.multiprocessing.reductions.rebuild_cuda_tensor")
        add("torch.multiprocessing.reductions", {"rebuild_cuda_tensor": rebuild})


def add(path: str, names: dict[str, Any]) -> None:
    parts = path.split(".")
    for end in range(1, len(parts) + 1):
        sys.modules.setdefault(".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
    for name, value in names.items():
        setattr(sys.modules[path], name, value)


def plain(found: Any) -> Any:
    if found is None or isinstance(found, bool | int | str):
        return found
    if isinstance(found, bytes):
        return {"bytes": found.hex()}
    if isinstance(found, Size) or (torch is not None and isinstance(found, torch.Size)):
        return {"size": list(found)}
    if isinstance(found, tuple):
        return {"tuple": [plain(item) for item in found]}
    if isinstance(found, list):
        return [plain(item) for item in found]
    if isinstance(found, dict):
        return {"dict": {key: plain(value) for key, value in found.items()}}
    if isinstance(found, Stated):
        kind = type(found)
        return {"class": f"{kind.__module__}.{kind.__qualname__}"} | {k: plain(v) for k, v in vars(found).items()}
    if torch is not None and isinstance(found, torch.dtype):
        return {"dtype": str(found)}
    if isinstance(found, Named):
        last = found.name.rsplit(".", 1)[-1]
        is_dtype = found.name.count(".") == 1 and last[0].islower()
        return {"dtype" if is_dtype else "global": found.name}
    return {"global": f"{found.__module__}.{found.__qualname__}"}


def main() -> None:
    stand_ins()
    for line in sys.stdin:
        print(json.dumps(plain(pickle.loads(bytes.fromhex(line)))))


main()
