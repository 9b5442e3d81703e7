"""What the real torch does with the store at 127.0.0.1:PORT, as one JSON value a line.

store.py api PORT            every call of a client
store.py keys PORT GROUP     reads the id of a group where torch's own prefixes put it
store.py gloo PORT RANK WORLD GROUP     a default group, a second group as engines make it, and collectives in both
"""

from __future__ import annotations

import datetime
import json
import os
import sys

import torch
import torch.distributed as dist

TIMEOUT = datetime.timedelta(seconds=60)


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
    # The steps of a group beside the default one, as engines take them for weights.
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


if __name__ == "__main__":
    if sys.argv[1] == "api":
        api(int(sys.argv[2]))
    elif sys.argv[1] == "keys":
        keys(int(sys.argv[2]), sys.argv[3])
    else:
        gloo(int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
