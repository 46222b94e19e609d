"""Check the machines and processes of a run before it starts: `samerun doctor`, or with any preset

    accelerate launch --config_file accelerate_configs/PRESET.yaml -m app.doctor.doctor [--run-dir DIR] [--json]

Across nodes, every pair first tries to connect: what no process group could be joined over is named and ends it. Then every
rank looks at itself and its device, all of them sum and send, the first of each node looks at its clock, its link and
the run folder. Rank 0 prints what was found and what is wrong with it (`app/doctor/diagnosis.py`); the exit code is 0 only if
nothing is. Nothing is left behind. A measurement that does not end is given up, and each rank says in which it was.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.doctor.diagnosis import AllReduce, Examination, Node, Problem, Rank, diagnose, exclude_option
from app.environment.launched import Launched, read
from app.environment.slurm_variables import own_environment
from app.errors import SamerunError, TopologyError
from app.guard.watchdog import Lifeline
from app.options.command_line import Parser
from app.options.values import above_zero
from app.recipe.batching import BatchPlan

if TYPE_CHECKING:
    from app.distributed.runtime import Runtime


def main(argv: list[str] | None = None) -> None:
    """Examine, print, and end the process: with exit code 1 if something is wrong, with an error's if it could not be done."""
    launched = Launched()
    Lifeline(os.environ).start()
    head = os.environ.get("MASTER_ADDR", "localhost")
    try:
        options = _parse(argv)
        launched = read(own_environment())
        waiting = partial(patience, launched=launched, seconds=options.patience, exit_code_file=options.exit_code_file)
        hosts, problems = _unreachable(launched, head, waiting, seconds=options.patience)
        examination = None if problems else _examine(launched, Path(options.run_dir), head=head, waiting=waiting)
    except SamerunError as error:
        from app.errors import leave_with

        leave_with(error, launched.rank)
    problems = problems if examination is None else diagnose(examination)
    if launched.rank == 0:
        _tell(examination, problems, hosts, as_one_object=options.json)
    code = 1 if problems else 0
    if options.exit_code_file is None:
        sys.exit(code)
    if launched.local_rank == 0:
        Path(options.exit_code_file).write_text(str(code))


def _tell(examination: Examination | None, problems: Sequence[Problem], hosts: Sequence[str], *, as_one_object: bool) -> None:
    """`examination` is None where the processes could not be joined, which are on these `hosts`."""
    exclude = exclude_option(hosts if examination is None else examination.hosts, problems)
    if as_one_object:
        found = {"ranks": []} if examination is None else asdict(examination)
        described = [{**asdict(problem), "sentence": str(problem)} for problem in problems]
        sys.stdout.write(json.dumps({"ok": not problems, **found, "problems": described, "exclude": exclude}) + "\n")
    else:
        _show(examination, problems, exclude)
    sys.stdout.flush()


def _unreachable(
    launched: Launched, head: str, waiting: Callable[[str], AbstractContextManager[None]], *, seconds: float
) -> tuple[list[str], list[Problem]]:
    """The hosts, and what is wrong between them. Only launchers have the store in which nodes find each other."""
    if launched.world_size == launched.local_world_size or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return [], []
    from app.doctor import reach

    interface = os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("NCCL_SOCKET_IFNAME")
    port = int(os.environ["MASTER_PORT"])
    with waiting("connections between nodes"):
        hosts, broken = reach.examine(launched, (head, port), interface=interface, timeout_s=2 * seconds)
    return hosts, reach.unreachable(broken, hosts)


