"""The console scripts: each becomes a program that the wheel carries."""

from __future__ import annotations

import os
import sys
from pathlib import Path

PROGRAMS = Path(__file__).parent / "bin"


def main() -> None:
    """Replaces this process by the program of the same name, with the same arguments."""
    become("weightsync")


def dev() -> None:
    """As `main`, for `weightsync-dev`."""
    become("weightsync-dev")


def become(name: str) -> None:
    program = PROGRAMS / name
    if not program.exists():
        sys.exit(f"this installation of the Python package carries no {name} program: install a wheel, or run the program itself")
    os.execv(program, [str(program), *sys.argv[1:]])
