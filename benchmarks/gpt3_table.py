"""`python -m benchmarks.gpt3_table`: the table of docs/look-up/gpt3-table.md, from `samerun plan`; `--write` puts it there.

What each of the eight sizes of Brown et al. 2020 (arXiv:2005.14165, table 2.1) takes on NVIDIA H100 devices, per preset.
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

RECIPES = tuple(f"gpt3_{size}" for size in ("125m", "350m", "760m", "1_3b", "2_7b", "6_7b", "13b", "175b"))
PRESETS = ("multi_gpu", "deepspeed_zero1", "deepspeed_zero2", "fsdp2", "deepspeed_zero3", "deepspeed_zero3_offload")
DEVICES = (8, 64, 512)
_PAGE = Path(__file__).parents[1] / "docs" / "look-up" / "gpt3-table.md"
_BEGIN, _END = "<!-- benchmarks.gpt3_table -->\n", "<!-- end -->\n"
_DAY_S = 86400.0


def main() -> None:
    """Print the table, and with `--write` put it into the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpt3_table", description=__doc__)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES, metavar="RECIPE", help="default: all")
    parser.add_argument("--write", action="store_true", help="put the table into docs/look-up/gpt3-table.md")
    options = parser.parse_args()
    table = "".join(f"{line}\n" for line in [*_head(), *(line for recipe in options.recipes for line in lines(recipe))])
    sys.stdout.write(table)
    if options.write:
        text = _PAGE.read_text()
        pattern = re.escape(_BEGIN) + ".*?" + re.escape(_END)
        _PAGE.write_text(re.sub(pattern, lambda _: f"{_BEGIN}\n{table}\n{_END}", text, flags=re.DOTALL))


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
