"""Which tensors vLLM itself loads from a directory: the table by which agents compare a version with an engine's checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator

TABLE = Path(__file__).resolve().parents[2] / "crates/core/src/weights/tests/loaded_files.json"


def loaded(folder: Path) -> set[str] | None:
    """Names of the tensors that vLLM reads; None if it reads no safetensors file, or refuses the directory."""
    loader = DefaultModelLoader(LoadConfig(use_tqdm_on_load=False))
    try:
        _, files, safetensors, _ = loader._prepare_weights(str(folder), None, None, True, None)
    except FileNotFoundError:
        return None
    return {name for name, _ in safetensors_weights_iterator(files, False)} if safetensors else None


@pytest.mark.parametrize("case", json.loads(TABLE.read_text()), ids=lambda case: case["what"])
def test_vllm_loads_what_the_table_says(case: dict[str, Any], tmp_path: Path) -> None:
    for name, tensors in case["files"].items():
        if name.endswith(".safetensors"):
            save_file({tensor: torch.ones(1) for tensor in tensors}, tmp_path / name)
        else:
            (tmp_path / name).write_bytes(b"not read")
    if case["index"] is not None:
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": case["index"]}))
    assert loaded(tmp_path) == (None if case["loads"] is None else set(case["loads"]))
