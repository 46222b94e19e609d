"""Containers: srun starts `samerun launch` in an image on every node of a Slurm job.

The `samerun launch` of the batch script or of salloc runs on the host, because no image contains Slurm's programs. It finds
the nodes and the end of the job's time, passes signals on, restarts the run and requeues the job. The tasks in the containers
need only their environment, which every runtime passes on (variables that the image sets take precedence), and their folders.

srun sends a signal to the runtime. apptainer and podman forward it to the container, unless they run in the foreground of a
terminal; under pyxis the task itself is the process in the container.

Sources: apptainer-exec(1) 1.4, and singularity has the same options; `srun --help` with pyxis; podman-run(1) 5.3; the modules
`gpu` and `openmpi-pmix` of podman-hpc.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from app.errors import UsageError
from app.options import Parser, value_reader
from launch.schedulers.hosts import Allocation, count_accelerators

OPTIONS = ("container_image", "container_runtime", "container_mounts")
"""Names of the options with one value, as argparse stores them."""
_GPU_OPTIONS = {"--nv", "--rocm", "--gpu"}


def add_options(parser: Parser) -> None:
    """Add the options that `samerun launch` and `samerun submit` have."""
    image = value_reader(str, lambda text: bool(re.fullmatch(r"[^\s-]\S*", text)), "the file or address of an image")
    path = r"/[^:,]*"
    mount = rf"{path}(:{path}(:[\w+]+)?)?"
    example = "absolute paths, such as /scratch,/data/v2:/data:ro"
    mounts = value_reader(str, lambda text: bool(re.fullmatch(rf"{mount}(,{mount})*", text)), example)
    parser.add_argument("--container-image", type=image, metavar="IMAGE", help="run in a container on every node of a Slurm "
        "job; the image must contain Samerun")  # fmt: skip
    parser.add_argument("--container-runtime", choices=("apptainer", "singularity", "pyxis", "podman-hpc"), default="apptainer",
        help="program that starts the container (default: apptainer)")  # fmt: skip
    parser.add_argument("--container-mounts", type=mounts, metavar="PATH[:INSIDE[:ro]],...", help="host folders to mount in "
        "the container, besides the working folder and the run folder")  # fmt: skip
    parser.add_argument("--container-option", dest="container_options", metavar="OPTION", action="append", default=[],
        help="one more option for the runtime, such as --container-option=--nccl; may be repeated. --nv, --rocm or --gpu is "
        "added if the nodes have GPUs")  # fmt: skip


def problems(options: argparse.Namespace, *, run_dir: Path, is_slurm: bool) -> Iterator[str]:
    """Yield what is wrong with the options. `is_slurm`: this process can start tasks by srun, or submits a job that can."""
    image = options.container_image
    if not image and (options.container_mounts or options.container_options or options.container_runtime != "apptainer"):
        yield "--container-runtime, --container-mounts and --container-option require --container-image"
    if image and not is_slurm:
        yield (
            f"--container-image is {image}, but only a batch script or salloc of Slurm can start the containers: elsewhere, "
            "start them yourself and run `samerun launch` in them"
        )
    for path in _own_folders(run_dir) if image else ():
        if re.search("[:,]", path):
            yield f"{path} cannot be mounted in a container because its name contains : or ,: use another folder"


def missing(options: argparse.Namespace) -> Iterator[str]:
    """Yield which image file or mounted folders do not exist on this machine."""
    image = options.container_image or ""
    is_path = image.startswith(("/", "./")) or options.container_runtime in ("apptainer", "singularity")
    if image and is_path and "://" not in image and not Path(image).exists():
        yield f"--container-image is {image}: no such file or folder"
    for mount in _mounts(options):
        if not Path(source := mount.partition(":")[0]).exists():
            yield f"--container-mounts has {source}: no such file or folder"


def with_image(
    options: argparse.Namespace,
    allocation: Allocation | None,
    environment: Mapping[str, str],
    *,
    run_dir: str | None,
    device_folder: Path = Path("/dev"),
) -> Allocation | None:
    """Return the allocation with the words that enter the image, if one is given. Raises UsageError."""
    srun = allocation.start if allocation else ()
    for problem in problems(options, run_dir=Path(run_dir or ""), is_slurm=srun[:1] == ("srun",)):
        raise UsageError(problem)
    if not (allocation and run_dir and options.container_image):
        return allocation
    is_amd = (device_folder / "kfd").exists() and not (device_folder / "nvidiactl").exists()
    has_gpus = is_amd or any(word.startswith("--gpus-per-node=") for word in srun)
    has_gpus |= count_accelerators(environment, device_folder=device_folder)[0] > 0
    image, runtime, folder, added = options.container_image, options.container_runtime, Path.cwd(), options.container_options
    if has_gpus and runtime != "pyxis" and _GPU_OPTIONS.isdisjoint(added):  # pyxis's enroot adds the GPUs itself
        added = ["--gpu" if runtime == "podman-hpc" else "--rocm" if is_amd else "--nv", *added]
    mounts = [*(f"{path}:{path}" for path in _own_folders(Path(run_dir))), *_mounts(options)]
    if runtime == "pyxis":
        words = [f"--container-image={image}", f"--container-mounts={','.join(mounts)}", f"--container-workdir={folder}"]
        words += added
    elif runtime == "podman-hpc":  # --ipc: its 64 MiB of shared memory are too few for NCCL; --env-host: all variables
        words = [runtime, "run", "--rm", "--network=host", "--pid=host", "--ipc=host", "--env-host", f"--workdir={folder}"]
        words += [*(f"--volume={mount}" for mount in mounts), *added, image]
    else:
        words = [runtime, "exec", "--bind", ",".join(mounts), "--pwd", str(folder), *added, image]
    return replace(allocation, enter=tuple(words))


def _own_folders(run_dir: Path) -> list[str]:
    """Return the working folder and, if it is elsewhere, the run folder."""
    folder = Path.cwd()
    run_folders = [path for path in (run_dir.absolute(), run_dir.resolve()) if not path.is_relative_to(folder)]
    return list(dict.fromkeys(map(str, (folder, *run_folders))))


def _mounts(options: argparse.Namespace) -> list[str]:
    """Return each of --container-mounts with its path in the container."""
    given = options.container_mounts.split(",") if options.container_mounts else []
    return [mount if ":" in mount else f"{mount}:{mount}" for mount in given]
