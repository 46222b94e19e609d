"""What it costs to go on in the middle of a huge data set: `python -m benchmarks.skipping`.

The data set is fake and has 10^12 samples. For a run that begins, and one that goes on at sample 10^9 (and 10^12, in the second
epoch), prints the seconds until the loader that training uses has given its first batch, without and with the making of the
loader, and how much memory the process needed for that at its peak.
"""

from __future__ import annotations

import sys
import time

from app.data import loader
from app.data.order import TrainBatches
from app.place.launched import Launched
from app.ranks.runtime import Runtime
from app.recipe import recipe_file
from app.recipe.batching import BatchPlan
from app.recipe.schema import Recipe
from app.tasks.image_classification.data.open import open_data
from benchmarks.memory import status_bytes

SAMPLES, BATCH = 10**12, 256
_DATA = ("data.source=fakedata", "data.image_size=8", "data.fake_channels=1", f"data.fake_train_samples={SAMPLES}")


def main() -> None:
    """Measure and print."""
    recipe = recipe_file.load("digits", _DATA).recipe
    runtime = Runtime(Launched(use_cpu=True), BatchPlan(global_batch_size=BATCH, data_ranks=1, accumulation=1))
    _first_batch(runtime, recipe, 0)  # the first time everything is imported
    for sample in (0, 10**9, SAMPLES):
        before_bytes = status_bytes("VmHWM")
        order_s, whole_s = _first_batch(runtime, recipe, sample // BATCH)
        grown_bytes = status_bytes("VmHWM") - before_bytes
        sys.stdout.write(
            f"from sample {sample:>17,}: order {order_s * 1000:.2f} ms, first batch {whole_s * 1000:.1f} ms, "
            f"{grown_bytes / 2**20:.1f} MiB more at the peak\n"
        )
    runtime.close()


def _first_batch(runtime: Runtime, recipe: Recipe, step: int) -> tuple[float, float]:
    """Return the seconds until the first numbers of a run that goes on at `step`, and until its first batch is there."""
    source = open_data(recipe.sections).train

    def batches() -> TrainBatches:
        return TrainBatches(
            size=len(source),
            seed=recipe.seed,
            global_batch_size=BATCH,
            micro_batches_per_step=1,
            first_step=step,
            last_step=10**15,
        )

    start_s = time.perf_counter()
    numbers = next(iter(batches()))
    order_s = time.perf_counter() - start_s
    assert numbers.min() >= step // (SAMPLES // BATCH) * SAMPLES
    start_s = time.perf_counter()
    workers = loader.workers_of(None, local_world_size=1, device=runtime.device)
    prepared = runtime.deal(loader.build(source, batches(), seed=recipe.seed, workers=workers))
    batch = next(iter(prepared))
    whole_s = time.perf_counter() - start_s
    assert batch["samples"].tolist() == numbers.tolist()
    return order_s, whole_s


if __name__ == "__main__":
    main()
