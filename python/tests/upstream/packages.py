"""Packages of a framework without what their own first module imports, which may need a GPU."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest


def bare_packages(monkeypatch: pytest.MonkeyPatch, framework: str, *names: str) -> None:
    """Puts packages of `framework` in place that have their modules and nothing else."""
    roots = [Path(path) for path in importlib.import_module(framework).__path__]
    for name in names:
        package = ModuleType(f"{framework}.{name}")
        package.__path__ = [str(root / name.replace(".", "/")) for root in roots]
        monkeypatch.setitem(sys.modules, package.__name__, package)
