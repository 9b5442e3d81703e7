#!/usr/bin/env python3
"""Write a CycloneDX SBOM of programs, and of an image's files: what each part is, its version, license and origin.

    sbom.py NAME VERSION OUT.json PACKAGE... [--tree IMAGE_FILES]

PACKAGE is a package of this workspace: the crates that its programs are linked from are listed, without those that only the compiler uses.
IMAGE_FILES is the image's folder: each of its files is listed, and the Debian or Python package that it is from, where one is known.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import uuid
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

Component = dict[str, Any]


def output_of(*command: str) -> str:
    """What a program prints; an error of its own ends this one."""
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def license_of(expression: str) -> list[dict[str, str]]:
    """An SPDX expression. Old crates write a slash for OR."""
    return [{"expression": re.sub(r"\s*/\s*", " OR ", expression)}] if expression else []


def crates(packages: list[str]) -> tuple[list[Component], list[dict[str, Any]], list[str]]:
    """The crates of these packages, on what each depends, and the references of the packages themselves."""
    host = re.search(r"^host: (.+)$", output_of("rustc", "-vV"), re.MULTILINE)
    assert host is not None, "rustc names its host"
    metadata = json.loads(output_of("cargo", "metadata", "--locked", "--format-version", "1", "--filter-platform", host.group(1)))
    locked = re.findall(
        r'^name = "(.+)"\nversion = "(.+)"\nsource = ".+"\nchecksum = "(.+)"', (ROOT / "Cargo.lock").read_text(), re.MULTILINE
    )
    checksums = {(name, version): checksum for name, version, checksum in locked}
    known = {package["id"]: package for package in metadata["packages"]}
    nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
    linked: dict[str, list[str]] = {}
    roots = [package["id"] for package in metadata["packages"] if package["source"] is None and package["name"] in packages]
    assert len(roots) == len(packages), f"not all of {packages} are packages of this workspace"
    waiting = list(roots)
    while waiting:
        crate = waiting.pop()
        if crate in linked:
            continue
        # Not in the program: what tests and build scripts use, and macros.
        normal = [found["pkg"] for found in nodes[crate]["deps"] if any(kind["kind"] is None for kind in found["dep_kinds"])]
        linked[crate] = [one for one in normal if not any("proc-macro" in target["kind"] for target in known[one]["targets"])]
        waiting += linked[crate]

    def reference(crate: str) -> str:
        return f"pkg:cargo/{known[crate]['name']}@{known[crate]['version']}"

    components: list[Component] = []
    for crate in linked:
        package = known[crate]
        component: Component = {
            "type": "library",
            "bom-ref": reference(crate),
            "name": package["name"],
            "version": package["version"],
            "purl": reference(crate),
            "licenses": license_of(package["license"] or ""),
        }
        checksum = checksums.get((package["name"], package["version"]))
        if checksum:
            component["hashes"] = [{"alg": "SHA-256", "content": checksum}]
        if package["repository"]:
            component["externalReferences"] = [{"type": "vcs", "url": package["repository"]}]
        components.append(component)
    edges = [{"ref": reference(crate), "dependsOn": sorted({reference(one) for one in needed})} for crate, needed in linked.items()]
    release = re.search(r"^release: (.+)$", output_of("rustc", "-vV"), re.MULTILINE)
    assert release is not None, "rustc names its release"
    rust = {"type": "library", "bom-ref": "rust-std", "name": "rust-std", "version": release.group(1)}
    rust = {**rust, "licenses": license_of("MIT OR Apache-2.0")}
    return [*components, rust], edges, [reference(root) for root in roots]


def debian_package(file: Path) -> Component | None:
    """The installed package of Debian or Ubuntu that has a file. None on other systems, and for files of no package."""
    for name in (file, Path(str(file).removeprefix("/usr"))):
        try:
            found = subprocess.run(["dpkg-query", "--search", str(name)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        except FileNotFoundError:
            return None
        if found.returncode == 0:
            package = found.stdout.split(": ")[0].split(",")[0]
            fields = output_of("dpkg-query", "--show", "--showformat", "${Package} ${Version} ${Architecture}", package).split()
            return deb(*fields)
    return None


def deb(name: str, version: str, architecture: str) -> Component:
    system = re.search(r"^ID=\"?(\w+)", Path("/etc/os-release").read_text(), re.MULTILINE)
    purl = f"pkg:deb/{system.group(1) if system else 'debian'}/{name}@{version.replace('+', '%2B')}?arch={architecture}"
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def image_files(tree: Path, packages: list[Component]) -> list[Component]:
    """The files of an image, and the packages that they are from."""
    components = {package["bom-ref"]: package for package in packages}
    for file in sorted(tree.rglob("*")):
        if file.is_symlink() or not file.is_file():
            continue
        inside = f"/{file.relative_to(tree)}"
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        name = {"type": "file", "bom-ref": f"file:{inside}", "name": inside, "hashes": [{"alg": "SHA-256", "content": digest}]}
        components[f"file:{inside}"] = name
        here = Path(inside)
        if here.exists() and (package := debian_package(here.resolve())) is not None:
            components[package["bom-ref"]] = package
        wheel = re.fullmatch(r"(.+)-(.+)\.dist-info", here.parent.name)
        if wheel is not None and here.name == "METADATA":
            purl = f"pkg:pypi/{wheel.group(1).replace('_', '-')}@{wheel.group(2)}"
            components[purl] = {"type": "library", "bom-ref": purl, "name": wheel.group(1), "version": wheel.group(2), "purl": purl}
    return [components[name] for name in sorted(components)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("version")
    parser.add_argument("out", type=Path)
    parser.add_argument("packages", nargs="+", metavar="package")
    parser.add_argument("--tree", type=Path, metavar="IMAGE_FILES")
    unpacked = "a package of Debian that was unpacked, not installed"
    parser.add_argument("--deb", action="append", default=[], metavar="NAME=VERSION=ARCHITECTURE", help=unpacked)
    arguments = parser.parse_args()

    components, edges, roots = crates(arguments.packages)
    if arguments.tree is not None:
        components += image_files(arguments.tree, [deb(*one.split("=")) for one in arguments.deb])
    whole = f"{arguments.name}@{arguments.version}"
    others = [component["bom-ref"] for component in components if not component["bom-ref"].startswith("pkg:cargo/")]
    bom = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "container" if arguments.tree is not None else "application",
                "bom-ref": whole,
                "name": arguments.name,
                "version": arguments.version,
                "licenses": license_of("Apache-2.0"),
            }
        },
        "components": sorted(components, key=lambda component: str(component["bom-ref"])),
        "dependencies": [{"ref": whole, "dependsOn": sorted(roots + others)}, *sorted(edges, key=lambda edge: str(edge["ref"]))],
    }
    # Equal contents have an equal number.
    number = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(bom, sort_keys=True))
    arguments.out.write_text(json.dumps({**bom, "serialNumber": f"urn:uuid:{number}"}, indent=1) + "\n")


if __name__ == "__main__":
    main()
