"""This machine as a `Topology`: one node, one process per accelerator, or the requested number.

The environment is a mapping passed in, never `os.environ` itself, so any machine can be pictured in a test. Accelerators
are counted without torch, which takes a second to import and is not there on a login node.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from pathlib import Path

from app.environment.topology import Topology
from app.errors import TopologyError


def find(
    environment: Mapping[str, str],
    *,
    processes: int | None = None,
    origin: str = "--processes",
    device_folder: Path = Path("/dev"),
) -> Topology:
    """Return this machine as a topology: `processes` (from `origin`), or one per accelerator and at least one.

    The port is left to `accelerate launch` (0), which looks for a free one just before it is used: two runs started
    together cannot meet, and a printed command can be run again. Raises TopologyError.
    """
    if processes is not None:
        if processes < 1:
            raise TopologyError(f"{origin} is {processes}: a run needs at least 1 process")
        return Topology(processes_per_node=processes, origins={"processes_per_node": origin})
    count, where = count_accelerators(environment, device_folder=device_folder)
    if count == 0:
        return Topology(origins={"processes_per_node": f"no accelerator: {where}"})
    return Topology(processes_per_node=count, origins={"processes_per_node": where})


def count_accelerators(environment: Mapping[str, str], *, device_folder: Path = Path("/dev")) -> tuple[int, str]:
    """Return the number of visible NVIDIA devices and where it was read: CUDA_VISIBLE_DEVICES, else the device files.

    The list is read as CUDA does: it ends at the first entry that names no device (-1 is the usual way to say none), and
    an entry given twice makes it empty. Reference: `torch.cuda._parse_visible_devices`.
    """
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        files = [path for path in device_folder.glob("nvidia[0-9]*") if path.name[len("nvidia") :].isdigit()]
        return len(files), f"{device_folder}/nvidia*"
    named = itertools.takewhile(re.compile(r"\d+|(GPU|MIG)-.+").fullmatch, (entry.strip() for entry in listed.split(",")))
    devices = list(named)
    return len(devices) if len(set(devices)) == len(devices) else 0, f"CUDA_VISIBLE_DEVICES={listed}"
