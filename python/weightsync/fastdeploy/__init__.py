"""WeightSync's `checkpoint_transfer` for FastDeploy: `python -m weightsync.fastdeploy` prints the folder that goes into PYTHONPATH.

FastDeploy with `FD_USE_GDR_CHECKPOINT_TRANSFER=1` imports a package of that name in each worker (`rl/dynamic_weight_manager.py` of
PaddlePaddle/FastDeploy at 49fe57cb). The package that it was written for is not public, and where that one is installed this one must not
be in the path. So it is no top-level package of the wheel: it is found only by the folder. It imports this package for steps from memory
alone.
"""

from __future__ import annotations

from pathlib import Path


def folder() -> Path:
    """The folder that holds `checkpoint_transfer`."""
    return Path(__file__).resolve().parent
