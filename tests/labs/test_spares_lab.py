"""Jobs of a real Slurm that lose nodes and continue on others, within the job: each run is the undisturbed one."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import slurm_lab
from processes import REPOSITORY, losses, read, train
from slurm_lab import Job, Lab

from app.environment.slurm_variables import hosts_of
from app.runs import ledger

_WHY_NOT = slurm_lab.why_not()
pytestmark = [
    pytest.mark.long,
    pytest.mark.multiproc,
    pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT)),
]

SCRIPT = str(REPOSITORY / "launch" / "multinode.sh")
STEPS = 160
NODES = 22
RECIPE = ("--recipe", "digits", f"train.steps={STEPS}", "train.global_batch_size=48", "log.every_steps=1", "optim.lr=1e-4",
          "train.evaluate_every_epochs=0", "checkpoint.every_steps=5", "--trackers", "none")  # fmt: skip
# Many small passes for a step, so that there is time to lose a node.
SLOWLY = (*RECIPE, "train.max_micro_batch=1")


def fed(run_dir: Path) -> list[str]:
    """Digests of the samples of each step that counts."""
    spans = [event for event in ledger.counting(ledger.read(run_dir)[0]) if isinstance(event, ledger.StepSpan)]
    return list(itertools.chain.from_iterable(span.digests for span in spans))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("undisturbed")
    train("cpu", run_dir, *RECIPE).check()
    assert len(losses(run_dir)) == len(fed(run_dir)) == STEPS
    return run_dir


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("slurm") / "lab"
    with slurm_lab.lab(folder, tmp_path_factory.mktemp("outputs"), nodes=NODES, gpus_per_node=2) as up:
        yield up
    assert slurm_lab.left_over(folder) == []


def submit(lab: Lab, nodes: str, count: int, run_dir: Path, *options: str, env: Mapping[str, str] | None = None) -> str:
    """Submit a run on some of these nodes of the lab, one process on each."""
    ours = ("--oversubscribe", "--mem=4G", "--gpus-per-node=2", "--time=20", "--no-kill")
    others = ",".join(f"node{it}" for it in range(1, NODES + 1) if f"node{it}" not in hosts_of(nodes))
    command = (SCRIPT, "--processes-per-node", "1", "--run-dir", str(run_dir), *options, *SLOWLY)
    return lab.sbatch(*ours, f"--nodes={count}", f"--exclude={others}", *command, env=env)


def wait_for_checkpoint_of(lab: Lab, job: str, run_dir: Path, hosts: list[str]) -> None:
    """Wait until the run has saved a checkpoint on these hosts."""
    deadline_s = time.monotonic() + 180
    before: set[Path] | None = None
    while True:
        assert time.monotonic() < deadline_s, lab.output(job)
        time.sleep(0.1)
        if not (run_dir / "run.json").exists():
            continue
        if [rank.split()[0] for rank in read(run_dir / "run.json")["ranks"]] != hosts:
            continue
        saved = set((run_dir / "checkpoints").glob("step-*"))
        before = saved if before is None else before
        if saved - before:
            return


def assert_same(over: Job, run_dir: Path, undisturbed: Path, lost: list[str]) -> None:
    assert (over.state, over.exit_code) == ("COMPLETED", "0:0"), over.output
    assert read(run_dir / "outcome.json")["outcome"] == "finished"
    assert 0 < read(run_dir / "run.json")["resumed_step"] < STEPS, over.output
    assert losses(run_dir) == pytest.approx(losses(undisturbed), rel=1e-5), over.output
    assert fed(run_dir) == fed(undisturbed)
    assert sorted(path.stem for path in run_dir.glob("errors/*/lost-*.json")) == [f"lost-{node}" for node in lost], over.output


def test_two_lost_nodes_are_replaced_by_spares_within_the_job(lab: Lab, undisturbed: Path, tmp_path: Path) -> None:
    """One switched off; then one behind a cut cable, whose process lives on."""
    run_dir = tmp_path / "run"
    job = submit(lab, "node[1-4]", 4, run_dir, "--spares", "2")
    wait_for_checkpoint_of(lab, job, run_dir, ["node1", "node2"])
    lab.lose("node2", "power")
    wait_for_checkpoint_of(lab, job, run_dir, ["node1", "node3"])
    lab.lose("node3", "link")
    over = lab.wait(job)
    assert_same(over, run_dir, undisturbed, ["node2", "node3"])
    assert lab.facts(job)["Restarts"] == "0"
    assert "spare nodes: node3, node4" in over.output
    assert "the run lost node2, and resumes from its newest checkpoint on node1, node3" in over.output


def test_a_node_whose_slurmd_ends_is_replaced_and_one_with_a_crash_is_not(lab: Lab, undisturbed: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    job = submit(lab, "node[5-7]", 3, run_dir, "--spares", "1", "--max-restarts", "1")
    wait_for_checkpoint_of(lab, job, run_dir, ["node5", "node6"])
    lab.run("pkill", "--signal", "KILL", "--full", "^[^ ]+ -u [^ ]+ app.train", node="node6").check()
    lab.wait_for_output(job, "restart 1 of 1")
    wait_for_checkpoint_of(lab, job, run_dir, ["node5", "node6"])
    lab.run("pkill", "--signal", "KILL", "--exact", "slurmd", node="node6").check()
    assert_same(lab.wait(job), run_dir, undisturbed, ["node6"])
    assert [rank.split()[0] for rank in read(run_dir / "run.json")["ranks"]] == ["node5", "node7"]


def test_without_spares_the_run_continues_on_fewer_nodes(lab: Lab, undisturbed: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    job = submit(lab, "node[8-11]", 4, run_dir, "--min-nodes", "3")
    wait_for_checkpoint_of(lab, job, run_dir, ["node8", "node9", "node10", "node11"])
    lab.lose("node11", "power")
    wait_for_checkpoint_of(lab, job, run_dir, ["node8", "node9", "node10"])
    over = lab.wait(job)
    assert_same(over, run_dir, undisturbed, ["node11"])
    assert lab.facts(job)["Restarts"] == "0"


def test_the_loss_of_the_first_node_requeues_the_job(lab: Lab, undisturbed: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    job = submit(lab, "node[12-15]", 3, run_dir, "--spares", "1")
    wait_for_checkpoint_of(lab, job, run_dir, ["node12", "node13"])
    lab.lose("node12", "power")
    over = lab.wait(job)
    assert_same(over, run_dir, undisturbed, [])
    assert lab.facts(job)["Restarts"] == "1"
    assert [rank.split()[0] for rank in read(run_dir / "run.json")["ranks"]] == ["node13", "node14"]


def test_too_few_nodes_requeue_the_job(lab: Lab, undisturbed: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    job = submit(lab, "node[14-17]", 2, run_dir, "--min-nodes", "2")
    wait_for_checkpoint_of(lab, job, run_dir, ["node14", "node15"])
    lab.lose("node15", "power")
    over = lab.wait(job)
    assert_same(over, run_dir, undisturbed, ["node15"])
    assert "samerun: the run lost node15\n" in over.output


def test_a_run_in_containers_replaces_a_node_and_is_requeued_without_its_first(
    lab: Lab, installed: Path, undisturbed: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run_dir, env = tmp_path / "run", slurm_lab.container_environment(installed, tmp_path_factory.getbasetemp())
    image = ("--container-image", str(installed.parent))
    job = submit(lab, "node[18-22]", 3, run_dir, "--spares", "1", *image, env=env)
    wait_for_checkpoint_of(lab, job, run_dir, ["node18", "node19"])
    lab.lose("node19", "power")
    wait_for_checkpoint_of(lab, job, run_dir, ["node18", "node20"])
    lab.lose("node18", "power")
    over = lab.wait(job)
    assert_same(over, run_dir, undisturbed, ["node19"])
    assert " apptainer exec " in over.output
    assert lab.facts(job)["Restarts"] == "1"
