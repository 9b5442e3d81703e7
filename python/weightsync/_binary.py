"""The console script: becomes the program that the wheel carries."""

from __future__ import annotations

import os
import sys
from pathlib import Path

BINARY = Path(__file__).parent / "bin" / "weightsync"


def main() -> None:
    """Replaces this process by the program, with the same arguments."""
    if not BINARY.exists():
        sys.exit("this installation of the Python package carries no weightsync program: install a wheel, or run the program itself")
    os.execv(BINARY, [str(BINARY), *sys.argv[1:]])
