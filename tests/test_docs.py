"""Facts in the documents: files, commands, options, recipe keys, links, tables and code."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
import torchvision
import yaml
from processes import read_lines, train
from safetensors.torch import save_file

from app import tasks
from app.checkpoints import step_folders
from app.errors import STOPPED, SamerunError
from app.recipe import recipe_file
from app.runs import run_folder
from app.tasks.image_classification import models
from app.tasks.image_classification.sections import ModelRecipe
from launch import cli

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
    assert len(named) > 10
    assert [(page, file) for page, file in named if not (REPOSITORY / page).exists()] == []


def test_every_preset_and_every_recipe_is_in_its_table() -> None:
    assert len(recipe_file.names()) >= 6
    presets = [preset.name for preset in (REPOSITORY / "accelerate_configs").glob("*.yaml")]
    assert [name for name in (*presets, *recipe_file.names()) if f"`{name}`" not in README] == []


def test_the_citation_has_the_version_and_the_address_of_the_package() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    assert (citation["version"], citation["repository-code"]) == (project["version"], project["urls"]["Repository"])


def commands() -> list[str]:
    lines = [line.split("  #")[0].strip() for block in blocks(README, "bash") for line in block.splitlines()]
    return [line for line in lines if line]


def test_the_commands_that_set_it_up_are_on_the_first_screen() -> None:
    first_screen = "\n".join(README.splitlines()[:30])
    assert [command for command in ("make demo", "make test", "samerun launch") if command not in first_screen] == []


def test_commands_of_the_readme_are_accepted(tmp_path: Path) -> None:
    """In a folder with its task and recipe, and with the runs and data that they name."""
    for language, name in (("python", "task.py"), ("yaml", "recipe.yaml")):
        (code,) = blocks(README, language)
        (tmp_path / name).write_text(code)
    starts = [
        shlex.split(line, comments=True)[1:] for line in commands() if line.startswith(("samerun launch", "samerun submit"))
    ]
    assert len(starts) > 5
    for command, *words in starts:
        keys = ("train.init_from=", "data.path=")
        for place in (word.partition("=")[2] for word in words if word.startswith(keys)):
            (tmp_path / place).mkdir(parents=True, exist_ok=True)
        scheduler = ["--scheduler", "slurm"] if command == "submit" else []
        accepted(["launch.cli", command, "--dry-run", *scheduler, *words], tmp_path)


def samerun_lines() -> list[tuple[str, str]]:
    """Each line of shell code in a document that runs `samerun`, with the document's name, continued lines joined."""
    found = []
    for document in DOCUMENTS:
        for block in re.findall(r"^```(?:bash|sh|console)?\n(.*?)^```$", document.read_text(), re.DOTALL | re.MULTILINE):
            lines = block.replace("\\\n", " ").splitlines()
            found += [(document.name, line) for line in lines if re.match(r"(\$ |# )?samerun ", line.strip())]
    return found


def test_no_comment_hides_a_second_command() -> None:
    assert [(page, line) for page, line in samerun_lines() if re.search(r"\s#.*\bsamerun [a-z]+ \S", line)] == []


@functools.cache
def options_of(command: str) -> set[str]:
    """The options in the help of a command such as "launch" or "data check", and of those that it passes arguments to."""
    helps = [command, "launch"] if command in ("submit", "sweep", "resume", "parity", "scale") else [command]
    printed = []
    for words in helps:
        with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.suppress(SystemExit):
            cli.main([*words.split(), "--help"])
        printed.append(output.getvalue())
    return set(re.findall(r"--[a-z][\w-]*", "".join(printed))) | {"-h", "-V"}


