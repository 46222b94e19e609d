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
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from app.environment.launched import Launched
from app.environment.topology import listed
from app.errors import HangError, TopologyError, leave_with
from app.runs.failure import Recorder

_MEETING = timedelta(minutes=30)
"""How long to wait for the others: torch's own time for gloo. Nodes read Python from a busy disk for minutes."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """What one process computes on."""

    rank: int
    host: str
    name: str
    """torch's name of it, such as cuda:0."""
    identity: str = ""
    """What no other device has, however processes number them; empty for a CPU, which many may share."""
    visible: int = 0
    """Devices that the process is shown."""
    listed: str = ""
    """CUDA_VISIBLE_DEVICES, as the process has it."""


def own_device(launched: Launched, *, on_cpu: bool) -> Device:
    """Return the device that Accelerate will take (accelerate 1.15, state.py, `set_device`)."""
    host, accelerator = socket.gethostname(), torch.accelerator.current_accelerator()
    if on_cpu or accelerator is None:
        return Device(rank=launched.rank, host=host, name="cpu")
    count = torch.accelerator.device_count()
    name = f"{accelerator.type}:{launched.local_rank % count}"
    is_nvidia = accelerator.type == "cuda"
    identity = str(torch.cuda.get_device_properties(name).uuid) if is_nvidia else f"{host} {name}"
    return Device(rank=launched.rank, host=host, name=name, identity=identity, visible=count, listed=launched.visible_devices)


def meet(device: Device, world_size: int) -> tuple[dist.Store, list[Device]]:
    """Return the store of all processes, and the devices of all in the order of the ranks.

    Where no launcher has the store, rank 0 serves it as long as one of its own is kept (TCPStore, multi_tenant): keep it until
    the group is made. Raises TopologyError if some do not come, and DistNetworkError if the store cannot be reached.
    """
    store, _, _ = next(dist.rendezvous("env://", timeout=_MEETING))
    return store, exchange(store, device, world_size)


def exchange(store: dist.Store, device: Device, world_size: int) -> list[Device]:
    """Return the devices of all processes, of which each calls this once. Raises TopologyError if some do not come in time."""
    keys = [f"samerun/device/{rank}" for rank in range(world_size)]
    store.set(keys[device.rank], json.dumps(asdict(device)))
    try:
        return [Device(**json.loads(told)) for told in store.multi_get(keys)]
    except dist.DistStoreError as error:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        raise TopologyError(
            f"rank {device.rank} on {device.host} waited for {_ranks(missing)} of {world_size}, which never "
            "came: check why they did not start, or ended."
        ) from error


def check(devices: Sequence[Device]) -> None:
    """Raise TopologyError if two processes take one device; it names them."""
    by_identity = defaultdict(list)
    for device in devices:
        if device.identity:
            by_identity[device.identity].append(device)
    shared = [takers for takers in by_identity.values() if len(takers) > 1]
    if shared:
        named = [
            f"{_ranks([each.rank for each in takers])} on {takers[0].host} would share {takers[0].name} "
            f"(of {takers[0].visible} visible there)"
            for takers in shared[:8]
        ]
        raise TopologyError(
            f"{'; '.join(named)}: start at most one process per visible device of a node (--processes, "
            "--num_processes, or the scheduler's tasks per node)."
        )


def confined(devices: Sequence[Device]) -> str | None:
    """Return a note if processes of one node are shown one GPU each, and not by CUDA_VISIBLE_DEVICES but by their cgroup or
    container: then each calls another GPU cuda:0 under the same list. What that costs: docs/slurm.md.
    """
    by_host = defaultdict(list)
    for device in devices:
        by_host[device.host].append(device)
    for host, there in by_host.items():
        alike = len({(each.name, each.visible, each.listed) for each in there}) == 1 and there[0].visible == 1
        if alike and len({each.identity for each in there}) > 1:
            return (
                f"each process on {host} sees only its own GPU, so NCCL may be unable to use NVLink and "
                "peer-to-peer copies. Under Slurm let each task see all GPUs of its node: "
                f"--gpus-per-node={len(there)} instead of --gpus-per-task (docs/slurm.md)"
            )
    return None


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks)}"


_ASK_EVERY = timedelta(seconds=10)
"""Also before the first question: most starts are over by then."""
_DEAF_S = 60.0


class StoreWatch:
    """Asks the store of the processes until `stop`, in a thread, and ends this process if it gives no answer for long."""

    def __init__(self, launched: Launched, address: str) -> None:
        """`address` is that of the store, HOST:PORT."""
        self._launched, self._address = launched, address
        self._over = threading.Event()
        self._answered_s = time.monotonic()
        self.phase = "joining the other processes"
        """What this process does now, for the message."""

    def start(self) -> StoreWatch:
        """Begin to watch; a process alone has no store."""
        if self._launched.world_size > 1:
            for target in (self._ask, self._watch):
                threading.Thread(target=target, name="store", daemon=True).start()
        return self

    def stop(self) -> None:
        """Watch no longer."""
        self._over.set()

    def _ask(self) -> None:
        """Ask it again and again. A deaf one keeps this thread for ever, in torch's code."""
        host, _, port = self._address.rpartition(":")
        store: dist.Store | None = None
        while not self._over.wait(_ASK_EVERY.total_seconds()):
            try:
                store = store or dist.TCPStore(host, int(port), None, False, _ASK_EVERY, wait_for_workers=False)
                store.check(["samerun/deaf"])
            except RuntimeError:  # there is none yet, or it is gone: that is seen and said where it is needed
                store = None
            self._answered_s = time.monotonic()

    def _watch(self) -> None:
        while not self._over.wait(1.0):
            if time.monotonic() - self._answered_s > _DEAF_S:
                rank, size = self._launched.rank, self._launched.world_size
                hang = HangError(
                    f"the store at {self._address}, through which the processes meet, gave rank {rank} of {size} no "
                    f"answer for {_DEAF_S:.0f} s, while it was {self.phase}. Other programs that connect to that port "
                    "again and again stop it: close it to them (docs/network-security.md), or choose another with --port"
                )
                Recorder(self._launched.errors).record(hang, rank=rank)
                leave_with(hang, rank)
