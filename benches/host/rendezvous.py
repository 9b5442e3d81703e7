"""Times of clients of the real torch at two stores: rendezvous.py CLIENTS ROUNDS PORT, which is that of the store under test.

Torch's own server runs in a process of its own, as the other one does. Each round, every client is a thread that connects, says
hello, reads the id of the group and waits for a key that the last one to say hello sets; the two stores take turns. Prints one JSON
object with the seconds of each round.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
import threading
import time

import torch.distributed as dist

TIMEOUT = datetime.timedelta(seconds=60)
SERVER = """
import sys, datetime, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


def round_of(port: int, clients: int, number: int) -> float:
    """Seconds from the start until every client went on."""
    ready = threading.Barrier(clients + 1)
    failed: list[BaseException] = []

    def client() -> None:
        try:
            ready.wait()
            store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT, wait_for_workers=False)
            if store.add(f"hello{number}", 1) == clients:
                store.set(f"go{number}", "1")
            assert len(store.get("id")) == 128
            store.wait([f"go{number}"], TIMEOUT)
        except BaseException as error:  # reported below, or the round would look fast
            failed.append(error)

    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    ready.wait()
    begun = time.perf_counter()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - begun
    if failed:
        raise failed[0]
    return took


def main() -> None:
    clients, rounds, port = (int(word) for word in sys.argv[1:])
    torchs = subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert torchs.stdout is not None
    ports = {"ours": port, "torch": int(torchs.stdout.readline())}
    seconds: dict[str, list[float]] = {name: [] for name in ports}
    try:
        for at in ports.values():
            dist.TCPStore("127.0.0.1", at, is_master=False, timeout=TIMEOUT).set("id", "i" * 128)
            round_of(at, clients, 0)  # the first one finds cold caches
        for number in range(1, rounds + 1):
            order = list(ports.items())
            for name, at in order if number % 2 else reversed(order):
                seconds[name].append(round_of(at, clients, number))
    finally:
        torchs.kill()
        torchs.wait()
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
