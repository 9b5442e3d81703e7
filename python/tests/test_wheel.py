"""The wheel carries the programs, and all are of one version."""

from __future__ import annotations

import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

from conftest import LIMIT, ROOT

import weightsync._binary


def test_wheel_installs_fresh_and_runs_the_program(programs: Path, tmp_path: Path) -> None:
    carried = [programs / name for name in ("weightsync", "weightsync-dev")]
    build = [sys.executable, str(ROOT / "python" / "build_wheel.py"), "--no-isolation", *map(str, carried), str(tmp_path)]
    wheel = Path(subprocess.run(build, check=True, capture_output=True, text=True, timeout=3 * LIMIT).stdout.strip())
    named = re.fullmatch(r"weightsync-\d+\.\d+\.\d+-py3-none-manylinux_2_(\d+)_\w+\.whl", wheel.name)
    assert named is not None, wheel.name
    # Found in another way than the one that the wheel was named by: the newest version that stands in the file's text.
    texts = [text for program in carried for text in re.findall(rb"\0GLIBC_2\.(\d+)(?=\0|\.)", program.read_bytes())]
    assert int(named.group(1)) == max(map(int, texts)), "the tag claims another glibc than the program needs"
    with zipfile.ZipFile(wheel) as files:
        for program in carried:
            assert files.read(f"weightsync/bin/{program.name}") == program.read_bytes()
    venv.create(tmp_path / "venv")
    fresh = tmp_path / "venv" / "bin"
    pip = [sys.executable, "-m", "pip", "--python", fresh / "python", "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*pip, wheel], check=True, timeout=3 * LIMIT)
    # An empty environment: PYTHONPATH would put the source tree before what is installed.
    for program in carried:
        asked = subprocess.run([fresh / program.name, "--version"], check=True, capture_output=True, text=True, timeout=LIMIT, env={})
        assert asked.stdout.split() == [program.name, wheel.name.split("-")[1]]
    # Neither torch nor numpy is there.
    modules = ", ".join(f"weightsync.integrations.{name}" for name in ("fsdp2", "megatron", "xtuner"))
    subprocess.run([fresh / "python", "-c", f"import weightsync, {modules}"], check=True, timeout=LIMIT, env={})
    code = "import weightsync, importlib.resources as r; print(r.files('weightsync').joinpath('py.typed').is_file())"
    typed = subprocess.run([fresh / "python", "-c", code], check=True, capture_output=True, text=True, timeout=LIMIT, env={})
    assert typed.stdout.strip() == "True"


def test_wheel_without_programs_has_the_client_and_no_script(tmp_path: Path) -> None:
    build = [sys.executable, str(ROOT / "python" / "build_wheel.py"), "--no-isolation", str(tmp_path)]
    wheel = Path(subprocess.run(build, check=True, capture_output=True, text=True, timeout=3 * LIMIT).stdout.strip())
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as files:
        names = files.namelist()
        (entries,) = [files.read(name).decode() for name in names if name.endswith("/entry_points.txt")]
    assert "weightsync/publisher.py" in names
    assert any(name.endswith("/LICENSE") for name in names)
    assert not any(name.startswith("weightsync/bin") for name in names)
    assert "vllm.general_plugins" in entries
    assert "console_scripts" not in entries


def test_python_and_rust_have_one_version() -> None:
    versions = {
        file: re.search(r'^version = "(.+)"$', (ROOT / file).read_text(), re.MULTILINE) for file in ("Cargo.toml", "python/pyproject.toml")
    }
    assert len({found.group(1) for found in versions.values() if found is not None}) == 1
    assert None not in versions.values()


def test_a_source_tree_without_the_program_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import weightsync._binary as b; b.main()"],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env={"PYTHONPATH": str(Path(weightsync._binary.__file__).parents[1])},
    )
    assert done.returncode == 1
    assert "carries no weightsync program" in done.stderr
