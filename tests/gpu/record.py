"""What a run writes down: one line of JSON for each thing that it saw, and the names of those that were not as they must be."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Part of an error that is kept, in characters, from its end: tracebacks say what happened in their last lines.
KEPT = 9000


class Record:
    """A file of results, and what failed so far."""

    def __init__(self, file: Path) -> None:
        self.failed, self.begun = list[str](), time.monotonic()
        self.file = file.open("a")

    def note(self, what: str, **values: Any) -> None:
        line = json.dumps({"what": what, "at": round(time.monotonic() - self.begun, 1)} | values)
        print(line, flush=True)
        self.file.write(line + "\n")
        self.file.flush()

    def check(self, what: str, good: bool, **values: Any) -> None:
        self.note(what, good=good, **values)
        if not good:
            self.failed.append(what)

    def attempt(self, what: str, act: Callable[[], Any]) -> Any:
        """What goes wrong is written down, and the next thing is done."""
        try:
            return act()
        except Exception as error:
            self.check(what, False, error=f"{type(error).__name__}: {error}"[-KEPT:])
            return None

    def end(self) -> None:
        """Says what failed, and ends the program by it."""
        print("failed: " + ", ".join(self.failed) if self.failed else "all as it must be", flush=True)
        raise SystemExit(1 if self.failed else 0)
