"""wandb, mlflow and trackio: one run there over all starts, and no waiting for a missing network.

What the user sets in the trackers' own variables counts. Imported only where one of them is asked for.
"""

from __future__ import annotations

import importlib.util
import os
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from accelerate.tracking import MLflowTracker, TrackioTracker, WandBTracker

from app.errors import TrackerError
from app.trackers.tracked import Tracked

_ANSWERS_WITHIN_S = 15
"""How long a server may take to answer. On many clusters compute nodes reach no server, and all ranks wait for the main one."""
_SENT_WITHIN_S = 60
"""How long wandb may keep sending at the end. What is not sent by then stays on the disk."""


def start_wandb(run: Tracked, settings: dict[str, Any]) -> Any:
    """Start Accelerate's tracker for wandb; without a key or a network it writes what `wandb sync` sends later."""
    import wandb

    project = os.environ.get("WANDB_PROJECT", run.project)
    timeouts_s = {"init_timeout": _ANSWERS_WITHIN_S, "finish_timeout": _SENT_WITHIN_S, "login_timeout": _SENT_WITHIN_S}
    given = {
        **_unless_set(WANDB_RUN_ID={"id": run.known.get("wandb", uuid.uuid4().hex[:8])}, WANDB_RESUME={"resume": "allow"}),
        **_unless_set(WANDB_NAME={"name": run.name}, WANDB_DIR={"dir": str(run.folder)}),
        "config": settings,
        "settings": wandb.Settings(
            **_unless_set(**{f"WANDB_{key.upper()}": {key: value} for key, value in timeouts_s.items()})
        ),
    }
    try:
        tracker = WandBTracker(project, **given)
        tracker.start()
    except wandb.Error as error:
        wandb.teardown()  # what has not started still holds the run's id
        tracker = WandBTracker(project, mode="offline", **given)
        tracker.start()
        why = " ".join(str(error).split())
        print(  # noqa: T201 - the user must know
            f"note: wandb works offline here ({why}): from a machine with a network and a key, "
            f"`wandb sync {run.folder}/wandb/offline-*` sends the run. WANDB_MODE=offline skips the attempt.",
            flush=True,
        )
    run.remember("wandb", tracker.run.id)
    return tracker


def start_mlflow(run: Tracked, settings: dict[str, Any]) -> Any:
    """Start Accelerate's tracker for mlflow; without MLFLOW_TRACKING_URI it writes RUN/mlflow.db and RUN/mlflow."""
    import mlflow
    from mlflow.environment_variables import MLFLOW_HTTP_REQUEST_MAX_RETRIES, MLFLOW_HTTP_REQUEST_TIMEOUT

    artifacts = None
    if "MLFLOW_TRACKING_URI" not in os.environ:
        if importlib.util.find_spec("sqlalchemy") is None:
            raise TrackerError("mlflow-skinny writes only to servers; set MLFLOW_TRACKING_URI, or install mlflow")
        artifacts = (run.folder / "mlflow").resolve().as_uri()
        mlflow.set_tracking_uri(f"sqlite:///{(run.folder / 'mlflow.db').resolve()}")
    # With its own numbers mlflow tries a server that is gone for four minutes (measured), and a silent one for longer.
    for variable, value in ((MLFLOW_HTTP_REQUEST_MAX_RETRIES, 2), (MLFLOW_HTTP_REQUEST_TIMEOUT, _ANSWERS_WITHIN_S)):
        if not variable.is_set():
            variable.set(value)
    tracker = MLflowTracker(run.project, artifacts, run_id=run.known.get("mlflow"), run_name=run.name)
    tracker.start()
    run.remember("mlflow", tracker.tracker.info.run_id)
    if "mlflow" not in run.known:  # mlflow refuses a parameter that changes, as the length of a run may
        tracker.store_init_configuration(settings)
    return tracker


def start_trackio(run: Tracked, settings: dict[str, Any]) -> Any:
    """Start Accelerate's tracker for trackio, which knows a run by its name alone."""
    name = run.known.get("trackio", f"{run.name}-{uuid.uuid4().hex[:6]}")
    tracker = TrackioTracker(run.project, name=name, resume="allow", config=settings)
    tracker.start()
    run.remember("trackio", name)
    return tracker


STARTED_BY: Mapping[str, Callable[[Tracked, dict[str, Any]], Any]] = {
    "wandb": start_wandb,
    "mlflow": start_mlflow,
    "trackio": start_trackio,
}


def _unless_set(**settings: dict[str, Any]) -> dict[str, Any]:
    """Merge the settings of the variables that the user has not set."""
    return {key: value for variable, pairs in settings.items() if variable not in os.environ for key, value in pairs.items()}
