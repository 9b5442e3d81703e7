#!/usr/bin/env python3
"""Write a container image with one layer from a folder, without a container engine.

The archive is an OCI layout that also carries docker's older `manifest.json`, so containerd, `kind load image-archive`
and every `docker load` read it. Equal trees give equal archives. The layer is not compressed: it never travels.

    image.py NAME OUT.tar TREE [--entrypoint JSON] [--env KEY=VALUE]... [--user UID] [--stop-signal NAME]
             [--keep-owners]
"""

import argparse
import hashlib
import io
import json
import tarfile
import tempfile
from pathlib import Path
from typing import IO

PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def write_layer(tree: Path, keep_owners: bool, out: IO[bytes]) -> None:
    """Pack the tree in name order, without times, and owned by root unless the owners are kept."""

    def normalise(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.mtime = 0
        info.uname = info.gname = ""
        if not keep_owners:
            info.uid = info.gid = 0
        return info

    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        tar.add(tree, arcname=".", filter=normalise)


def digest(blob: IO[bytes]) -> str:
    sha256 = hashlib.sha256()
    blob.seek(0)
    while chunk := blob.read(1 << 20):
        sha256.update(chunk)
    return sha256.hexdigest()


def add(tar: tarfile.TarFile, name: str, blob: IO[bytes]) -> None:
    info = tarfile.TarInfo(name)
    info.size = blob.seek(0, io.SEEK_END)
    blob.seek(0)
    tar.addfile(info, blob)


def as_json(value: object) -> io.BytesIO:
    return io.BytesIO(json.dumps(value, sort_keys=True).encode())


def write_image(name: str, out: Path, tree: Path, config: dict[str, object], keep_owners: bool) -> None:
    platform = {"architecture": "amd64", "os": "linux"}
    with tempfile.TemporaryFile() as layer:
        write_layer(tree, keep_owners, layer)
        layer_digest = digest(layer)
        rootfs = {"type": "layers", "diff_ids": [f"sha256:{layer_digest}"]}
        image = as_json({**platform, "config": config, "rootfs": rootfs})
        image_digest = digest(image)
        manifest = as_json(
            {
                "schemaVersion": 2,
                "mediaType": "application/vnd.oci.image.manifest.v1+json",
                "config": {
                    "mediaType": "application/vnd.oci.image.config.v1+json",
                    "digest": f"sha256:{image_digest}",
                    "size": len(image.getbuffer()),
                },
                "layers": [
                    {
                        "mediaType": "application/vnd.oci.image.layer.v1.tar",
                        "digest": f"sha256:{layer_digest}",
                        "size": layer.seek(0, io.SEEK_END),
                    }
                ],
            }
        )
        manifest_digest = digest(manifest)
        index = as_json(
            {
                "schemaVersion": 2,
                "manifests": [
                    {
                        "mediaType": "application/vnd.oci.image.manifest.v1+json",
                        "digest": f"sha256:{manifest_digest}",
                        "size": len(manifest.getbuffer()),
                        "platform": platform,
                        "annotations": {
                            "io.containerd.image.name": name,
                            "org.opencontainers.image.ref.name": name.rsplit(":", 1)[1],
                        },
                    }
                ],
            }
        )
        docker = as_json([{"Config": f"blobs/sha256/{image_digest}", "RepoTags": [name], "Layers": [f"blobs/sha256/{layer_digest}"]}])
        with tarfile.open(out, "w") as tar:
            add(tar, "oci-layout", io.BytesIO(b'{"imageLayoutVersion":"1.0.0"}'))
            add(tar, "index.json", index)
            add(tar, "manifest.json", docker)
            add(tar, f"blobs/sha256/{manifest_digest}", manifest)
            add(tar, f"blobs/sha256/{image_digest}", image)
            add(tar, f"blobs/sha256/{layer_digest}", layer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="full reference with a tag, such as docker.io/library/weightsync:test")
    parser.add_argument("out", type=Path)
    parser.add_argument("tree", type=Path)
    parser.add_argument("--entrypoint", type=json.loads, metavar="JSON", help="a list of strings")
    parser.add_argument("--env", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--user", metavar="UID")
    parser.add_argument("--stop-signal", metavar="NAME")
    parser.add_argument("--keep-owners", action="store_true", help="keep the tree's owners; else root owns all")
    args = parser.parse_args()

    env = args.env if any(e.startswith("PATH=") for e in args.env) else [PATH, *args.env]
    config: dict[str, object] = {"Env": env, "WorkingDir": "/"}
    if args.entrypoint:
        config["Entrypoint"] = args.entrypoint
    if args.user:
        config["User"] = args.user
    if args.stop_signal:
        config["StopSignal"] = args.stop_signal
    write_image(args.name, args.out, args.tree, config, args.keep_owners)


if __name__ == "__main__":
    main()
