"""The group code of SGLang, LMDeploy and vLLM, imported from the files of their published wheels.

`engine_code.py pack OUT WHEEL...` writes an archive of the files named in REAL, with each wheel's RECORD; `use(ENGINE, FOLDER)` makes them
importable from where it was unpacked, after every file was compared with the digest that the wheel's own RECORD has of it. What those files
import next to them is not there: packages become empty ones, whose `__init__` does not run, and every other module a stand-in whose names
are classes without anything in them. One that is used by the group code ends the rank with an error.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.abc
import importlib.machinery
import io
import sys
import tarfile
import types
import zipfile
from collections.abc import Sequence
from pathlib import Path

# The modules that are run, each from the wheel's own file.
REAL = {
    "sglang": [
        "sglang.srt.environ",
        "sglang.srt.model_executor.model_runner_components.weight_updater",
        "sglang.srt.utils",
        "sglang.srt.utils.common",
        "sglang.srt.utils.network",
        "sglang.srt.utils.patch_torch",
        "sglang.srt.weight_sync.tensor_bucket",
    ],
    "lmdeploy": [
        "lmdeploy.pytorch.engine.model_agent.agent",
        "lmdeploy.utils",
    ],
    "vllm": [
        "vllm.distributed.device_communicators.pynccl",
        "vllm.distributed.device_communicators.pynccl_wrapper",
        "vllm.distributed.utils",
        "vllm.distributed.weight_transfer.base",
        "vllm.distributed.weight_transfer.nccl_common",
        "vllm.distributed.weight_transfer.nccl_engine",
        "vllm.distributed.weight_transfer.packed_tensor",
        "vllm.envs",
        "vllm.logger",
        "vllm.logging_utils",
        "vllm.logging_utils.formatter",
        "vllm.logging_utils.lazy",
        "vllm.logging_utils.log_time",
        "vllm.logging_utils.torch_tensor",
        "vllm.logging_utils.uvicorn_logging",
        "vllm.model_executor.model_loader.mtp_validation",
        "vllm.platforms.interface",
        "vllm.utils",
        "vllm.utils.import_utils",
        "vllm.utils.nccl",
        "vllm.utils.network_utils",
        "vllm.utils.platform_utils",
        "vllm.utils.system_utils",
        "vllm.utils.torch_utils",
        "vllm.utils.torch_version",
        "vllm.v1.attention.backends.registry",
    ],
}

# Of others, which those files import and the group code does not use; stand-ins too, so that it is the same on every machine.
OTHERS = ["fastapi", "orjson", "pydantic", "starlette", "zmq"]


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Says what a module is: the wheel's file, an empty package on the way to one, or a stand-in."""

    def __init__(self, engine: str, folder: Path) -> None:
        self.engine, self.folder, self.real = engine, folder, set(REAL[engine])

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        top = name.partition(".")[0]
        if top in OTHERS:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        if top != self.engine:
            return None
        place = self.folder.joinpath(*name.split("."))
        if name in self.real:
            return importlib.machinery.PathFinder.find_spec(name, [str(place.parent)])
        spec = importlib.machinery.ModuleSpec(name, self, is_package=True)
        if any(real.startswith(f"{name}.") for real in self.real):
            spec.submodule_search_locations = [str(place)]
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        def stand_in(name: str) -> type:
            if name.startswith("__"):
                raise AttributeError(name)
            made = type(name, (), {"__module__": module.__name__})
            setattr(module, name, made)
            return made

        module.__dict__["__getattr__"] = stand_in


def record(folder: Path, engine: str) -> dict[str, str]:
    """The digests of a wheel's files, by its RECORD."""
    (file,) = folder.glob(f"{engine}-*.dist-info/RECORD")
    return {row[0]: row[1] for row in csv.reader(file.read_text().splitlines())}


def digest(data: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def file_of(names: set[str], module: str) -> str:
    """The file of a module in a wheel."""
    path = module.replace(".", "/")
    found = [name for name in (f"{path}.py", f"{path}/__init__.py") if name in names]
    if len(found) != 1:
        raise LookupError(f"the wheel has no file for {module}")
    return found[0]


def use(engine: str, folder: Path) -> str:
    """Makes the engine's modules importable; gives its version."""
    digests = record(folder, engine)
    for module in REAL[engine]:
        file = file_of(set(digests), module)
        if digest((folder / file).read_bytes()) != digests[file]:
            raise ValueError(f"{file} is not the wheel's")
    sys.meta_path.insert(0, Finder(engine, folder))
    # After everything else: pybase64, where the machine has none.
    sys.path.append(str(folder))
    (info,) = folder.glob(f"{engine}-*.dist-info")
    return info.name.removesuffix(".dist-info")


def pack(out: Path, wheels: list[Path], alongside: list[Path]) -> None:
    """An archive of what `use` needs, and of files next to it."""
    files: dict[str, bytes] = {file.name: file.read_bytes() for file in alongside}
    for wheel in wheels:
        engine = wheel.name.partition("-")[0]
        with zipfile.ZipFile(wheel) as zipped:
            names = set(zipped.namelist())
            wanted = [name for name in names if name.startswith("pybase64/")] if engine == "pybase64" else []
            wanted += [file_of(names, module) for module in REAL.get(engine, [])]
            wanted += [name for name in names if name.endswith((".dist-info/RECORD", ".dist-info/METADATA"))]
            files |= {name: zipped.read(name) for name in wanted}
    with tarfile.open(out, "w:xz") as tar:
        for name in sorted(files):
            info = tarfile.TarInfo(name)
            info.size = len(files[name])
            info.mode = 0o644
            tar.addfile(info, io.BytesIO(files[name]))


if __name__ == "__main__":
    given = [Path(argument) for argument in sys.argv[2:]]
    pack(given[0], [path for path in given[1:] if path.suffix == ".whl"], [path for path in given[1:] if path.suffix != ".whl"])