def _examine(
    launched: Launched, run_dir: Path, *, head: str, waiting: Callable[[str], AbstractContextManager[None]]
) -> Examination:
    """Measure everything, each thing no longer than `waiting` lets it, and return it on all ranks."""
    from app.distributed import clock_offsets, handshake
    from app.distributed.runtime import Runtime
    from app.doctor import probe

    plan = BatchPlan(global_batch_size=launched.data_ranks, data_ranks=launched.data_ranks, accumulation=1)
    with waiting("joining the process group"):
        runtime = Runtime(launched, plan)
        handshake.check_group(runtime.accelerator, launched, plan)
        places: list[tuple[int, str]] = runtime.gather((launched.local_rank, socket.gethostname()))
        first_ranks = [rank for rank, (index, _) in enumerate(places) if index == 0]
    device = runtime.device
    with waiting("each device alone"):
        runtime.accelerator.wait_for_everyone()
        numbers_per_s = probe.numbers_per_s(device)
    with waiting("arithmetic"):
        wrong_answers, arithmetic_s = probe.wrong_answers(runtime)
    with waiting("the sums of all ranks"):
        all_reduces = _all_reduces(runtime) if launched.world_size > 1 else []
    with waiting("clocks and links"):
        clock = clock_offsets.compare(runtime, runtime.from_main(time.time_ns()))
        link_gb_per_s = probe.time_link(first_ranks, device)
    with waiting("writing to the run folder"):
        node = probe.write_files(run_dir) if launched.local_rank == 0 else None
        if node is not None:
            following = first_ranks[(first_ranks.index(launched.rank) + 1) % len(first_ranks)]
            node = replace(
                node,
                clock_ms=clock.ahead_ns / 1e6,
                clock_error_ms=clock.error_ns / 1e6,
                link_to=places[following][1] if following != launched.rank else "",
                link_gb_per_s=link_gb_per_s,
            )
        free_bytes, total_bytes = probe.memory(device)
        own = Rank(
            rank=launched.rank,
            host=socket.gethostname(),
            address=probe.address_towards(head),
            device=device.type if device.type == "cpu" else str(device),
            device_name=probe.device_name(device),
            free_bytes=free_bytes,
            total_bytes=total_bytes,
            versions=probe.software(device),
            numbers_per_s=numbers_per_s,
            node=node,
            arithmetic_s=arithmetic_s,
            wrong_answers=wrong_answers,
        )
        ranks = runtime.gather(own)
    runtime.close()
    return Examination(ranks=ranks, all_reduces=all_reduces, notes=runtime.notes)


def _all_reduces(runtime: Runtime) -> list[AllReduce]:
    from app.doctor import probe

    found = []
    for size_bytes, elapsed_s, right in probe.time_all_reduces(runtime.device):
        everywhere: list[tuple[list[float], bool]] = runtime.gather((elapsed_s, right))
        slowest_s = [max(times) for times in zip(*(times for times, _ in everywhere), strict=True)]
        wrong = tuple(rank for rank, (_, is_right) in enumerate(everywhere) if not is_right)
        rates = tuple(size_bytes / seconds / 1e9 for seconds in slowest_s)
        found.append(AllReduce(size_bytes=size_bytes, gb_per_s=rates, wrong_ranks=wrong))
    return found


@contextmanager
def patience(what: str, launched: Launched, *, seconds: float, exit_code_file: str | None = None) -> Iterator[None]:
    """Say what is measured, and end this process if it takes too long: a collective that lacks a rank waits for ever."""
    if launched.rank == 0:
        sys.stderr.write(f"samerun doctor: {what}\n")
        sys.stderr.flush()
    stuck = TopologyError(
        f"{what}: not finished after {seconds:g} s (--patience). Ranks that report this wait for each other, "
        "or for a rank that does not report it: exclude that rank's node, or set NCCL_SOCKET_IFNAME or "
        "GLOO_SOCKET_IFNAME to the network to use"
    )
    timer = threading.Timer(seconds, _give_up, (stuck, launched, exit_code_file))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _give_up(error: TopologyError, launched: Launched, exit_code_file: str | None) -> None:
    """End this process, whatever the others do. With a file for its exit code it ends with 0, as main does."""
    from app.errors import leave_with

    if exit_code_file is not None:
        Path(exit_code_file).write_text("1")
        error.exit_code = 0
    leave_with(error, launched.rank)


