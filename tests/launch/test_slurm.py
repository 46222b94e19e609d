"""Slurm's environments, captured from real jobs, as allocations, and what `samerun launch` makes of them.

The golden file holds every value and every command for each shape of job; after an intended change:
    PYTHONPATH=. python tests/launch/test_slurm.py > tests/golden/slurm.txt
"""

from __future__ import annotations

import dataclasses
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import captured, placed

from app.environment.slurm_variables import hosts_of
from app.errors import TopologyError, UsageError
from launch import preset
from launch.node_command import accelerate_argv
from launch.schedulers import slurm
from launch.schedulers.hosts import ATTEMPT
from launch.start import containers, resolved
from launch.start.launch import launch

ROOT = Path(slurm.__file__).parents[2]
ENVIRONMENTS = Path(__file__).parents[1] / "environments" / "slurm"
GOLDEN = Path(__file__).parents[1] / "golden" / "slurm.txt"

IMAGES = {"apptainer": "it.sif", "singularity": "docker://me/it:1", "pyxis": "nvcr.io#me/it:1", "podman-hpc": "me/it:1"}
IN_CONTAINERS = ("--container-mounts", "/data,/sets:/inputs:ro", "--container-option=--one", "--container-option=--two")

# `scontrol show --details job` of Slurm 22.05, shortened, in a cluster where the lines of a node end so.
DESCRIBED = """JobId=30 JobName=interactive
   NumNodes=2 NumCPUs=8 NumTasks=2 CPUs/Task=4 ReqB:S:C:T=0:0:*:*
   JOB_GRES=gpu:4
     Nodes=node[1-2] CPU_IDs=0-3 Mem=4096 GRES=gpu:2(IDX:0-1)
   TresPerNode=gres:gpu:2
"""
UNEVEN = """   JOB_GRES=gpu:a100:3
     Nodes=node1 CPU_IDs=0 Mem=1024 GRES=gpu:a100:2(IDX:0-1)
     Nodes=node2 CPU_IDs=0 Mem=1024 GRES=gpu:a100:1(IDX:0)
"""


def found(name, described=DESCRIBED, **options):
    environment = captured(f"slurm/{name}") if isinstance(name, str) else name
    host = environment.get("SLURMD_NODENAME", "head")
    return slurm.find(environment, hostname=host, has_srun=True, scontrol=lambda arguments: described, **options)


def golden_lines():
    for path in sorted(ENVIRONMENTS.glob("*.txt")):
        yield f"## {path.stem}: {path.read_text().splitlines()[0].removeprefix('# ')}"
        try:
            allocation = found(path.stem)
        except TopologyError as error:
            yield f"TopologyError: {error}"
            continue
        topology = allocation.topology
        for field in dataclasses.fields(topology):
            if field.name != "origins":
                yield f"{field.name} = {getattr(topology, field.name)!r}  ({topology.origins.get(field.name, 'default')})"
        if allocation.start:
            yield f"{shlex.join(allocation.start)} samerun launch  # {allocation.start_origin}"
        places = list(enumerate(topology.hosts)) if allocation.start else [(topology.node_rank, "this node")]
        for node_rank, host in places:
            argv = accelerate_argv(topology, preset.load("multi_gpu"), ["--recipe", "digits"], node_rank=node_rank)
            yield f"{host}: {placed(shlex.join(argv))}"
    for runtime, image in IMAGES.items():
        for name, more in {"2node-1task-gres2-batch": IN_CONTAINERS, "cpucluster-2node-batch": ()}.items():
            words = ["--container-image", image, "--container-runtime", runtime, *more]
            run_dir = "/scratch/run" if more else "run"
            allocation = containers.with_image(
                resolved.read(words)[0], found(name), {}, run_dir=run_dir, device_folder=Path("/none")
            )
            yield f"## {name} in {runtime}"
            yield shlex.join([*allocation.start, *allocation.enter]).replace(str(Path.cwd()), "FOLDER") + " samerun launch"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("node[3,1],a", "node3 node1 a"),
        ("rack[0-1]n[08-10,7]", "rack0n08 rack0n09 rack0n10 rack0n7 rack1n08 rack1n09 rack1n10 rack1n7"),
    ],
)
def test_a_list_of_nodes_keeps_slurms_order(words, expected):
    assert hosts_of(words) == expected.split()


@pytest.mark.parametrize("words", ["", "n[1-", "n[2-1]"])
def test_what_is_no_list_of_nodes_is_refused(words):
    with pytest.raises(ValueError, match=r"not a list of nodes|counts down"):
        hosts_of(words)