def test_commands_and_options_in_all_documents_exist() -> None:
    wrong = []
    for page, line in samerun_lines():
        words = shlex.split(line.strip().removeprefix("$ ").removeprefix("# "), comments=True)[1:]
        words = list(itertools.takewhile(lambda word: word not in ("|", "&&", ";", ">", "&"), words))
        command = " ".join(words[:2]) if words[:1] == ["data"] else words[0]
        if command.split()[0] not in {*cli._COMMANDS, "COMMAND", "help", "version", "--help", "--version", "-V"}:
            wrong.append((page, line))
        elif command.split()[0] in cli._COMMANDS:
            options = {word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--") and word != "--"}
            wrong += [(page, option, line) for option in options - options_of(command)]
    assert wrong == []


def test_recipe_keys_in_all_documents_exist() -> None:
    known = set().union(*(recipe_file.kinds(task) for task in tasks.SHIPPED))
    code = [file.read_text() for file in (REPOSITORY / "examples").glob("*.py")]
    code += [block for document in DOCUMENTS for block in blocks(document.read_text(), "python")]
    own = set(re.findall(r"^    (\w+): [\w| ]+ = ", "\n".join(code), re.MULTILINE))  # fields of a task's own sections
    sections = sorted({key.partition(".")[0] for key in known if "." in key})
    named = {
        (document.name, key)
        for document in DOCUMENTS
        for key in re.findall(rf"(?<![\w./-])((?:{'|'.join(sections)})\.\w+)=", document.read_text())
    }
    assert len(named) > 50
    assert [(page, key) for page, key in sorted(named) if key not in known and key.partition(".")[2] not in own] == []


def test_the_page_on_the_run_folder_names_every_file() -> None:
    page = (REPOSITORY / "docs" / "look-up" / "run-folder.md").read_text()
    constants = [value for name, value in vars(run_folder).items() if name.isupper() and isinstance(value, str)]
    files = [*constants, *run_folder.PROGRAMS.values(), *re.findall(r"^    ([\w.]+)", run_folder.__doc__ or "", re.MULTILINE)]
    names = sorted(
        {*files, step_folders.FROZEN, "checkpoints", "exported", "report.html"} - {run_folder.UNIT, run_folder.START}
    )
    assert len(names) > 20
    assert [name for name in names if f"`{name}" not in page] == []


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


CLUSTER_PAGES = ("slurm", "containers", "pbs-mpi-ssh", "troubleshooting", "coming-from")
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
    (tmp_path / "IMAGE").touch()
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
    assert len(named & {"SAMERUN_STARTER", "SAMERUN_HOSTS", "PBS_NODEFILE", "MASTER_ADDR", "SLURM_ARRAY_TASK_ID"}) == 5
    assert [name for name in sorted(named) if not re.search(rf"\b{name}\b", source)] == []


def test_recipe_keys_for_clusters_exist_and_take_the_values_shown() -> None:
    code = "\n".join(CLUSTERS_CODE)
    sections = "|".join(recipe_file.sections(tasks.DEFAULT))
    named = set(re.findall(rf"(?<![\w./-])(?:{sections})\.\w+", code)) - {"model.safetensors", "train.py"}
    assert len(named) >= 15
    of_images, of_text = recipe_file.kinds(tasks.DEFAULT).keys(), recipe_file.kinds("causal_lm").keys()
    assert named - of_images - of_text == set()
    assigned = {
        (key, value) for key, value in re.findall(rf"((?<![\w./-])(?:{sections})\.\w+|(?<![\w.-])seed)=([\w.:-]+)", code)
    }
    assert len(assigned) > 12
    for key, value in assigned:
        recipe_file.load("digits" if key in {"seed", *of_images} else "lm_tiny", [f"{key}={value}"])


def test_presets_files_and_programs_in_commands_exist() -> None:
    code = "\n".join([*CLUSTERS_CODE, *commands()])
    presets = set(re.findall(r"--preset (\w+)", code)) | set(re.findall(r"\b(?:multi_\w+|deepspeed_zero\w+)", code))
    assert len(presets) >= 6
    assert [name for name in presets if not (REPOSITORY / "accelerate_configs" / f"{name}.yaml").exists()] == []
    paths = set(re.findall(r"(?<![\w/])(?:app|launch|tests|accelerate_configs)/[\w.-]+", code)) | {
        f"{module.replace('.', '/')}.py" for module in re.findall(r"-m (app\.\w+)", code)
    }
    assert len(paths) >= 4
    assert [path for path in paths if not (REPOSITORY / path).exists()] == []
    programs = set(re.findall(r"\bsamerun ([a-z]+)\b", "\n".join(CLUSTERS_CODE)))
    assert programs >= {"launch", "submit", "doctor", "stop", "resume"}
    assert programs <= cli._COMMANDS.keys()


def test_exit_codes_are_those_of_the_errors() -> None:
    page = (REPOSITORY / "docs" / "look-up" / "exit-codes.md").read_text()
    assert [
        kind.__name__ for kind in SamerunError.__subclasses__() if f"- **{kind.exit_code}**: `{kind.__name__}`" not in page
    ] == []
    listed = {int(code) for code in re.findall(r"^- \*\*(\d+)\*\*", page, re.MULTILINE)}
    troubleshooting = (REPOSITORY / "docs" / "troubleshooting.md").read_text()
    named = {
        int(code)
        for cell in re.findall(r"^\| ([\d, to]+) \|", troubleshooting, re.MULTILINE)
        for code in re.findall(r"\d+", cell)
    }
    assert {STOPPED, 130} <= named <= listed
