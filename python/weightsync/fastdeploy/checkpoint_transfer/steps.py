"""Where the steps of a worker come from: a folder, or the memory of the agent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import files

MEMORY = "memory"


class Steps:
    """The steps of one worker."""

    def __init__(self, directory: str, updates: str, rank: int, ranks: int) -> None:
        if updates not in ("folder", MEMORY):
            raise ValueError(f'"updates" of --rsync_config is "folder" or "memory", not {updates!r}')
        self._folder, self._from_memory = Path(directory), updates == MEMORY
        self._rank, self._ranks = rank, ranks

    def look(self) -> None:
        """The folder is there, and what the way needs."""
        if not self._folder.is_absolute() or not self._folder.is_dir():
            raise NotADirectoryError(f'"directory" of --rsync_config is no folder of steps: {str(self._folder)!r}')
        if self._from_memory:
            from . import memory

            memory.look()

    def tensors(self, step_id: str) -> Iterator[tuple[str, Any]]:
        """Names and tensors in host memory."""
        if self._from_memory:
            from . import memory

            if step_id.startswith(memory.PREFIX):
                return memory.tensors(step_id, self._rank, self._ranks)
        return files.tensors(self._folder, step_id)
