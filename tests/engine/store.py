"""What the real torch does with the store at 127.0.0.1:PORT, as one JSON value a line.

store.py api PORT            every call of a client
store.py keys PORT GROUP     reads the id of a group where torch's own prefixes put it
store.py gloo PORT RANK WORLD GROUP     a default group, a second group as engines make it, and collectives in both
store.py wheel PORT ENGINE CODE         two groups one after the other, of torch as rank 0 and of ranks that run the engine's own code
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

TIMEOUT = datetime.timedelta(seconds=300)


def say(value: object) -> None:
    print(json.dumps(value), flush=True)


def connect(port: int, **options: object) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT, **options)


def api(port: int) -> None:
    store = connect(port, world_size=4, wait_for_workers=True)
    say(store.get("from_rust").decode())
    store.set("k", "v")
    say(store.get("k").decode())
    say([store.add("n", 2), store.add("n", 40), store.get("n").decode()])
    say([store.compare_set("c", "x", "y").decode(), store.compare_set("c", "", "y").decode()])
    say([store.compare_set("c", "y", "z").decode(), store.compare_set("c", "y", "w").decode()])
    say([store.check(["k", "n"]), store.check(["k", "none"])])
    store.append("k", "!")
    store.multi_set(["a", "b"], ["1", "2"])
    say([value.decode() for value in store.multi_get(["k", "a", "b"])])
    say([store.delete_key("a"), store.delete_key("a"), store.check(["a"])])
    try:
        store.wait(["none"], datetime.timedelta(milliseconds=100))
    except dist.DistStoreError:
        say("timed out")
    say(store.get("b").decode())  # the wait that was taken back left nothing in the way
    store.wait(["k", "b"])
    say(store.num_keys())
    store.set("large", "x" * 500_000)
    say(len(store.get("large")))
    if hasattr(store, "queue_push"):
        store.queue_push("q", "1")
        store.queue_push("q", "2")
        say([store.queue_len("q"), store.queue_pop("q").decode(), store.queue_pop("q").decode(), store.queue_len("q")])
    else:
        say([2, "1", "2", 0])
    nested = dist.PrefixStore("inner", dist.PrefixStore("outer", store))
    nested.set("p", "nested")
    say(nested.get("p").decode())
    say(sorted(store.list_keys()) if hasattr(store, "list_keys") else None)
    if hasattr(store, "barrier"):
        store.barrier("all", 1, TIMEOUT)
    say("done")
    sys.stdin.read()  # connected, as an engine is, until the test is over


def keys(port: int, group: str) -> None:
    store: dist.Store = connect(port)
    inner = dist.PrefixStore("cuda/", dist.PrefixStore(f"{group}/", dist.PrefixStore(group, store)))
    classic = inner.get("0")
    nccl2 = dist.PrefixStore(group, inner).get("nccl_storekey_0")
    say([classic.hex(), nccl2.hex()])


def gloo(port: int, rank: int, world: int, group: str) -> None:
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", GLOO_SOCKET_IFNAME="lo")
    url = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=world, timeout=TIMEOUT)
    default = torch.full((100_000,), float(rank))
    dist.broadcast(default, 0)
    # The steps of a group next to the default one, as engines take them for weights.
    store, rank, world = next(dist.rendezvous(url, rank, world, timeout=TIMEOUT))
    store.set_timeout(TIMEOUT)
    helper = dist.distributed_c10d._new_process_group_helper
    prefixed = dist.PrefixStore(group, store)
    pg, _ = helper(world, rank, [], "gloo", prefixed, group_name=group, timeout=TIMEOUT)
    dist.distributed_c10d._world.pg_group_ranks[pg] = {i: i for i in range(world)}
    weights = torch.full((8,), float(rank + 7))
    dist.broadcast(weights, src=0, group=pg)
    total = torch.ones(4) * (rank + 1)
    dist.all_reduce(total)
    dist.barrier()
    say([default[5].item(), weights[0].item(), total[0].item()])
    dist.destroy_process_group()


class Rank:
    """A process of tests/gpu/engine_ranks.py, without a GPU."""

    def __init__(self, engine: str, code: str, folder: str, rank: int, size: int) -> None:
        script = Path(__file__).parent.parent / "gpu" / "engine_ranks.py"
        place = [f"--meet={folder}/{engine}", f"--tp-rank={rank}", f"--tp-size={size}", f"--code={code}"]
        self.process = subprocess.Popen([sys.executable, script, engine, *place], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def tell(self, ask: dict[str, object]) -> None:
        assert self.process.stdin
        print(json.dumps(ask), file=self.process.stdin, flush=True)

    def answer(self) -> object:
        assert self.process.stdout
        answer = json.loads(self.process.stdout.readline())
        return [answer["bytes"], answer["wrong"]] if "bytes" in answer else answer["ok"] or answer["message"]


def wheel(port: int, engine: str, code: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        first, *others = ranks = [Rank("torch", code, folder, 0, 1), Rank(engine, code, folder, 0, 2), Rank(engine, code, folder, 1, 2)]
        say([rank.answer() for rank in ranks])

        def ask(to_first: dict[str, object], to_others: dict[str, object]) -> None:
            first.tell(to_first)
            for rank in others:
                rank.tell(to_others)
            say([rank.answer() for rank in ranks])

        for number, load_format in enumerate(["flattened_bucket", None], 1):
            group: dict[str, object] = {"group_name": f"weights-{number}"}
            join = group | {"do": "join", "master_address": "127.0.0.1", "master_port": port, "world_size": 3, "rank_offset": 1}
            ask(join, join)
            lengths = [2 * 7, 2, 2 * 129 * 3]
            shapes: object = [[7], [], [129, 3]]
            tensors = {"names": ["a", "b", "c"], "dtypes": ["bfloat16"] * 3, "shapes": shapes, "load_format": load_format}
            take = group | {"do": "receive", "bucket": number} | tensors
            ask({"do": "receive", "bucket": number, "lengths": [sum(lengths)] if load_format else lengths}, take)
            ask(group | {"do": "leave"}, group | {"do": "leave"})
        for rank in ranks:
            rank.process.kill()
            rank.process.wait()


if __name__ == "__main__":
    if sys.argv[1] == "api":
        api(int(sys.argv[2]))
    elif sys.argv[1] == "keys":
        keys(int(sys.argv[2]), sys.argv[3])
    elif sys.argv[1] == "wheel":
        wheel(int(sys.argv[2]), sys.argv[3], sys.argv[4])
    else:
        gloo(int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
