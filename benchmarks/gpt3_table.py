"""`python -m benchmarks.gpt3_table`: the table of docs/look-up/gpt3-table.md, from `samerun plan`; `--write` puts it there.

What each of the eight sizes of Brown et al. 2020 (arXiv:2005.14165, table 2.1) takes on NVIDIA H100 devices, per preset.
`--plot docs/which-preset.png` draws the least that it takes instead: the picture of docs/big-models.md.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from app.planning import devices
from app.planning.devices import GIB
from app.recipe import recipe_file
from launch import cooperation
from launch import preset as presets

RECIPES = tuple(f"gpt3_{size}" for size in ("125m", "350m", "760m", "1_3b", "2_7b", "6_7b", "13b", "175b"))
PRESETS = ("multi_gpu", "deepspeed_zero1", "deepspeed_zero2", "fsdp2", "deepspeed_zero3", "deepspeed_zero3_offload")
DEVICES = (8, 64, 512)
_PAGE = Path(__file__).parents[1] / "docs" / "look-up" / "gpt3-table.md"
_BEGIN, _END = "<!-- benchmarks.gpt3_table -->\n", "<!-- end -->\n"
_DAY_S = 86400.0
_SHOWN = 8
"""Devices of the picture."""
_LOOKS = (
    ("-", "o", "0.0"),
    ("--", "s", "0.0"),
    ("-.", "^", "0.25"),
    ("-", "D", "0.45"),
    (":", "v", "0.0"),
    ("--", "P", "0.55"),
)
"""Of the lines of PRESETS, told apart in grey."""


def main() -> None:
    """Print the table, and with `--write` put it into the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpt3_table", description=__doc__)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES, metavar="RECIPE", help="default: all")
    parser.add_argument("--write", action="store_true", help="put the table into docs/look-up/gpt3-table.md")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the picture instead")
    options = parser.parse_args()
    if options.plot:
        draw(options.plot, {recipe: least(recipe) for recipe in options.recipes})
        return
    table = "".join(f"{line}\n" for line in [*_head(), *(line for recipe in options.recipes for line in lines(recipe))])
    sys.stdout.write(table)
    if options.write:
        text = _PAGE.read_text()
        pattern = re.escape(_BEGIN) + ".*?" + re.escape(_END)
        _PAGE.write_text(re.sub(pattern, lambda _: f"{_BEGIN}\n{table}\n{_END}", text, flags=re.DOTALL))


def least(recipe: str) -> tuple[int, dict[str, float]]:
    """Return the parameters of a size, and the least GiB that each preset takes of each of 8 devices: one sample a pass."""
    from app.planning import memory
    from app.planning.case import Case

    loaded = recipe_file.load(recipe, ["model.vocab_size=50257"])
    found = {}
    for preset in PRESETS:
        strategy = cooperation.strategy(presets.load(preset))
        case = Case(loaded, strategy, data_ranks=_SHOWN, precision="bf16", checkpoint_activations="blocks")
        found[preset] = memory.peak(case).total / GIB
    return memory.of_model(loaded).parameters, found


def draw(path: Path, sizes: dict[str, tuple[int, dict[str, float]]]) -> None:
    """Draw what each preset takes of a device over the size of the model: where a line crosses the memory, it ends."""
    # So small that the words can be read on a phone, which shrinks it.
    figure = Figure(figsize=(5.0, 4.6), layout="constrained")
    axes = figure.subplots()
    parameters = [size for size, _ in sizes.values()]
    for preset, (line, marker, grey) in zip(PRESETS, _LOOKS, strict=True):
        taken = [of_size[preset] for _, of_size in sizes.values()]
        label = preset.replace("deepspeed_", "")
        axes.plot(parameters, taken, linestyle=line, marker=marker, color=grey, markerfacecolor="white", label=label)
    device = devices.named("h100")
    usable = 0.9 * device.memory / GIB
    axes.axhline(usable, color="black", linewidth=2.0)
    axes.text(parameters[0], 1.08 * usable, f"{usable:.0f} GiB usable of an H100", fontsize=9)
    axes.set(xscale="log", yscale="log", xlabel="parameters (billions)", ylabel="GiB on each of 8 devices, at the least")
    axes.set_ylim(0.4, 4000)
    axes.set_xticks(parameters, [f"{size / 1e9:.{0 if size > 1e10 else 1}f}" for size in parameters], fontsize=9)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.grid(visible=True, color="0.9", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9, handlelength=3, columnspacing=1.0)
    figure.savefig(path, dpi=170)


def lines(recipe: str, devices: Sequence[int] = DEVICES) -> list[str]:
    """Return the lines of one size, one for each number of devices."""
    words = ["--devices", ",".join(map(str, devices)), "--device", "h100", "--presets", ",".join(PRESETS), "--json"]
    command = [sys.executable, "-m", "launch.cli", "plan", "--recipe", recipe, "model.vocab_size=50257", *words]
    finished = subprocess.run(command, stdout=subprocess.PIPE, check=False)  # 1: on some number of devices nothing fits
    told = json.loads(finished.stdout)
    return [_line(recipe, told["parameters"], of_number) for of_number in told["devices"]]


def _head() -> list[str]:
    heads = ["size", "H100s", *(preset.replace("deepspeed_", "") for preset in PRESETS), "cheapest that fits", "days"]
    return [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]


def _line(recipe: str, parameters: int, told: dict[str, Any]) -> str:
    cells = [_cell([row for row in told["rows"] if row["preset"] == preset]) for preset in PRESETS]
    best = told["cheapest"]
    chosen, told_days = "none", ""
    if best is not None:
        row = next(row for row in told["rows"] if all(row[key] == best[key] for key in ("preset", "checkpoint_activations")))
        chosen = best["preset"].replace("deepspeed_", "") + (", blocks" * (best["checkpoint_activations"] == "blocks"))
        days = row["training_s"] / _DAY_S
        told_days = f"{days:,.2g}" if days < 10 else f"{days:,.0f}"
    size = recipe.removeprefix("gpt3_").replace("_", ".").upper()
    return f"| {' | '.join([f'{size} ({parameters / 1e9:,.2f} B)', str(told['devices']), *cells, chosen, told_days])} |"


def _cell(rows: Sequence[dict[str, Any]]) -> str:
    """The largest micro-batch that fits without checkpointing of activations, and with it; `-`: none does."""
    by_kind = {row["checkpoint_activations"]: row for row in rows}
    found = [by_kind.get(kind) for kind in ("none", "blocks")]
    return " / ".join(str(row["micro_batch"]) if row and row["fits"] else "-" for row in found)


if __name__ == "__main__":
    main()
