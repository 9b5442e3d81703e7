"""A device plugin for GPUs that are not there: the kubelet gives them to containers as it does NVIDIA's.

A container that asks for `nvidia.com/gpu` gets what NVIDIA's plugin and its runtime give it: device files, the name of its GPU
(`NVIDIA_VISIBLE_DEVICES`), and the driver's library, here the stand-in's (tests/fakegpu), with the stand-in's NCCL in a folder of its own.
The kubelet's protocol is `deviceplugin/v1beta1`; its few messages are written here by hand.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

SOCKETS = Path("/var/lib/kubelet/device-plugins")
OWN = "weightsync-e2e-gpus.sock"
RESOURCE = "nvidia.com/gpu"
# Where containers see the libraries.
INSIDE = "/usr/local/nvidia"


def varint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def field(number: int, value: bytes | str) -> bytes:
    """A field of text, bytes or a message."""
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def parts(message: bytes) -> list[bytes]:
    """The fields of a message that has none but texts and messages under the number 1."""
    found, at = [], 0
    while at < len(message):
        if message[at] != 1 << 3 | 2:
            raise ValueError(f"a field that is not known here: {message[at]}")
        length, shift, at = 0, 0, at + 1
        while True:
            length |= (message[at] & 0x7F) << shift
            shift, at = shift + 7, at + 1
            if not message[at - 1] & 0x80:
                break
        found.append(message[at : at + length])
        at += length
    return found


class Plugin:
    """Offers so many GPUs, whose libraries lie in a folder of the node."""

    def __init__(self, count: int, libraries: str) -> None:
        self.gpus = [f"GPU-fa4e0000-0000-4000-8000-{number:012x}" for number in range(count)]
        self.libraries = libraries

    def options(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        return b""

    def watch(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        yield b"".join(field(1, field(1, gpu) + field(2, "Healthy")) for gpu in self.gpus)
        ended = threading.Event()
        context.add_callback(ended.set)
        ended.wait()

    def allocate(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        return b"".join(field(1, self.container([gpu.decode() for gpu in parts(one)])) for one in parts(request))

    def container(self, gpus: list[str]) -> bytes:
        environment = {"NVIDIA_VISIBLE_DEVICES": ",".join(gpus), "FAKEGPU_COUNT": str(len(self.gpus))}
        mounts = field(2, field(1, INSIDE) + field(2, self.libraries) + varint(3 << 3) + varint(1))
        # Files that may be opened and do nothing: what counts here is that they are there.
        names = ["nvidiactl", *(f"nvidia{self.gpus.index(gpu)}" for gpu in gpus)]
        files = (field(3, field(1, f"/dev/{name}") + field(2, "/dev/null") + field(3, "rw")) for name in names)
        variables = (field(1, field(1, name) + field(2, value)) for name, value in environment.items())
        return b"".join([*variables, mounts, *files])

    def serve(self) -> None:
        """Until the kubelet's socket is another one: a kubelet that starts forgets its plugins, and removes their sockets."""
        kubelet = SOCKETS / "kubelet.sock"
        own = SOCKETS / OWN
        own.unlink(missing_ok=True)
        server = grpc.server(ThreadPoolExecutor(8))
        unary: dict[str, Callable[[bytes, grpc.ServicerContext], bytes]] = {
            "GetDevicePluginOptions": self.options,
            "Allocate": self.allocate,
        }
        handlers = {name: grpc.unary_unary_rpc_method_handler(method) for name, method in unary.items()}
        handlers["ListAndWatch"] = grpc.unary_stream_rpc_method_handler(self.watch)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("v1beta1.DevicePlugin", handlers),))
        server.add_insecure_port(f"unix:{own}")
        server.start()
        registered = os.stat(kubelet).st_ino
        with grpc.insecure_channel(f"unix:{kubelet}") as channel:
            register = channel.unary_unary("/v1beta1.Registration/Register")
            register(field(1, "v1beta1") + field(2, OWN) + field(3, RESOURCE), timeout=10)
        print(f"registered {len(self.gpus)} of {RESOURCE}", flush=True)
        while own.exists() and kubelet.exists() and os.stat(kubelet).st_ino == registered:
            time.sleep(0.5)
        server.stop(None).wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=15)
    parser.add_argument("--libraries", required=True, help="folder of the node with lib64/libcuda.so.1 and nccl/libnccl.so.2")
    arguments = parser.parse_args()
    while True:
        try:
            Plugin(arguments.count, arguments.libraries).serve()
        except (OSError, grpc.RpcError) as error:
            print(f"{type(error).__name__}: {error}", flush=True)
        # The kubelet is not there yet, or not any more.
        time.sleep(0.5)