def _show(examination: Examination | None, problems: Sequence[Problem], exclude: str | None) -> None:
    from rich.console import Console

    console = Console() if sys.stdout.isatty() else Console(width=160)

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    if examination is not None:
        say(f"processes: {len(examination.ranks)}, nodes: {len(examination.nodes)}")
        console.print(_rank_table(examination.ranks))
        if examination.all_reduces:
            say("all-reduce of float32, algorithm bandwidth in GB/s (bytes / time of the slowest rank):")
            console.print(_all_reduce_table(examination.all_reduces))
        say("rank 0 has " + ", ".join(f"{name} {version}" for name, version in examination.ranks[0].versions.items()))
        for note in examination.notes:
            say(f"note: {note}")
    for problem in problems:
        say(f"WRONG {problem}")
    if exclude:
        say(f"To exclude them under Slurm: sbatch {exclude} ...")
    say("nothing is wrong" if not problems else f"{len(problems)} problem{'s' if len(problems) > 1 else ''}")


def _rank_table(ranks: Sequence[Rank]) -> Any:
    from rich.table import Table

    table = Table()
    for rank in ranks:
        cells = {**_cells(rank), **_node_cells(rank.node)}
        if not table.columns:
            for name in cells:
                table.add_column(name, justify="left" if name in ("host", "address", "device", "driver") else "right")
        table.add_row(*cells.values())
    return table


def _cells(rank: Rank) -> dict[str, str]:
    memory = "unknown"
    if rank.free_bytes is not None and rank.total_bytes is not None:
        memory = f"{rank.free_bytes / 2**30:.1f}/{rank.total_bytes / 2**30:.1f}"
    return {
        "rank": str(rank.rank),
        "host": rank.host,
        "address": rank.address,
        "device": rank.device if rank.device == rank.device_name else f"{rank.device} {rank.device_name}",
        "driver": rank.versions.get("driver", "-"),
        "memory GiB\nfree/total": memory,
        "arithmetic\ncheck s": f"{rank.arithmetic_s:.2f}",
        "million\nnumbers/s": f"{rank.numbers_per_s / 1e6:,.0f}",
    }


def _node_cells(node: Node | None) -> Mapping[str, str]:
    """Empty for all but the first rank of a node."""
    names = ("clock ms\nto rank 0", "link GB/s\nto next node", "run folder\nMB/s written", "run folder\nGiB free")
    if node is None:
        return dict.fromkeys(names, "")
    figures = (
        f"{node.clock_ms:+.2f}\u00b1{node.clock_error_ms:.2f}",
        "-" if node.link_gb_per_s is None else f"{node.link_gb_per_s:.2f}",
        "none" if node.write_mb_per_s is None else f"{node.write_mb_per_s:,.0f}",
        "unknown" if node.free_disk_bytes is None else f"{node.free_disk_bytes / 2**30:,.1f}",
    )
    return dict(zip(names, figures, strict=True))


def _all_reduce_table(all_reduces: Sequence[AllReduce]) -> Any:
    from rich.table import Table

    table = Table("bytes", "median", "least", "most", "sums")
    for found in all_reduces:
        rates = [f"{rate:.3f}" for rate in (statistics.median(found.gb_per_s), min(found.gb_per_s), max(found.gb_per_s))]
        table.add_row(f"{found.size_bytes:,}", *rates, "WRONG" if found.wrong_ranks else "right")
    return table


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="accelerate launch --config_file accelerate_configs/PRESET.yaml -m app.doctor.doctor",
        description="Examine the machines and processes of a run before it.",
    )
    parser.add_argument("--run-dir", default="runs", help="folder that a run would write to (default: runs)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--patience", type=above_zero, default=60.0, metavar="SECONDS", help="longest time of one measurement; "
                        "then a rank is stuck (default: 60)")  # fmt: skip
    parser.add_argument("--exit-code-file", metavar="FILE", help="write the exit code there, for each node, instead of ending "
                        "with it: a launcher would print a traceback for what is only bad news")  # fmt: skip
    return parser.parse_all(argv)


if __name__ == "__main__":
    main()
