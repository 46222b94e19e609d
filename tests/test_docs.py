"""What the documents say is true: files, commands, links, tables and code."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torchvision
from safetensors.torch import save_file

from app import models, recipe_file
from app.recipe import ModelRecipe

REPOSITORY = Path(__file__).parent.parent
README = (REPOSITORY / "README.md").read_text()
DOCUMENTS = [REPOSITORY / "README.md", REPOSITORY / "CHANGELOG.md", *sorted((REPOSITORY / "docs").glob("*.md"))]


def blocks(text: str, language: str) -> list[str]:
    """The code blocks of a document that are marked as being in a language."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    return [code for marked, code in fenced if marked == language]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
        assert target.startswith("https://") or (document.parent / target).exists(), target


def test_the_first_screen_has_what_it_is_the_commands_and_the_presets() -> None:
    screen = "\n".join(README.splitlines()[:40])
    assert "make demo" in screen
    assert "make test" in screen
    for preset in (REPOSITORY / "accelerate_configs").glob("*.yaml"):
        assert f"`{preset.name}`" in screen, preset.name


def test_every_recipe_is_in_the_table() -> None:
    assert len(recipe_file.names()) >= 6
    for name in recipe_file.names():
        assert f"`{name}`" in README


def test_the_tree_names_every_file_and_only_files_that_are_there() -> None:
    (tree,) = [block for block in blocks(README, "") if block.startswith("accelerate_configs/")]
    named, folder = set(), Path()
    for line in tree.splitlines():
        words = line.split("    ")[0] if not line.startswith(" ") else line.strip().split("    ")[0]
        names = [word for word in words.split() if re.fullmatch(r"[\w./]+(/|\.\w+)", word)]
        if not line.startswith(" "):
            folder = Path(names[0])
            named.add(folder)
        else:
            named |= {folder / name for name in names}
    assert len(named) > 25
    for path in named:
        assert (REPOSITORY / path).exists(), path
    for package in ("app", "launch"):
        for file in (REPOSITORY / package).glob("*.py"):
            assert file.name == "__init__.py" or Path(package) / file.name in named, f"{file} is not in the README's tree"


def commands() -> list[str]:
    lines = [line.split("  #")[0].strip() for text in [README] for block in blocks(text, "bash") for line in block.splitlines()]
    return [line for line in lines if line]


def test_samerun_commands_are_accepted() -> None:
    launches = [line for line in commands() if line.startswith("samerun launch")]
    assert launches
    for line in launches:
        words = [word for word in shlex.split(line)[1:] if word != "--dry-run"]
        command = [sys.executable, "-m", "launch.cli", words[0], "--dry-run", *words[1:]]
        finished = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
        assert finished.returncode == 0, finished.stderr


def test_modules_and_files_in_commands_exist() -> None:
    for line in commands():
        for module in re.findall(r"-m (app\.\w+)", line):
            assert (REPOSITORY / f"{module.replace('.', '/')}.py").exists(), line
        for path in re.findall(r"accelerate_configs/\w+\.yaml", line):
            assert (REPOSITORY / path).exists(), line


@pytest.mark.parametrize(
    ("what", "recipe", "channels", "size"),
    [("resnet18", ModelRecipe(name="resnet18"), 3, (32, 32)), ("nn.Sequential", ModelRecipe(), 1, (8, 8))],
)
def test_the_weights_load_with_the_code_shown(
    tmp_path: Path, what: str, recipe: ModelRecipe, channels: int, size: tuple[int, int]
) -> None:
    (code,) = [block for block in blocks(README, "python") if what in block]
    ours = models.build(recipe, channels=channels, image_size=size, num_classes=10).eval()
    (tmp_path / "runs" / "RUN").mkdir(parents=True)
    save_file(ours.state_dict(), tmp_path / "runs" / "RUN" / "model.safetensors")
    shown: dict[str, torch.nn.Module] = {"torchvision": torchvision}  # type: ignore[dict-item]
    exec(code.replace("runs/RUN", str(tmp_path / "runs" / "RUN")), shown)
    images = torch.randn(2, channels, *size)
    with torch.no_grad():
        assert torch.equal(shown["model"].eval()(images), ours(images))
