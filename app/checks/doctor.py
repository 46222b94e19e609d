"""`samerun doctor`: check the machines and processes of a run before it starts, and which nodes can connect to each other.

With plain Accelerate and any preset it is

    accelerate launch --config_file accelerate_configs/PRESET.yaml -m app.checks.doctor

Nodes first connect to each other in pairs, and one that cannot be reached is named: no process group could be formed. Then all
ranks join, check the arithmetic of their devices, time all-reduces, and compare devices and versions. Rank 0 prints results and
problems. The exit code is 0 only if there are no problems. A phase that takes too long ends each process that is in it.

The processes of a run connect to each other at ports that the kernel assigns. If a firewall or a wrong route separates two
nodes, all ranks wait and no node is named. So the first process of each node listens at such a port, publishes its address in
the store of the launchers, and connects to the others. All ranks get the result.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist

from app.checks import arithmetic
from app.checks.arithmetic import Fault
from app.distributed import handshake
from app.distributed.runtime import Runtime
from app.distributed.watchdog import Lifeline
from app.environment.launched import Launched, read
from app.environment.slurm_variables import own_environment
from app.environment.topology import listed
from app.errors import SamerunError, TopologyError, leave_with
from app.options import Parser, above_zero
from app.recipe.schema import BatchPlan
from app.reports.past_run import print_text
from app.reports.runs import Row, print_wrapped, write

_WARM_UPS, _REPEATS = 2, 5
_CONNECT_S = 5.0
"""Time limit of one connection: Linux repeats a lost first packet after 1 and 3 seconds."""
_CONCURRENT = 32
TimeLimit = Callable[[str], AbstractContextManager[None]]
"""Limits the time of a phase, given its name."""
Address = tuple[str, str, int]
"""Host, IP address and port."""
BrokenLinks = dict[tuple[str, str], str]
"""Why a connection failed, with address and port, by the host that tried and the host that listened."""


class ProcessInfo(NamedTuple):
    """Device and software of one rank."""

    host: str
    address: str
    """IP address from which it sends to the machine of rank 0."""
    device: str
    """torch's name of it: `cuda:0`."""
    device_name: str
    """Model of the device; `cpu` for any CPU."""
    memory_bytes: tuple[int, int] | None
    """Free and total memory of the device (of the machine if it is the CPU); None: unknown."""
    versions: Mapping[str, str]
    """Versions of Python, packages and driver, by name."""


class AllReduce(NamedTuple):
    """An all-reduce of float32 over all ranks, in the terms of nccl-tests (doc/PERFORMANCE.md there)."""

    size_bytes: int
    elapsed_s: float
    """Median of the repeats, each on its slowest rank."""
    wrong: Sequence[int]
    """Number of elements with a wrong sum, by rank."""

    @property
    def algbw_gb_per_s(self) -> float:
        """Algorithm bandwidth."""
        return self.size_bytes / self.elapsed_s / 1e9

    @property
    def busbw_gb_per_s(self) -> float:
        """Bus bandwidth: comparable with the hardware's, whatever the number of ranks."""
        ranks = len(self.wrong)
        return self.algbw_gb_per_s * 2 * (ranks - 1) / ranks


class Examination(NamedTuple):
    """All measurements."""

    processes: Sequence[ProcessInfo]
    """In the order of the ranks."""
    faults: Sequence[Fault] = ()
    """Wrong arithmetic."""
    all_reduces: Sequence[AllReduce] = ()
    """Empty for one process."""


