"""Who may import whom (a room only rooms of lower floors), and that the launcher starts without the heavy libraries."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys

import floors
import pytest
from floors import FLOORS, LAUNCH_ROOMS, LAUNCHER_FLOOR, REPOSITORY, STARTERS_FLOOR, imports, modules, place


def test_the_picture_is_drawn_from_the_imports() -> None:
    assert (REPOSITORY / "docs" / "floors.svg").read_text() == floors.picture(), "run python docs/generate.py"
    assert "(docs/floors.svg)" in (REPOSITORY / "CONTRIBUTING.md").read_text()


def test_the_picture_has_every_room_and_what_follows_from_its_lines_is_every_import() -> None:
    graph = floors.rooms_imported()
    assert graph.keys() == {room for rooms in FLOORS for room in rooms} | {"launch"}
    assert graph["app.train"] >= {"app.session"}
    assert "app.recipe" not in graph["app.train"]  # by way of app.session


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Not inside a function either. Circles of types alone are left to the type checker."""
    graph = {name: imports(file, for_types=False) for name, file in modules().items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names them


@pytest.mark.parametrize("module", [name for name in modules() if not name.startswith("launch.")])
def test_a_room_imports_only_rooms_of_lower_floors(module: str) -> None:
    here = place(module)
    assert here is not None, f"{module} has no room: give it a floor here"
    for imported in imports(modules()[module]):
        if imported.startswith("launch."):
            assert here[0] >= STARTERS_FLOOR, f"{module} imports {imported}: only tools on top start processes"
            continue
        there = place(imported)
        assert there is not None
        assert there[0] < here[0] or there[1] == here[1], f"{module} (floor {here[0]}) imports {imported} ({there[0]})"


@pytest.mark.parametrize("module", [name for name in modules() if name.startswith("launch.")])
def test_the_launcher_sees_the_lower_floors_and_its_rooms_those_before_them(module: str) -> None:
    def number(name: str) -> int:
        inside = [any(name == part or name.startswith(f"{part}.") for part in room) for room in LAUNCH_ROOMS]
        return inside.index(True)

    for imported in imports(modules()[module]):
        if imported.startswith("launch."):
            assert number(imported) <= number(module), imported
        else:
            there = place(imported)
            assert module == "launch.cli" or (there is not None and there[0] <= LAUNCHER_FLOOR), imported


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        (
            f"import {', '.join(name for name in modules() if name.startswith('launch.'))}",
            {"torch", "numpy", "accelerate", "deepspeed", "datasets", "rich"},
        ),
        ("import app.data.order", {"torch"}),
        (
            "from app.recipe import recipe_file; recipe_file.load('digits'); recipe_file.reference()",
            {"torch", "numpy", "accelerate"},
        ),
        ("import app.reports.report, app.reports.watch", {"torch", "accelerate", "matplotlib"}),
        ("import app.tasks.image_classification.predictions", {"torch", "accelerate"}),
        ("import app.reports.curves", {"torch", "accelerate"}),
    ],
    ids=["launcher", "order", "recipe", "report", "page", "curves"],
)
def test_what_starts_fast_runs_without_heavy_libraries(code: str, heavy: set[str]) -> None:
    check = f"{code}\nimport sys; sys.exit(str({heavy} & set(sys.modules) or ''))"
    finished = subprocess.run([sys.executable, "-c", check], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert finished.stderr.strip() == ""


def test_only_the_right_rooms_touch_the_environment_and_the_process_group() -> None:
    allowed = {
        "os.environ": {
            "app.train",
            "app.distributed.numerics",
            "app.audit.recorder",  # it runs a user's script
            "app.checks.doctor",
            "app.environment.slurm_variables",
            "benchmarks.case",
            "benchmarks.contest",
            "benchmarks.gpu.images",
            "app.distributed.runtime",
            "app.metrics.trackers",
            "app.data.preprocessing",
            "app.tasks.causal_lm.data.token_writer",
            "app.metrics.profile",
            "launch.run_module",
            "launch.start.spread",
        },
        "torch.distributed": {
            "app.distributed.runtime",
            "app.distributed.watchdog",
            "app.distributed.agreement",
            "app.distributed.handshake",
            "app.init.filling",
            "app.init.model_tensors",
            "app.init.region",
            "app.init.tensor_parallel",
            "app.tasks.causal_lm.context_parallel",
            "app.tasks.causal_lm.model",
            "app.metrics.clock",
            "app.planning.tracing",
            "app.optim.muon",
            "app.optim.parameter_groups",
            "app.optim.steps",
            "app.checkpoints.foreign_weights",
            "app.checkpoints.optimizer_trial",
            "app.checkpoints.sharded_state",
            "app.checks.doctor",
        },
        # Patterns of what was inherited, prefixes that are left out, and a setting for scontrol: nothing that is read.
        '"SLURM': {"app.environment.slurm_variables", "benchmarks.contest", "launch.schedulers.slurm"},
        "distributed_type": {
            "app.distributed.runtime",
            "app.distributed.handshake",
            "app.environment.topology",
            "app.environment.launched",
            "app.options",  # a word of a file
            "app.recipe.recipe_file",  # a name of other programs
            "launch.preset",
        },
    }
    for words, rooms in allowed.items():
        users = {name for name, file in modules().items() if words in file.read_text()}
        assert users <= rooms, f"{words} is used in {users - rooms}"


def test_a_training_run_imports_nothing_of_the_audit() -> None:
    """It is started by name: by the table of commands, and as a program by itself."""
    users = {name for name, file in modules().items() if "app.audit" in file.read_text()}
    assert {name for name in users if not name.startswith("app.audit.")} == {"launch.cli"}
    assert not any(name.startswith("app.audit") for name in imports(modules()["launch.cli"]))


def test_a_newcomer_finds_rooms_and_not_a_heap() -> None:
    assert len([name for name in modules() if name.startswith("app.") and name.count(".") == 1]) <= 15


def test_the_loop_is_one_screen() -> None:
    tree = ast.parse((REPOSITORY / "app" / "loop.py").read_text())
    (loop,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "train"]
    assert loop.end_lineno is not None
    assert loop.end_lineno - loop.lineno + 1 <= 60
