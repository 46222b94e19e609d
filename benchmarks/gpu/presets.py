"""What `accelerate launch` gives a process under a preset to find in its environment.

    python -m benchmarks.gpu.presets FILE

is the process that writes down what it was given.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from app.place.topology import Topology
from launch import preset
from launch.node_command import accelerate_argv


def variables_of(names: Sequence[str], *, folder: Path, on_cpu: bool) -> dict[str, dict[str, str]]:
    """Return what real launches of one process under these presets add to this process's environment, with a meeting point.

    They go on at the same time. Raises CalledProcessError if one fails.
    """
    topology = Topology(processes_per_node=1, origins={"processes_per_node": "one GPU"})
    environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": ""} if on_cpu else {})}
    started = {}
    for name in names:
        command = accelerate_argv(topology, preset.load(name), [str(folder / f"{name}.json")], module=__spec__.name)
        started[name] = subprocess.Popen(command, env=environment, stdout=sys.stderr)
    for process in started.values():
        if process.wait():
            raise subprocess.CalledProcessError(process.returncode, process.args)
    return {name: _added(json.loads((folder / f"{name}.json").read_text()), environment) for name in names}


def _added(given: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    added = {name: value for name, value in given.items() if environment.get(name) != value}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        # That of the launcher has gone with it.
        return {**added, "MASTER_PORT": str(probe.getsockname()[1]), "TORCHELASTIC_USE_AGENT_STORE": "False"}


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(dict(os.environ)))