def main(argv: list[str] | None = None) -> None:
    """Examine, print, and end the process: with exit code 1 if something is wrong, with an error's if it cannot be examined."""
    launched = Launched()
    parser = Parser("doctor", "Examine the machines and processes of a run before it.")
    parser.add_argument("--patience", type=above_zero, default=60.0, metavar="SECONDS", help="time limit of one phase; a rank "
                        "that takes longer is reported as stuck (default: 60)")  # fmt: skip
    parser.add_argument("--exit-code-file", metavar="FILE", help="write the exit code there, on each node, instead of ending "
                        "with it: a launcher would print a traceback of the problem")  # fmt: skip
    Lifeline(os.environ).start()
    try:
        options = parser.parse_all(argv)
        launched = read(own_environment())
        limit = partial(time_limit, launched, options.patience)
        hosts, faults = _check_connections(launched, limit, timeout_s=2 * options.patience)
        if not faults:
            examination = _examine(launched, limit)
            hosts, faults = [process.host for process in examination.processes], diagnose(examination)
            if launched.rank == 0:
                _print_examination(examination)
    except SamerunError as error:
        leave_with(error, launched.rank)
    if launched.rank == 0:
        exclude = exclude_option(hosts, faults)
        lines = [f"WRONG {fault}" for fault in faults]
        lines += [f"To exclude them under Slurm: sbatch {exclude} ..."] if exclude else []
        lines.append("nothing is wrong" if not faults else f"{len(faults)} problem{'s' if len(faults) > 1 else ''}")
        print_text("\n".join(lines))
        sys.stdout.flush()
    if options.exit_code_file is None:
        sys.exit(1 if faults else 0)
    if launched.local_rank == 0:
        Path(options.exit_code_file).write_text("1" if faults else "0")


@contextmanager
def time_limit(launched: Launched, seconds: float, phase: str) -> Iterator[None]:
    """Announce a phase, and end this process if it takes too long: a collective operation waits for a missing rank forever.

    The exit code makes the launcher end the other processes, a frozen one among them.
    """
    if launched.rank == 0:
        sys.stderr.write(f"samerun doctor: {phase}\n")
        sys.stderr.flush()
    error = TopologyError(
        f"{phase}: not finished after {seconds:g} s (--patience). Ranks that report this wait for each other, or for one that "
        "does not: exclude its node, or set NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME to the network to use"
    )
    timer = threading.Timer(seconds, leave_with, (error, launched.rank))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _check_connections(launched: Launched, limit: TimeLimit, *, timeout_s: float) -> tuple[list[str], list[Fault]]:
    """Return the hosts and the problems between them. Only launchers have the store in which nodes find each other."""
    if launched.world_size == launched.local_world_size or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return [], []
    interface = os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("NCCL_SOCKET_IFNAME")
    head = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    with limit("connections between nodes"):
        hosts, broken = find_broken_links(launched, head, interface=interface, timeout_s=timeout_s)
    return hosts, [Fault(host, text) for host, text in isolated_nodes(broken, hosts).items()]


def _examine(launched: Launched, limit: TimeLimit) -> Examination:
    """Measure everything, and return it on all ranks."""
    plan = BatchPlan(global_batch_size=launched.data_ranks, data_ranks=launched.data_ranks, accumulation=1)
    with limit("joining the process group"):
        runtime = Runtime(launched, plan)
        handshake.check_group(runtime.accelerator, launched, plan)
    with limit("arithmetic"):
        half = [torch.bfloat16] if runtime.device.type == "cpu" else [torch.bfloat16, torch.float16]
        faults = arithmetic.examine(runtime, [torch.float32, *half], arithmetic.OPERATIONS)
    with limit("all-reduce"):
        all_reduces = _time_all_reduces(runtime) if launched.world_size > 1 else []
    with limit("devices and versions"):
        processes = runtime.gather(_process_info(runtime.device))
    runtime.close()
    return Examination(processes, faults, all_reduces)