def test_values_and_commands_are_those_of_the_golden_file():
    assert len(list(ENVIRONMENTS.glob("*.txt"))) >= 20
    assert list(golden_lines()) == GOLDEN.read_text().splitlines()


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"SLURM_GPUS_PER_NODE": "gpu:a100_3g.20gb:1,gpu:1g.5gb:3"}, 4),
        ({"SLURM_GPUS_ON_NODE": "4", "SLURM_GPUS": "a100:4,h100:4"}, 4),
        ({"SLURM_GPUS_PER_TASK": "a100:1,h100:1", "SLURM_TASKS_PER_NODE": "2(x2)"}, 4),
        ({"SLURM_NTASKS_PER_NODE": "3"}, 3),
        ({}, 1),
    ],
)
def test_gpus_are_counted_in_every_spelling(said, expected):
    environment = {name: value for name, value in captured("slurm/cpucluster-2node-batch").items() if "NTASKS" not in name}
    assert found(environment | said).topology.processes_per_node == expected


def test_in_a_task_the_visible_devices_count():
    environment = captured("slurm/2node-1task-gres2-step-task1")
    with pytest.raises(TopologyError, match=r"--processes-per-node is 2, but node2 has 1 GPUs .*CUDA_VISIBLE_DEVICES=0\)"):
        found(environment | {"CUDA_VISIBLE_DEVICES": "0"}, processes_per_node=2)


def test_different_numbers_of_gpus_are_refused_with_the_legal_choices():
    with pytest.raises(TopologyError, match=r"scontrol show job: 1, 2.*--processes-per-node 1,"):
        found("salloc-2node-gres2-shell", UNEVEN)
    unequal_tasks = captured("slurm/cpucluster-2node-batch") | {"SLURM_GPUS_PER_TASK": "2", "SLURM_TASKS_PER_NODE": "3,2"}
    with pytest.raises(TopologyError, match="--processes-per-node 1 to 4"):
        found(unequal_tasks)
    assert found(unequal_tasks, processes_per_node=1).topology.world_size == 2


def test_the_fast_network_has_names_of_its_own():
    named = {"SLURM_JOB_NODELIST": "jwb0001.juwels,other", "SAMERUN_HOST_SUFFIX": "i"}
    assert found(captured("slurm/cpucluster-2node-batch") | named).topology.head_address == "jwb0001i.juwels"


@pytest.mark.parametrize(
    ("changes", "threads"),
    [
        ({"SLURM_JOB_CPUS_PER_NODE": "16,8"}, 2),
        # asked for fewer CPUs than an exclusive node has
        ({"SLURM_JOB_CPUS_PER_NODE": "128(x2)", "SLURM_CPUS_PER_TASK": "6", "SLURM_TASKS_PER_NODE": "4(x2)"}, 6),
        ({"OMP_NUM_THREADS": "3"}, None),
    ],
)
def test_threads_are_the_share_of_the_smallest_node(changes, threads):
    environment = captured("slurm/cpucluster-2node-batch") | changes
    assert found(environment, processes_per_node=4).topology.threads_per_process == threads


# Ports ---------------------------------------------------------------------------------------------------------------------


@given(job=st.integers(1, 2**32), other=st.integers(1, 19999), step=st.integers(0, 2**32 - 1))
def test_jobs_with_neighbouring_ids_have_ports_of_their_own(job, other, step):
    task = captured("slurm/cpucluster-2node-step-task1") | {"SLURM_STEP_ID": str(step)}
    one, another = (found(task | {"SLURM_JOB_ID": str(number)}).topology.port for number in (job, job + other))
    assert one != another
    assert 1024 < one < 32768


def test_a_port_in_use_is_one_sentence():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        environment = captured("slurm/2node-1task-gres2-step-task0") | {"SLURMD_NODENAME": socket.gethostname()}
        with pytest.raises(TopologyError, match=f"port is {port} \\(--port\\) cannot be used on node1, node 0 .*--port N"):
            launch(["--port", str(port)], environment, say=lambda text: None)


# What is refused -----------------------------------------------------------------------------------------------------------

BATCH = captured("slurm/2node-1task-gres2-batch")


@pytest.mark.parametrize(
    ("environment", "hostname", "has_srun", "words"),
    [
        (BATCH, "laptop", False, "SLURM_JOB_ID=18.*SLURMD_NODENAME=node1.*laptop.*left over.*env -u SLURM_JOB_ID"),
        (BATCH | {"SLURM_JOB_NODELIST": "node[1-"}, "node1", True, r"SLURM_JOB_NODELIST is 'node\[1-'"),
        (BATCH | {"SLURM_JOB_NUM_NODES": "3"}, "node1", True, r"hosts is \('node1', 'node2'\).*SLURM_JOB_NUM_NODES=3"),
    ],
)
def test_what_cannot_be_is_one_sentence(environment, hostname, has_srun, words):
    with pytest.raises(TopologyError, match=words):
        slurm.find(environment, hostname=hostname, has_srun=has_srun)


