"""Build a wheel with programs in it: `build_wheel.py PROGRAM... FOLDER` prints the path of the wheel.

The platform tag says what the programs need: the newest version of a glibc symbol that one is linked against (PEP 600). Without programs it
is the wheel for other platforms: the client alone.
"""

from __future__ import annotations

import argparse
import platform
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent

VERSIONS_NEEDED = 0x6FFFFFFE
"""The section type SHT_GNU_verneed (Linux Standard Base, symbol versioning)."""


def symbol_versions(binary: Path) -> set[str]:
    """The symbol versions that the loader must find to start a program: the section SHT_GNU_verneed of a 64-bit little-endian ELF file."""
    data = binary.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        raise SystemExit(f"{binary} is no 64-bit little-endian ELF program")
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count = struct.unpack_from("<HH", data, 0x3A)
    # Type, offset, the section with its strings, and entries of each section.
    sections = [struct.unpack_from("<4xI16xQ8xII", data, table + size * number) for number in range(count)]
    names: set[str] = set()
    for kind, offset, strings, libraries in sections:
        if kind != VERSIONS_NEEDED:
            continue
        for _ in range(libraries):
            symbols, first, next_library = struct.unpack_from("<2xH4xII", data, offset)
            symbol = offset + first
            for _ in range(symbols):
                name, next_symbol = struct.unpack_from("<8xII", data, symbol)
                start = sections[strings][1] + name
                names.add(data[start : data.index(b"\0", start)].decode())
                symbol += next_symbol
            offset += next_library
    return names


def platform_tag(binaries: list[Path]) -> str:
    """`manylinux_2_34_x86_64` for programs whose newest symbol is of glibc 2.34."""
    needed: list[int] = []
    for binary in binaries:
        of_one = [int(found.group(1)) for found in map(re.compile(r"GLIBC_2\.(\d+)").match, symbol_versions(binary)) if found]
        if not of_one:
            raise SystemExit(f"{binary} is not linked against glibc")
        needed += of_one
    # manylinux_2_17 is the oldest that pip knows by this name.
    return f"manylinux_2_{max(17, *needed)}_{platform.machine()}"


def build(binaries: list[Path], folder: Path, isolated: bool) -> Path:
    """Builds in a copy of the package, so that the source tree stays as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as staging:
        tree = Path(staging) / "python"
        tree.mkdir()
        project = (HERE / "pyproject.toml").read_text()
        if not binaries:
            # A console script without its program could only fail.
            project = re.sub(r"^\[project\.scripts\]\n(?:[^\[\n].*\n)+", "", project, flags=re.MULTILINE)
        (tree / "pyproject.toml").write_text(project)
        shutil.copy(HERE.parent / "LICENSE", tree)
        shutil.copytree(HERE / "weightsync", tree / "weightsync", ignore=shutil.ignore_patterns("__pycache__", "bin"))
        for binary in binaries:
            (tree / "weightsync" / "bin").mkdir(exist_ok=True)
            shutil.copy(binary, tree / "weightsync" / "bin")
            (tree / "weightsync" / "bin" / binary.name).chmod(0o755)
        command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "--wheel-dir", str(Path(staging) / "out")]
        command += [f"--config-settings=--build-option=--plat-name={platform_tag(binaries)}"] if binaries else []
        command += [] if isolated else ["--no-build-isolation"]
        subprocess.run([*command, str(tree)], check=True, stdout=sys.stderr)
        (wheel,) = (Path(staging) / "out").glob("weightsync-*.whl")
        return Path(shutil.copy(wheel, folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("binaries", type=Path, nargs="*", metavar="program")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--no-isolation", action="store_true", help="use the setuptools of this interpreter")
    arguments = parser.parse_args()
    print(build(arguments.binaries, arguments.folder, not arguments.no_isolation))


if __name__ == "__main__":
    main()
