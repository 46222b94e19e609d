"""Job scripts that give every node the same machine rank: cause 16, found by reading the script."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from app.audit.causes import Finding
from app.errors import UsageError

_OF_TASK = r"\$\{?(SLURM_PROCID|SLURM_NODEID|PMI_RANK|OMPI_COMM_WORLD_RANK)\b"


def check(path: Path) -> Iterator[Finding]:
    """Find launches of one rank for all nodes in a job script. Raises UsageError if it cannot be read."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--script {path} cannot be read: {error}") from error
    if re.search(r"^#SBATCH\s+(?:--nodes[= ]|-N\s*)1\b", text, re.MULTILINE):
        return
    joined = re.sub(r"\\\n\s*", " ", re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE))
    variables = re.findall(r"""^\s*(?:export\s+)?(\w+)=("[^"]*"|'[^']*'|\S*)""", joined, re.MULTILINE)
    for command in re.findall(r"""^.*\b(?:srun|mpirun|mpiexec)\b(?:"(?:\\.|[^"])*"|'[^']*'|[^'"\n])*""", joined, re.MULTILINE):
        for name, value in [*variables, *variables]:  # twice: a variable can contain another
            command = re.sub(rf"\$(?:\{{{name}\}}|{name}\b)", value.strip("\"'").replace("\\", r"\\"), command)  # noqa: PLW2901
        if not re.search(r"accelerate(\.commands\.|\s+)launch|torchrun|torch\.distributed\.run", command):
            continue
        by_task = "".join(re.findall(r"'[^']*'|\\\$\{?\w+", command)).replace("\\", "")  # what the batch shell does not fill in
        rank = re.search(r"--(?:machine[_-]rank|node[_-]rank)[= ]+(\S+)", command)
        if rank and re.search(_OF_TASK, rank[1]) and not re.search(_OF_TASK, by_task):
            why = f"{rank[1].strip(chr(34))} is filled in once, by the batch shell, as 0"
        elif rank and rank[1].strip("\"'").isdigit():
            why = f"each has machine rank {rank[1]}"
        elif rank or re.search(r"--rdzv[_-]backend[= ]+c10d|SLURM_NODEID|SLURM_PROCID|MACHINE_RANK", command):
            continue
        else:
            why = "without --machine_rank each takes it from the same configuration"
        yield Finding(16, f"{path.name}: `{' '.join(command.split())[:60]} ...` starts a launcher on every node, and {why}.")
