"""What the documents say is true: files, commands, links, tables and code."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torchvision
from processes import read_lines, train
from safetensors.torch import save_file

from app import tasks
from app.errors import SamerunError
from app.recipe import recipe_file
from app.tasks.image_classification import models
from app.tasks.image_classification.sections import ModelRecipe

REPOSITORY = Path(__file__).parent.parent
README = (REPOSITORY / "README.md").read_text()
CONTRIBUTING = (REPOSITORY / "CONTRIBUTING.md").read_text()
DOCUMENTS = [REPOSITORY / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING")]
DOCUMENTS += [*sorted((REPOSITORY / "docs").rglob("*.md")), *sorted((REPOSITORY / "examples").rglob("*.md"))]


def blocks(text: str, language: str) -> list[str]:
    """The code blocks of a document that are marked as being in a language."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    return [code for marked, code in fenced if marked == language]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        page = document.parent / path if path else document
        assert page.exists(), target
        assert not anchor or anchor in anchors(page.read_text()), target


def anchors(page: str) -> set[str]:
    """The headings of a page, as GitHub and the site name them in links."""
    headings = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_pages_that_code_and_scripts_name_are_there() -> None:
    folders = ("app", "launch", "benchmarks", "examples", "accelerate_configs", "tests")
    files = [path for folder in folders for path in (REPOSITORY / folder).rglob("*") if path.suffix in {".py", ".sh", ".yaml"}]
    named = {
        (page, file.relative_to(REPOSITORY))
        for file in [*files, REPOSITORY / "Makefile", REPOSITORY / "pyproject.toml"]
        for page in re.findall(r"\bdocs/[\w/-]+\.md", file.read_text())
    }
    assert len(named) > 20
    assert [(page, file) for page, file in named if not (REPOSITORY / page).exists()] == []


def test_every_preset_and_every_recipe_is_in_its_table() -> None:
    assert len(recipe_file.names()) >= 6
    presets = [preset.name for preset in (REPOSITORY / "accelerate_configs").glob("*.yaml")]
    assert [name for name in (*presets, *recipe_file.names()) if f"`{name}`" not in README] == []


def commands() -> list[str]:
    lines = [line.split("  #")[0].strip() for text in [README] for block in blocks(text, "bash") for line in block.splitlines()]
    return [line for line in lines if line]


def test_samerun_commands_are_accepted(tmp_path: Path) -> None:
    """In a folder with the runs that they go on from, and their data."""
    launches = [line for line in commands() if line.startswith("samerun launch")]
    assert launches
    for line in launches:
        words = [word for word in shlex.split(line, comments=True)[1:] if word != "--dry-run"]
        keys = ("train.init_from=", "data.path=")
        begun = [word.partition("=")[2] for word in words if word.startswith(keys)]
        for place in (*begun, *(word for option, word in itertools.pairwise(words) if option == "--resume")):
            (tmp_path / place).mkdir(parents=True, exist_ok=True)
        accepted(["launch.cli", words[0], "--dry-run", *words[1:]], tmp_path)


@pytest.mark.parametrize(
    ("what", "recipe", "channels", "size"),
    [
        ("resnet18", ModelRecipe(name="resnet18"), 3, (32, 32)),
        ("nn.Sequential", recipe_file.load("digits").recipe.sections.model, 1, (8, 8)),
    ],
)
def test_the_weights_load_with_the_code_shown(
    tmp_path: Path, what: str, recipe: ModelRecipe, channels: int, size: tuple[int, int]
) -> None:
    page = (REPOSITORY / "docs" / "look-up" / "run-folder.md").read_text()
    (code,) = [block for block in blocks(page, "python") if what in block]
    ours = models.build(recipe, channels=channels, image_size=size, num_classes=10).eval()
    (tmp_path / "runs" / "RUN").mkdir(parents=True)
    save_file(ours.state_dict(), tmp_path / "runs" / "RUN" / "model.safetensors")
    shown: dict[str, torch.nn.Module] = {"torchvision": torchvision}  # type: ignore[dict-item]
    exec(code.replace("runs/RUN", str(tmp_path / "runs" / "RUN")), shown)
    images = torch.randn(2, channels, *size)
    with torch.no_grad():
        assert torch.equal(shown["model"].eval()(images), ours(images))


def test_the_task_of_the_first_screen_is_the_same_run_on_two_processes(tmp_path: Path) -> None:
    (task,), (recipe,) = blocks(README, "python"), blocks(README, "yaml")
    (tmp_path / "task.py").write_text(task)
    (tmp_path / "recipe.yaml").write_text(recipe)
    begin = ("--recipe", str(tmp_path / "recipe.yaml"), "log.every_steps=1")
    one = train("cpu", tmp_path / "one", *begin)
    two = train("fsdp2", tmp_path / "two", *begin, processes=2)
    one.check()
    two.check()
    losses = [[line["loss"] for line in read_lines(tmp_path / name / "metrics.jsonl")] for name in ("one", "two")]
    assert len(losses[0]) > 50
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


