"""A checkpoint that a trainer wrote into a folder, as a version."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ..publisher import Publisher
from ..result import Result
from ..sources import stream


def publish_folder(publisher: Publisher, folder: Path, *, version: int | None = None, timeout: float) -> Result:
    """Publishes the safetensors files in `folder`, one tensor at a time from the page cache; returns when enough replicas serve it.

    Without `version` it is the number at the end of the folder's name.
    """
    if version is None:
        number = re.search(r"(\d+)$", folder.name)
        if number is None:
            raise ValueError(f"{folder.name} ends with no number, which would be the version")
        version = int(number[1])
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ValueError(f"{folder} has no safetensors files")
    with ExitStack() as opened:
        files = [opened.enter_context(_open(path)) for path in paths]
        places = [(name, file) for file in files for name in file.keys()]  # noqa: SIM118, it has no __iter__
        slices = [(name, file.get_slice(name)) for name, file in places]
        metas = [(name, part.get_dtype(), tuple(part.get_shape())) for name, part in slices]

        def tensors() -> Iterator[tuple[str, Any]]:
            return ((name, file.get_tensor(name)) for name, file in places)

        return publisher.publish(stream(tensors, metas), version=version, timeout=timeout)


def _open(path: Path) -> Any:
    from safetensors import safe_open

    return safe_open(path, framework="pt")
