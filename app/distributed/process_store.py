"""What processes exchange through the store at MASTER_PORT before they form a group: their devices, and whether it answers.

NCCL joins no two processes on one GPU, and says so with a traceback. It may say so while the group is made: torch 2.15 binds a
device there (distributed_c10d.py, `_nccl2_device`), and so does DeepSpeed 0.19 (comm/torch.py). So devices are compared before
that, through the store in which the processes meet.

A client of torch's store waits for an answer without a limit. Short connections to its port, some hundred a second, leave its
server accepting no more (torch 2.14, both backends; docs/network-security.md), and all processes waiting without a word. So
until the first step each process also asks the store by itself, now and then. A rank that is late is none of its business: it
may read, compile or download for long, and torch's time-outs name it.
"""

from __future__ import annotations

import json
import socket
import threading
from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from app.environment.launched import Launched
from app.environment.topology import listed
from app.errors import HangError, TopologyError, leave_with
from app.runs.failure import Recorder

_MEETING = timedelta(minutes=30)
"""How long to wait for the others: torch's own time for gloo. Nodes read Python from a busy disk for minutes."""
_ASK_EVERY = timedelta(seconds=10)
"""Also before the first question: most starts are over by then."""
_DEAF_S = 60.0


class RankDevice(NamedTuple):
    """What one process computes on."""

    rank: int
    host: str
    name: str
    """torch's name of it, such as cuda:0."""
    identity: str = ""
    """What no other device has, however processes number them; empty for a CPU, which many may share."""
    visible: int = 0
    """Devices that the process can see."""


def own_device(launched: Launched, *, on_cpu: bool) -> RankDevice:
    """Return the device that Accelerate will take (accelerate 1.15, state.py, `set_device`)."""
    host, accelerator = socket.gethostname(), torch.accelerator.current_accelerator()
    if on_cpu or accelerator is None:
        return RankDevice(launched.rank, host, "cpu")
    count = torch.accelerator.device_count()
    name = f"{accelerator.type}:{launched.local_rank % count}"
    is_nvidia = accelerator.type == "cuda"
    identity = str(torch.cuda.get_device_properties(name).uuid) if is_nvidia else f"{host} {name}"
    return RankDevice(launched.rank, host, name, identity, count)


def exchange(store: dist.Store, device: RankDevice, world_size: int) -> list[RankDevice]:
    """Return the devices of all processes, of which each calls this once. Raises TopologyError if some do not come in time."""
    keys = [f"samerun/device/{rank}" for rank in range(world_size)]
    store.set(keys[device.rank], json.dumps(device))
    try:
        return [RankDevice(*json.loads(value)) for value in store.multi_get(keys)]
    except dist.DistStoreError as error:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        raise TopologyError(
            f"rank {device.rank} on {device.host} waited for {_ranks(missing)} of {world_size}, which never "
            "came: check why they did not start, or ended."
        ) from error


def compare_devices(launched: Launched, *, on_cpu: bool) -> dist.Store:
    """Check that each process has its own device, and return the store of all processes.

    Where no launcher has the store, rank 0 serves it as long as one of its own is kept (TCPStore, multi_tenant): keep it until
    the group is made. Raises TopologyError if some do not come or share a device, and DistNetworkError if the store cannot be
    reached.
    """
    store: dist.Store
    store, _, _ = next(dist.rendezvous("env://", timeout=_MEETING))
    check(exchange(store, own_device(launched, on_cpu=on_cpu), launched.world_size))
    return store


def check(devices: Sequence[RankDevice]) -> None:
    """Raise TopologyError if two processes take one device; it names them."""
    by_identity = defaultdict(list)
    for device in devices:
        by_identity[device.identity].append(device)
    named = [
        f"{_ranks([each.rank for each in takers])} on {takers[0].host} would share {takers[0].name} "
        f"(of {takers[0].visible} visible there)"
        for identity, takers in by_identity.items()
        if identity and len(takers) > 1
    ]
    if named:
        raise TopologyError(
            f"{'; '.join(named[:8])}: start at most one process per visible device of a node (--processes, "
            "--num_processes, or the scheduler's tasks per node)."
        )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks)}"


class StoreWatch:
    """Asks the store of the processes until `stop`, in a thread, and ends this process if it gives no answer for long."""

    def __init__(self, launched: Launched, address: str) -> None:
        """`address` is that of the store, HOST:PORT. A process alone has none."""
        self._launched, self._address = launched, address
        self._over = threading.Event()
        if launched.world_size > 1:
            threading.Thread(target=self._watch, name="store", daemon=True).start()

    def stop(self) -> None:
        """Watch no longer."""
        self._over.set()

    def _watch(self) -> None:
        host, _, port = self._address.rpartition(":")
        store: dist.Store | None = None
        while not self._over.wait(_ASK_EVERY.total_seconds()):
            deaf = threading.Timer(_DEAF_S, self._end)  # a deaf store keeps this thread for ever, in torch's code
            deaf.daemon = True
            deaf.start()
            try:
                store = store or dist.TCPStore(host, int(port), None, False, _ASK_EVERY, wait_for_workers=False)
                store.check(["samerun/deaf"])
            except RuntimeError:  # not there yet, or gone: that is reported where it is needed
                store = None
            deaf.cancel()

    def _end(self) -> None:
        rank, size = self._launched.rank, self._launched.world_size
        hang = HangError(
            f"the store at {self._address}, through which the processes meet, gave rank {rank} of {size} no answer for "
            f"{_DEAF_S:.0f} s. Other programs that connect to that port again and again stop it: close it to them "
            "(docs/network-security.md), or choose another with --port"
        )
        if not self._over.is_set():
            Recorder(self._launched.errors).record(hang, rank=rank)
            leave_with(hang, rank)
