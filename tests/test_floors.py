"""Who may import whom (a room only rooms of lower floors), and that the launcher starts without the heavy libraries."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
OURS = ("app", "launch", "benchmarks")

# From the ground up. Each entry is a room: a folder, or a module alone.
FLOORS: list[list[str]] = [
    ["app.errors"],
    ["app.files", "app.tasks", "app.tasks.image_classification.model_names"],
    ["app.place"],
    ["app.recipe"],
    ["app.tasks.causal_lm.sections", "app.tasks.image_classification.sections", "app.planning.devices", "app.planning.kept"],
    ["app.options", "app.planning.verdict"],
    ["app.own_layers"],
    ["app.optim", "app.data"],
    ["app.ranks"],
    ["app.task"],
    ["app.record", "app.device", "app.evaluation", "app.console", "app.initial"],
    ["app.tasks.causal_lm", "app.tasks.image_classification", "app.tasks.own"],
    ["app.building", "app.guard", "app.trackers"],
    ["app.metrics", "app.doctor"],
    ["app.checkpoints", "app.profiling"],
    ["app.feed", "app.planning"],
    ["app.loop", "app.opening"],
    ["app.session", "app.ending"],
    ["app.train"],
    ["app.evaluate", "app.predict", "app.export", "app.reports"],
    ["app.tools"],
    ["app.scaling"],
    ["benchmarks"],
]
LAUNCHER_FLOOR = 5  # launch/ sees the floors up to this one
STARTERS_FLOOR = 19  # those from this one on start processes with it
# The rooms of launch/, each of which sees those before it.
LAUNCH_ROOMS: list[tuple[str, ...]] = [
    (
        "launch.new",
        "launch.shipped",
        "launch.parallelism",
        "launch.preset",
        "launch.cooperation",
        "launch.run_module",
        "launch.node_command",
    ),
    ("launch.schedulers",),
    ("launch.start",),
    ("launch.submit",),
    ("launch.cli",),
]


def modules() -> dict[str, Path]:
    files = [file for folder in OURS for file in (REPOSITORY / folder).rglob("*.py")]
    names = {".".join(file.relative_to(REPOSITORY).with_suffix("").parts): file for file in files}
    return {name: file for name, file in names.items() if not name.endswith("__init__")}


def place(module: str) -> tuple[int, str] | None:
    """The floor and the room of a module; a room within another has its own floor."""
    found = [(floor, room) for floor, rooms in enumerate(FLOORS) for room in rooms if f"{module}.".startswith(f"{room}.")]
    return max(found, key=lambda it: len(it[1]), default=None)


def imports(file: Path, *, for_types: bool = True) -> set[str]:
    """Every module of ours that a file imports, anywhere in it; those that only a type checker sees, if they are wanted."""
    known = modules()
    found = set()
    tree = ast.parse(file.read_text())
    checked = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    left_out = set() if for_types else {id(inner) for node in checked for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in left_out:
            continue
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            below = {f"{node.module}.{name.name}" for name in node.names}
            found |= {name if name in known else node.module for name in below}
    return {name for name in found if name.split(".")[0] in OURS and name not in OURS}


def test_contributing_shows_the_floors() -> None:
    floors = [f"{number:2}  {'  '.join(FLOORS[number])}" for number in reversed(range(len(FLOORS)))]
    assert "\n".join(floors) in (REPOSITORY / "CONTRIBUTING.md").read_text()


def test_there_is_something_to_look_at() -> None:
    assert len(modules()) >= 25
    assert "app.errors" in imports(REPOSITORY / "app" / "recipe" / "schema.py")


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


@pytest.mark.parametrize("module", [name for name in modules() if name.startswith("launch.") and name != "launch.cli"])
def test_the_launcher_sees_only_the_lower_floors(module: str) -> None:
    for imported in imports(modules()[module]):
        there = place(imported)
        assert imported.startswith("launch.") or (there is not None and there[0] <= LAUNCHER_FLOOR), imported


@pytest.mark.parametrize("module", [name for name in modules() if name.startswith("launch.")])
def test_a_room_of_the_launcher_sees_only_those_before_it(module: str) -> None:
    def number(name: str) -> int:
        inside = [any(name == part or name.startswith(f"{part}.") for part in room) for room in LAUNCH_ROOMS]
        return inside.index(True)

    for imported in imports(modules()[module]):
        assert not imported.startswith("benchmarks"), imported
        assert not imported.startswith("launch.") or number(imported) <= number(module), imported


def test_the_launcher_runs_without_torch() -> None:
    names = [name for name in modules() if name.startswith("launch.")]
    heavy = "{'torch', 'numpy', 'accelerate', 'deepspeed', 'datasets', 'rich'}"
    check = f"import sys, {', '.join(names)}; sys.exit(str({heavy} & set(sys.modules) or ''))"
    finished = subprocess.run([sys.executable, "-c", check], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert finished.stderr.strip() == ""


def test_only_the_right_rooms_touch_the_environment_and_the_process_group() -> None:
    allowed = {
        "os.environ": {
            "app.train",
            "app.ranks.numerics",
            "app.doctor.doctor",
            "app.place.inherited",
            "benchmarks.saving_case",
            "benchmarks.feeding",
            "benchmarks.work",
            "benchmarks.programs",
            "benchmarks.planning_case",
            "benchmarks.language_case",
            "benchmarks.contestants",
            "benchmarks.gpu.presets",
            "app.ranks.runtime",
            "app.trackers.services",
            "app.ranks.compiled_ops",
            "app.console",
            "app.data.turns",
            "app.tasks.causal_lm.data_tools.tokenizing",
            "app.profiling.profile",
            "launch.schedulers.local",
            "launch.start.spread",
        },
        "torch.distributed": {
            "app.ranks.runtime",
            "app.ranks.agreement",
            "app.ranks.mesh",
            "app.ranks.devices",
            "app.ranks.handshake",
            "app.initial.fsdp2",
            "app.initial.held",
            "app.initial.region",
            "app.initial.tensor_parallel",
            "app.tasks.causal_lm.head",
            "app.tasks.causal_lm.vocabulary",
            "app.metrics.communication",
            "app.planning.ledger",
            "app.planning.passes",
            "app.optim.from_recipe",
            "app.optim.steps",
            "app.checkpoints.shards",
            "app.doctor.probe",
            "app.doctor.reach",
            "benchmarks.programs",
            "benchmarks.planning_case",
        },
        # Patterns of what was inherited, prefixes that are left out, and a setting for scontrol: nothing that is read.
        '"SLURM': {
            "app.place.slurm_variables",
            "app.place.inherited",
            "benchmarks.contestants",
            "launch.schedulers.slurm_job",
        },
        "distributed_type": {
            "launch.cooperation",
            "app.ranks.runtime",
            "app.ranks.handshake",
            "app.place.degrees",
            "app.place.launched",
            "launch.parallelism",
            "launch.preset",
        },
    }
    for words, rooms in allowed.items():
        users = {name for name, file in modules().items() if words in file.read_text()}
        assert users <= rooms, f"{words} is used in {users - rooms}"


def test_a_newcomer_finds_rooms_and_not_a_heap() -> None:
    assert len([name for name in modules() if name.startswith("app.") and name.count(".") == 1]) <= 15


def test_the_loop_is_one_screen() -> None:
    tree = ast.parse((REPOSITORY / "app" / "loop.py").read_text())
    (loop,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "train"]
    assert loop.end_lineno is not None
    assert loop.end_lineno - loop.lineno + 1 <= 60
