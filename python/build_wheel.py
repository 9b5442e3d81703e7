"""Build the wheel with the program in it: `build_wheel.py BINARY FOLDER` prints the path of the wheel.

The platform tag says what the program needs: the newest version of a glibc symbol that it is linked against (PEP 600).
"""

from __future__ import annotations

import argparse
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent


def platform_tag(binary: Path) -> str:
    """`manylinux_2_34_x86_64` for a program whose newest symbol is of glibc 2.34. Symbol versions stand as text in an ELF file."""
    needed = re.findall(rb"\0GLIBC_2\.(\d+)(?=\0|\.)", binary.read_bytes())
    if not needed:
        raise SystemExit(f"{binary} is not linked against glibc")
    # manylinux_2_17 is the oldest that pip knows by this name.
    return f"manylinux_2_{max(17, *map(int, needed))}_{platform.machine()}"


def build(binary: Path, folder: Path, isolated: bool) -> Path:
    """Builds in a copy of the package, so that the source tree stays as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as staging:
        tree = Path(staging) / "python"
        tree.mkdir()
        shutil.copy(HERE / "pyproject.toml", tree)
        shutil.copytree(HERE / "weightsync", tree / "weightsync", ignore=shutil.ignore_patterns("__pycache__", "bin"))
        (tree / "weightsync" / "bin").mkdir()
        shutil.copy(binary, tree / "weightsync" / "bin" / "weightsync")
        (tree / "weightsync" / "bin" / "weightsync").chmod(0o755)
        command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "--wheel-dir", str(Path(staging) / "out")]
        command += [f"--config-settings=--build-option=--plat-name={platform_tag(binary)}"]
        command += [] if isolated else ["--no-build-isolation"]
        subprocess.run([*command, str(tree)], check=True, stdout=sys.stderr)
        (wheel,) = (Path(staging) / "out").glob("weightsync-*.whl")
        return Path(shutil.copy(wheel, folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("binary", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--no-isolation", action="store_true", help="use the setuptools of this interpreter")
    arguments = parser.parse_args()
    print(build(arguments.binary, arguments.folder, not arguments.no_isolation))


if __name__ == "__main__":
    main()