def _time_all_reduces(runtime: Runtime) -> list[AllReduce]:
    device, ranks = runtime.device, runtime.launched.world_size
    synchronize = partial(torch.accelerator.synchronize, device) if device.type != "cpu" else lambda: None
    measured = []
    # A second or less for each size, on a CPU through gloo as on GPUs through NCCL.
    for size_bytes in (2**16, 2**20, 2**24) if device.type == "cpu" else (2**20, 2**24, 2**28):
        buffer = torch.empty(size_bytes // 4, device=device)
        elapsed_s, wrong = [], 0
        for _ in range(_WARM_UPS + _REPEATS):
            buffer.fill_(runtime.launched.rank + 1)
            synchronize()
            start_s = time.perf_counter()
            torch.distributed.all_reduce(buffer)
            synchronize()
            elapsed_s.append(time.perf_counter() - start_s)
            wrong += int((buffer != ranks * (ranks + 1) / 2).sum())  # exact in float32 up to 5,792 ranks
        times, counts = zip(*runtime.gather((elapsed_s[_WARM_UPS:], wrong)), strict=True)
        slowest_s = map(max, zip(*times, strict=True))
        measured.append(AllReduce(size_bytes, statistics.median(slowest_s), counts))
    return measured


def _process_info(device: torch.device) -> ProcessInfo:
    name, memory_bytes = device.type, None
    versions = {"python": platform.python_version(), **handshake.versions()}
    if device.type == "cpu":
        machine = psutil.virtual_memory()
        memory_bytes = machine.available, machine.total
    elif device.type == "cuda":
        name, memory_bytes = torch.cuda.get_device_name(device), torch.cuda.mem_get_info(device)
        driver = Path("/sys/module/nvidia/version")  # hidden in some containers
        versions["driver"] = driver.read_text().strip() if driver.exists() else "unknown"
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    address = address_towards(os.environ.get("MASTER_ADDR", "localhost"))
    device_text = device.type if device.type == "cpu" else str(device)
    return ProcessInfo(socket.gethostname(), address, device_text, name, memory_bytes, versions)


def diagnose(examination: Examination) -> list[Fault]:
    """Return what is wrong: arithmetic, sums, and devices and versions other than on most ranks (or than on rank 0)."""
    processes = examination.processes
    faults = list(examination.faults)
    for each in examination.all_reduces:
        text = f"the all-reduce of {each.size_bytes} bytes gave {{}} wrong sums"
        wrong = {rank: count for rank, count in enumerate(each.wrong) if count}
        faults += [Fault(processes[rank].host, text.format(count), rank) for rank, count in wrong.items()]
    facts = [(process.host, {"device": process.device_name, **process.versions}) for process in processes]
    for name in dict.fromkeys(name for _, found in facts for name in found):
        values = [(host, found.get(name, "none")) for host, found in facts]
        usual, count = Counter(value for _, value in values).most_common(1)[0]
        text = f"{name} is {{}}; {count} of {len(facts)} ranks have {usual}"
        faults += [Fault(host, text.format(value)) for host, value in dict.fromkeys(values) if value != usual]
    return faults


def exclude_option(hosts: Sequence[str], faults: Sequence[Fault]) -> str | None:
    """Return Slurm's option to exclude the nodes with problems; None if no node has one, or every node."""
    excluded = [host for host in dict.fromkeys(hosts) if host in {fault.host for fault in faults}]
    return f"--exclude={','.join(excluded)}" if 0 < len(excluded) < len(set(hosts)) else None


def _print_examination(examination: Examination) -> None:
    processes, rows = examination.processes, list[Row]()
    print_text(f"processes: {len(processes)}, nodes: {len({process.host for process in processes})}")
    for rank, process in enumerate(processes):
        memory = "/".join(f"{size / 2**30:.1f}" for size in process.memory_bytes) if process.memory_bytes else "unknown"
        device = " ".join(dict.fromkeys((process.device, process.device_name)))
        row = {"rank": rank, "host": process.host, "address": process.address, "device": device}
        rows.append({**row, "memory free/total (GiB)": memory})
    write(rows)
    if examination.all_reduces:
        print_wrapped("all-reduce of float32: algbw = size / time of the slowest rank, busbw = algbw * 2(n-1)/n")
        rows = []
        for each in examination.all_reduces:
            row = {"size (MiB)": each.size_bytes / 2**20, "time (us)": round(each.elapsed_s * 1e6, 1)}
            row |= {"algbw (GB/s)": round(each.algbw_gb_per_s, 3), "busbw (GB/s)": round(each.busbw_gb_per_s, 3)}
            rows.append({**row, "#wrong": sum(each.wrong)})
        write(rows)
    print_wrapped(f"versions of rank 0: {', '.join(f'{name} {version}' for name, version in processes[0].versions.items())}")


def find_broken_links(
    launched: Launched, head: tuple[str, int], *, interface: str | None, timeout_s: float
) -> tuple[list[str], BrokenLinks]:
    """Return the hosts in the order of their ranks, and the links between them that cannot be made. All ranks call this.

    `head` is host and port of the launchers' store. The ranks use `interface`; None: the one that leads to `head`. Raises
    torch's own error if other nodes do not come within `timeout_s`.
    """
    server = dist.TCPStore(*head, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    store = dist.PrefixStore("samerun-doctor", server)

    def values(key: str, ranks: Sequence[int]) -> list[Any]:
        """Wait until all ranks have set the key, and return their values."""
        return [json.loads(value) for value in store.multi_get([f"{key}/{rank}" for rank in ranks])]

    first_ranks = range(0, launched.world_size, launched.local_world_size)
    host, dual = socket.gethostname(), socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    # The kernel accepts connections itself, up to the backlog. The listener is open until all nodes have connected.
    with socket.create_server(("", 0), family=family, dualstack_ipv6=dual, backlog=socket.SOMAXCONN) as listener:
        if launched.local_rank == 0:
            own = host, _own_address(launched, head[0], interface), listener.getsockname()[1]
            store.set(f"address/{launched.rank}", json.dumps(own))
            addresses: list[Address] = values("address", first_ranks)
            others = [address for rank, address in zip(first_ranks, addresses, strict=True) if rank != launched.rank]
            store.set(f"broken/{launched.rank}", json.dumps(list(connect_all(host, others).items())))
        links = [link for part in values("broken", first_ranks) for link in part]
        hosts = [name for name, _, _ in values("address", first_ranks)]
    return hosts, {(source, target): error for (source, target), error in links}


def connect_all(source: str, addresses: Sequence[Address]) -> BrokenLinks:
    """Connect from the host `source` to these addresses, and return what failed."""

    def attempt(address: Address) -> str:
        _, ip, port = address
        try:
            socket.create_connection((ip, port), timeout=_CONNECT_S).close()
        except OSError as error:
            return f"{ip}, port {port}: {error.strerror or error}"
        return ""

    with ThreadPoolExecutor(_CONCURRENT) as pool:
        errors = zip(addresses, pool.map(attempt, addresses), strict=True)
        return {(source, host): text for (host, _, _), text in errors if text}


def isolated_nodes(broken: Mapping[tuple[str, str], str], hosts: Sequence[str]) -> dict[str, str]:
    """Return the fewest hosts, or nearly, without which all can connect to each other, and for each what is wrong.

    Of two alike, the later one of `hosts`: the first is the head, to which the others have already connected.
    """
    links, isolated = dict(broken), {}
    while links:
        partners = {host: {end for link in links if host in link for end in link} - {host} for host in hosts}
        blamed = max(hosts, key=lambda host: (len(partners[host]), hosts.index(host)))
        others = sorted(partners[blamed], key=hosts.index)
        example = next(error for link, error in links.items() if blamed in link)
        isolated[blamed] = (
            f"no connection with {listed(others)}, for example {example}. Check firewall and routes between them; if "
            "another network connects the nodes, set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        )
        links = {link: error for link, error in links.items() if blamed not in link}
    return isolated


def address_towards(host: str) -> str:
    """Return the IP address from which this machine sends to `host`. Nothing is sent: only a route is chosen."""
    family, kind, _, _, there = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as opened:
        opened.connect(there)
        return str(opened.getsockname()[0])


def _own_address(launched: Launched, head: str, interface: str | None) -> str:
    found = psutil.net_if_addrs().get(interface or "", [])
    own = (address.address for address in found if address.family in (socket.AF_INET, socket.AF_INET6))
    return next(own, None) or (head if launched.rank == 0 else address_towards(head))


if __name__ == "__main__":
    main()
