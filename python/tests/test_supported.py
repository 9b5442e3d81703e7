"""The warning about releases of other packages that the client was not run with."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from conftest import LIMIT, ROOT

from weightsync import _supported


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """As in a process that has checked nothing."""
    _supported.check.cache_clear()
    yield
    _supported.check.cache_clear()


@pytest.mark.parametrize("found", ["0.31.9", "0.34.0", "0.34.0rc1", "1.0", "dev"])
def test_a_release_outside_the_range_is_named_once(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: found)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(2):
            _supported.check("vllm")
    assert [warning.category for warning in warned] == [_supported.UnsupportedVersion]
    assert [str(warning.message) for warning in warned] == [
        f"weightsync was run with vllm from 0.32 to before 0.34, and finds {found}: see docs/integrations"
    ]


@pytest.mark.parametrize("found", ["0.32", "0.32.0", "0.33.1.dev2+g12ab.cpu", "0.33.9"])
def test_a_release_inside_the_range_is_not_named(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: found)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _supported.check("vllm")


def test_a_package_that_is_not_there_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(package: str) -> str:
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(metadata, "version", missing)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _supported.check("verl")


@pytest.mark.parametrize(
    ("module", "package"), [("weightsync.integrations.trl", "trl"), ("weightsync.integrations.vllm", "vllm"), ("weightsync.vllm", "vllm")]
)
def test_importing_a_module_names_the_release(tmp_path: Path, module: str, package: str) -> None:
    # vLLM takes another build of its kernels, which not every processor runs, when its version does not say "cpu".
    version = "99.0.0+cpu"
    (tmp_path / f"{package}-{version}.dist-info").mkdir()
    (tmp_path / f"{package}-{version}.dist-info/METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT / 'python'}"}
    command = [sys.executable, "-c", f"import {module}"]
    ended = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, check=True, timeout=10 * LIMIT)
    first, end = _supported.RANGES[package]
    assert f"weightsync was run with {package} from {first} to before {end}, and finds {version}" in ended.stderr


def test_the_page_has_the_ranges_of_the_module() -> None:
    page = (ROOT / "docs/integrations/README.md").read_text()
    rows = page.split("| package | from | to before |\n|---|---|---|\n")[1].split("\n\n")[0]
    assert rows.splitlines() == [f"| {package} | {first} | {end} |" for package, (first, end) in _supported.RANGES.items()]