CLUSTER_PAGES = ("clusters", "slurm", "pbs", "mpi-and-ssh", "cluster-troubles", "coming-from")
CLUSTERS = "\n".join((REPOSITORY / "docs" / f"{name}.md").read_text() for name in CLUSTER_PAGES)
# Code spans and blocks: what is a name there must exist.
CLUSTERS_CODE = [*re.findall(r"`([^`\n]+)`", CLUSTERS), *re.findall(r"^```\w*\n(.*?)^```$", CLUSTERS, re.DOTALL | re.MULTILINE)]


def cluster_commands(program: str) -> list[list[str]]:
    """The arguments of each command line in the blocks of the pages on clusters that holds `program`, from it on."""
    lines = [
        line.split("  #")[0].replace("$SLURM_ARRAY_TASK_ID", "3") for line in "\n".join(blocks(CLUSTERS, "bash")).split("\n")
    ]
    return [shlex.split(line[line.index(program) :])[len(program.split()) :] for line in lines if program in line]


def accepted(arguments: list[str], folder: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", *arguments]
    finished = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, (arguments, finished.stderr)


def test_commands_for_clusters_are_accepted(tmp_path: Path) -> None:
    launches = cluster_commands("samerun launch")
    (job,) = cluster_commands("sbatch --account=A")
    launches.append(job[job.index("launch/multinode.sh") + 1 :])
    exported = [words[0] for words in cluster_commands("export") if words[0].startswith("SAMERUN_ARGS=")]
    launches += [shlex.split(word.removeprefix("SAMERUN_ARGS=")) for word in exported]
    assert len(launches) >= 6
    for words in launches:
        accepted(["launch.cli", "launch", "--dry-run", *words], tmp_path)
    submits = cluster_commands("samerun submit")
    assert len(submits) >= 3
    for words in submits:
        accepted(["launch.cli", "submit", "--dry-run", "--scheduler", "slurm", *words], tmp_path)
    ranks = [*cluster_commands("python -m app.train"), *cluster_commands("launch/mpirun.sh")]
    assert len(ranks) >= 4
    for words in ranks:
        accepted(["app.train", "--print-recipe", *words], tmp_path)


def test_variables_for_clusters_are_read_somewhere() -> None:
    files = [*(REPOSITORY / "app").rglob("*.py"), *(REPOSITORY / "launch").rglob("*")]
    source = "\n".join(file.read_text() for file in files if file.is_file() and file.suffix != ".pyc")
    named = set(re.findall(r"\b[A-Z][A-Z0-9]*_[A-Z0-9_]*[A-Z0-9]\b", "\n".join(CLUSTERS_CODE)))
    assert len(named & {"SAMERUN_STARTER", "SAMERUN_HOSTS", "PBS_NODEFILE", "MASTER_ADDR", "PALS_RANKID"}) == 5
    assert [name for name in sorted(named) if not re.search(rf"\b{name}\b", source)] == []


def test_recipe_keys_for_clusters_exist_and_take_the_values_shown() -> None:
    code = "\n".join(CLUSTERS_CODE)
    sections = "|".join(recipe_file.sections(tasks.DEFAULT))
    named = set(re.findall(rf"(?<![\w./-])(?:{sections})\.\w+", code)) - {"model.safetensors", "train.py"}
    assert len(named) >= 15
    assert named - recipe_file.kinds(tasks.DEFAULT).keys() == set()
    assigned = {
        (key, value) for key, value in re.findall(rf"((?<![\w./-])(?:{sections})\.\w+|(?<![\w.-])seed)=([\w.-]+)", code)
    }
    assert len(assigned) > 12
    for key, value in assigned:
        recipe_file.load("digits", [f"{key}={value}"])


def test_presets_files_and_programs_in_commands_exist() -> None:
    code = "\n".join([*CLUSTERS_CODE, *commands()])
    presets = set(re.findall(r"--preset (\w+)", code)) | set(re.findall(r"\b(?:multi_\w+|deepspeed_zero\w+)", code))
    assert len(presets) >= 6
    assert [name for name in presets if not (REPOSITORY / "accelerate_configs" / f"{name}.yaml").exists()] == []
    paths = set(re.findall(r"(?<![\w/])(?:app|launch|tests|accelerate_configs)/[\w.-]+", code)) | {
        f"{module.replace('.', '/')}.py" for module in re.findall(r"-m (app\.\w+)", code)
    }
    assert len(paths) >= 12
    assert [path for path in paths if not (REPOSITORY / path).exists()] == []
    programs = set(re.findall(r"\bsamerun ([a-z]+)\b", "\n".join(CLUSTERS_CODE)))
    assert programs == {"launch", "submit", "doctor", "evaluate", "predict", "sweep"}


def test_exit_codes_are_those_of_the_errors() -> None:
    sentence = re.search(r"Its exit code says what kind it is: ([^.]*)\.", CLUSTERS)
    assert sentence is not None
    codes = [int(code) for code in re.findall(r"(?:^|[,\n] ?)(\d+) (?:the|a|processes)\b", sentence[1])]
    assert codes == sorted(error.exit_code for error in SamerunError.__subclasses__())
