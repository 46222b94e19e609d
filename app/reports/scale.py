"""`samerun scale`: measure how a recipe scales over presets, processes and nodes, by real runs.

    samerun scale --recipe R --presets multi_gpu,fsdp2 --devices 1,2,4 --out DIR
    samerun scale --recipe R --devices 4 --nodes 1,2     in an allocation of two nodes

Each size runs once before any is repeated, so that other load on the machine affects all alike. The same command resumes:
finished runs are reused; others start again from their first step, because a resumed run would include another warm-up.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.environment import host
from app.errors import RecipeError, RunFolderError, UsageError
from app.files.atomic_files import disk_errors
from app.options import Parser, add_presets, add_recipe, numbers, positive
from app.recipe import recipe_file
from app.reports import past_run
from app.reports.curves import label_log_axis, write_figure
from app.reports.past_run import print_text
from app.reports.runs import as_csv, write
from app.runs import run_folder
from launch import cases, preset
from launch.cases import RunCase
from launch.schedulers import detect
from launch.schedulers.hosts import count_accelerators

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Size:
    """A preset and the processes that run under it."""

    preset: str
    nodes: int
    processes: int
    """On each node."""

    @property
    def devices(self) -> int:
        """All processes."""
        return self.nodes * self.processes


def main(argv: list[str], environment: Mapping[str, str], *, say: Callable[[str], None]) -> int:
    """Run `samerun scale` with these arguments; return 0 if every case was measured. Raises SamerunError."""
    options = _parser().parse_all(argv)
    out = Path(options.out or f"scale-{Path(options.recipe).stem}")
    most = max(options.devices)
    allocation = detect.find(environment) and detect.find(environment, processes_per_node=most)
    # On CPUs all sizes get the threads per process of the largest, or each process of a smaller one would have more cores.
    threads = allocation.topology.threads_per_process if allocation else None
    if not allocation and count_accelerators(environment)[0] == 0:
        threads = host.usable(most)
    environment = {**({"OMP_NUM_THREADS": str(threads)} if threads else {}), **environment}

    planned = _plan(options, out, each="--processes-per-node" if allocation else "--processes")
    reasons = {case.name: "; ".join(found) for _, case in planned if (found := cases.problems(case, environment))}
    runnable = [case for _, case in planned if case.name not in reasons]
    if not runnable:
        raise UsageError("no case can run:\n" + "\n".join(dict.fromkeys(reasons.values())))
    with disk_errors(out, "written", RunFolderError):
        out.mkdir(parents=True, exist_ok=True)
        for case in runnable:
            if case.run_dir.exists() and not case.is_finished:
                shutil.rmtree(case.run_dir)
    stopped, failed = cases.run(runnable, environment, say=say, command=["samerun", "scale", *argv], logged=True)
    if stopped is not None:
        return stopped

    for case in runnable:
        if case.name in failed:
            ending = case.log.read_text(errors="replace").strip().rpartition("\n")[2]
            reasons[case.name] = f"exit code {failed[case.name]}: {ending} ({case.log})"
    unit, rows = _measured(planned, reasons, first=options.warm_up_steps, last=options.warm_up_steps + options.steps)
    title = f"{Path(options.recipe).stem}: {'weak' if options.weak else 'strong'} scaling"
    files = _write_results(out, unit, rows, title=title)
    print_text("\n".join(map(str, files)))
    missing = [row for row in rows if row["problems"]]
    for row in missing:
        say(f"{row['preset']}, nodes {row['nodes']}, processes per node {row['processes_per_node']}: {row['problems']}")
    return 1 if missing else 0


def _plan(options: argparse.Namespace, out: Path, *, each: str) -> list[tuple[Size, RunCase]]:
    """Return the cases in the order in which they run; `each` is the option for the processes. Raises SamerunError."""
    for name in options.presets:
        preset.load(name)
    own = [f"train.steps={options.warm_up_steps + options.steps}", "train.evaluate_every_epochs=0"]
    # A line in metrics.jsonl when the warm-up is over; the last step always has one.
    own += [f"log.every_steps={options.warm_up_steps}"]
    own += ["checkpoint.every_steps=none", "checkpoint.every_minutes=none", "checkpoint.keep_best=false"]
    own += ["checkpoint.keep_every=none", "train.skip_steps=none"]  # a step to skip may be beyond the end
    reserved = {"train.epochs", "train.evaluate_every_steps", *(word.partition("=")[0] for word in own)}
    if given := [word for word in options.overrides if word.partition("=")[0].strip() in reserved]:
        raise RecipeError(f"{', '.join(given)} (command line): `samerun scale` sets this; use --steps and --warm-up-steps")
    batch = recipe_file.load(options.recipe, options.overrides).recipe.train.global_batch_size
    others = [word for word in options.overrides if word.partition("=")[0].strip() != "train.global_batch_size"]
    sizes = [Size(*values) for values in itertools.product(options.presets, options.nodes, options.devices)]
    sizes.sort(key=lambda size: (options.presets.index(size.preset), size.devices, size.nodes))
    planned = []
    for repeat, size in itertools.product(range(1, options.repeats + 1), sizes):
        stem = f"{size.preset.replace('/', '_')}-{size.nodes}x{size.processes}{'-weak' if options.weak else ''}-{repeat}"
        global_batch = batch * size.devices if options.weak else batch
        argv = ["--run-dir", str(out / stem), "--recipe", options.recipe, "--preset", size.preset, "--trackers", "none"]
        argv += ["--nodes", str(size.nodes), each, str(size.processes)]
        argv += [*others, f"train.global_batch_size={global_batch}", *own]
        planned.append((size, RunCase(stem, out / stem, argv)))
    return planned


def _rate(run_dir: Path, first: int, last: int) -> tuple[str, float]:
    """Return what a run counts, and how many per second of training between two steps. Raises RunFolderError."""
    run = past_run.read(run_dir)
    lines = {line["step"]: line for line in run.metrics}
    try:
        begin, end = lines[first], lines[last]
        seen = end[f"{run.unit}_seen"] - begin[f"{run.unit}_seen"]
        return run.unit, float(seen / (end["training_s"] - begin["training_s"]))
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise RunFolderError(
            f"{run_dir / run_folder.METRICS} lacks step {first} or {last} ({error!r}): delete the folder to measure it again"
        ) from error


def _measured(
    planned: Sequence[tuple[Size, RunCase]], reasons: Mapping[str, str], *, first: int, last: int
) -> tuple[str, list[dict[str, Any]]]:
    """Return what the runs count and a row for each size, with `reasons`, by case, why a case has no result.

    Speed-up and efficiency are relative to the smallest measured size of the same preset.
    """
    unit = run_folder.UNIT
    rates: dict[Size, list[float]] = {size: [] for size, _ in planned}
    problems: dict[Size, list[str]] = {size: [] for size, _ in planned}
    for size, case in planned:
        try:
            if reason := reasons.get(case.name):
                raise RunFolderError(reason)
            unit, rate = _rate(case.run_dir, first, last)
            rates[size].append(rate)
        except RunFolderError as error:
            problems[size].append(str(error))
    rows = []
    for size, values in rates.items():
        base = next((other for other in rates if other.preset == size.preset and rates[other]), size)
        mean = statistics.fmean(values) if values else None
        speedup = mean / statistics.fmean(rates[base]) if mean else None
        row = {"preset": size.preset, "nodes": size.nodes, "processes_per_node": size.processes, "devices": size.devices}
        row |= {
            "runs": len(values),
            f"{unit}_per_s": mean,
            f"{unit}_per_s_deviation": statistics.stdev(values) if len(values) > 1 else None,
            "speedup": speedup,
            "efficiency": speedup * base.devices / size.devices if speedup else None,
            "problems": "; ".join(dict.fromkeys(problems[size])),
        }
        rows.append(row)
    return unit, rows


def _write_results(out: Path, unit: str, rows: Sequence[Mapping[str, Any]], *, title: str) -> list[Path]:
    """Print the table, and return the files that were written: the CSV, and the figure if anything was measured."""
    files = [out / "scaling.csv"]
    run_folder.write_text(files[0], as_csv(rows))
    if measured := [row for row in rows if row["runs"]]:
        shown = [{key: value for key, value in row.items() if key != "problems"} for row in measured]
        write(shown, optional=("processes_per_node", f"{unit}_per_s_deviation", "runs", "nodes"))
        files += write_figure(_figure(measured, unit, title), out / "scaling")
    return files


def _figure(rows: Sequence[Mapping[str, Any]], unit: str, title: str) -> Figure:
    """Draw throughput with its deviation, and efficiency, over the number of devices."""
    from matplotlib.figure import Figure  # takes half a second, which the help does not need

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    throughput, efficiency = figure.subplots(1, 2, gridspec_kw={"wspace": 0.05})
    looks = itertools.cycle(["o-", "s--", "^-.", "D:"])
    for (name, group), look in zip(itertools.groupby(rows, key=lambda row: row["preset"]), looks, strict=False):
        points = list(group)
        devices, rates = [row["devices"] for row in points], [row[f"{unit}_per_s"] for row in points]
        deviations = [row[f"{unit}_per_s_deviation"] or 0.0 for row in points]
        throughput.errorbar(devices, rates, yerr=deviations, capsize=3, fmt=look, label=name)
        throughput.plot(devices, [rates[0] * number / devices[0] for number in devices], color="0.7", zorder=1)
        efficiency.plot(devices, [row["efficiency"] for row in points], look, label=name)
        for row in points:
            place = {"xytext": (6, 5), "textcoords": "offset points"}
            efficiency.annotate(f"{row['speedup']:.2f}x", (row["devices"], row["efficiency"]), **place)
    throughput.set(ylabel=f"{unit}/s (gray: ideal)")
    label_log_axis(throughput, "{x:,.0f}")
    efficiency.axhline(1.0, color="0.7", zorder=1)
    most = max(1.0, *(row["efficiency"] for row in rows))
    efficiency.set(ylabel="efficiency (at the points: speed-up)", ylim=(0, 1.15 * most))
    ticks = sorted({row["devices"] for row in rows})
    for axes in (throughput, efficiency):
        axes.set(xlabel="devices", xscale="log", xlim=(ticks[0] / 1.25, ticks[-1] * 1.4))
        axes.set_xticks(ticks, [str(number) for number in ticks])
        axes.minorticks_off()
        axes.grid(visible=True, color="0.9", linewidth=0.6)
        axes.legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    return figure


def _parser() -> Parser:
    parser = Parser("scale", "Measure how a recipe scales: train it for some steps on every number of devices, several times; "
        "print throughput, speed-up and efficiency, and write them as CSV and as a figure. The same command resumes.",
        usage="%(prog)s [options] [key=value ...]")  # fmt: skip
    add = parser.add_argument
    add_recipe(parser, "recipe values for all runs")
    add_presets(parser)
    add("--devices", type=numbers, default=[1, 2], metavar="N,...", help="numbers of devices per node (default: 1,2)")
    add("--nodes", type=numbers, default=[1], metavar="N,...",
        help="numbers of nodes; more than 1 needs an allocation (default: 1)")  # fmt: skip
    parser.take_also("--nodes", "--num_machines")
    add("--weak", action="store_true", help="weak scaling: the recipe's global batch on each process (default: strong "
        "scaling, the recipe's global batch on every number of devices)")  # fmt: skip
    add("--steps", type=positive, default=50, metavar="N", help="optimizer steps to measure (default: 50)")
    add("--warm-up-steps", type=positive, default=20, metavar="N", help="steps before them, not measured (default: 20)")
    add("--repeats", type=positive, default=3, metavar="N", help="runs of each size, interleaved (default: 3)")
    add("--out", metavar="PATH", help="folder for the runs and the results (default: scale-<recipe>)")
    return parser
