"""A run folder of a task that knows neither pictures nor classes, made of one that does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any


def rainfall(digits_run: Path, folder: Path) -> Path:
    """A copy whose run learns the rainfall of 30 stations: judged by an error in millimetres, of no training data."""
    shutil.copytree(digits_run, folder)
    shutil.rmtree(folder / "test_predictions")
    _rewrite(folder / "run.json", lambda told: {**told, "task": "rainfall.py", "monitor": ["rmse", "min"]})
    _rewrite(folder / "metrics.jsonl", _without_classes)
    _rewrite(folder / "evaluations.jsonl", _with_rmse)
    stations = {f"station {number}": number / 2 - 1 for number in range(29)} | {"station 29": None}
    own = {
        "validation_rmse": 2e3 / 40**2,
        "test_rmse": 2e3 / 40**2,
        "test_bias": -0.25,
        "test_station_error": stations,
        "test_month_accuracy": {"May": 0.5},
    }
    _rewrite(folder / "result.json", lambda result: {**_without_classes(result), **own})
    return folder


def _with_rmse(line: dict[str, Any]) -> dict[str, Any]:
    split = "test" if "test_loss" in line else "validation"
    return {**_without_classes(line), f"{split}_rmse": 2e3 / line["step"] ** 2}


def _without_classes(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if not key.endswith("accuracy")}


def _rewrite(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    path.write_text("".join(json.dumps(change(json.loads(line))) + "\n" for line in lines))