def test_a_container_without_srun_is_no_stale_environment():
    task = captured("slurm/2node-1task-gres2-step-task1")
    assert slurm.find(task, hostname="node2.cluster.org", has_srun=False).topology.node_rank == 1
    assert slurm.find(task | {ATTEMPT: "0-0"}, hostname="another-name", has_srun=False).topology.node_rank == 1


# samerun -------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def dry_run(tmp_path, monkeypatch, capsys):
    """`samerun launch --dry-run` in an environment, with an srun on the PATH that must not be called, and no controller.

    The captured job's is elsewhere, and Slurm's own scontrol would look for it for 20 s.
    """
    for command, code in {"srun": 99, "scontrol": 1}.items():
        (tmp_path / command).write_text(f"#!/bin/sh\nexit {code}\n")
        (tmp_path / command).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def run(environment, *arguments):
        assert launch(["--dry-run", *arguments], environment, say=lambda text: print(text, file=sys.stderr)) == 0
        return capsys.readouterr()

    return run


def test_a_dry_run_prints_the_command_of_every_node(dry_run):
    out, err = dry_run(BATCH, "--preset", "deepspeed_zero3", "optim.lr=0.1")
    assert "port is 12018 (SLURM_JOB_ID=18, its first step)\n" in err
    srun, name1, node1, name2, node2 = out.splitlines()
    added = "launch --processes-per-node 2 --run-dir runs/digits-18"
    assert srun.startswith("srun ")
    assert srun.endswith(f"{added} --dry-run --preset deepspeed_zero3 optim.lr=0.1")
    assert (name1, name2) == ("# node 0, node1:", "# node 1, node2:")
    assert node1.replace("--machine_rank 0", "--machine_rank 1").replace("on node1]", "on node2]") == node2
    assert "--num_processes 4" in node1
    assert node1.startswith("env OMP_NUM_THREADS=2 ")
    assert node1.endswith("/run_module.py app.train --recipe digits --run-dir runs/digits-18 --resume auto optim.lr=0.1")
    (in_image,) = dry_run(BATCH, "--container-image", "it.sif")[0].splitlines()
    assert in_image.endswith(f" it.sif samerun {added} --dry-run --container-image it.sif")


def test_amd_gpus_are_in_the_container(tmp_path):
    (tmp_path / "kfd").touch()
    options = resolved.read(["--container-image", "it.sif"])[0]
    words = containers.with_image(options, found("2node-exclusive-batch"), {}, run_dir="run", device_folder=tmp_path).enter
    assert words[-2:] == ("--rocm", "it.sif")


def test_a_run_folder_behind_a_link_is_in_the_container(tmp_path, monkeypatch):
    folder, scratch = tmp_path / "project", tmp_path / "scratch"
    folder.mkdir()
    (folder / "runs").symlink_to(scratch)
    monkeypatch.chdir(folder)
    options = resolved.read(["--container-image", "it.sif"])[0]
    words = containers.with_image(options, found("2node-exclusive-batch"), {}, run_dir="runs/it").enter
    assert f"{folder}:{folder},{scratch}/it:{scratch}/it" in words


@pytest.mark.parametrize(
    ("environment", "options", "words"),
    [
        (BATCH, "--container-runtime pyxis", "require --container-image"),
        ({}, "--container-image it.sif", "--container-image is it.sif, but only a batch script or salloc of Slurm"),
        (BATCH, "--container-image it.sif --run-dir /a:b", "/a:b cannot be mounted in a container"),
        (BATCH, "--container-image it.sif --container-mounts data", "'data': expected absolute paths, such as"),
    ],
)
def test_a_container_that_cannot_be_is_one_sentence(environment, options, words):
    with pytest.raises(UsageError, match=words):
        launch(["--dry-run", *options.split()], environment, say=print)


def test_a_node_with_one_gpu_has_the_same_default_seen_from_salloc_and_from_its_task(dry_run):
    """The shell of salloc sees no device, the task does; what the one announces the other must run."""
    task = captured("slurm/1node-gres2-step-task0") | {"CUDA_VISIBLE_DEVICES": "0", "SLURMD_NODENAME": socket.gethostname()}
    batch = {name: value for name, value in captured("slurm/1node-gpus1-batch").items() if name != "CUDA_VISIBLE_DEVICES"}
    for environment in (task, batch):
        assert "single_gpu.yaml" in dry_run(environment)[0]


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck: run `make lab-packages`")
def test_the_scripts_are_clean():
    scripts = [*(ROOT / "launch").glob("*.sh"), ROOT / "launch" / "multinode.pbs"]
    assert len(scripts) >= 3
    finished = subprocess.run(["shellcheck", *scripts], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout


if __name__ == "__main__":
    print("\n".join(golden_lines()))
