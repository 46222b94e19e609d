"""`samerun audit train.py`: what makes the runs of an Accelerate script differ, and what to change.

The script runs unchanged on CPU: on one process twice (the noise floor), on two processes, on two processes with the global
batch and the learning rates of one, and, where it can, with twice the accumulation and stopped and resumed.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from app.audit import job_script
from app.audit.causes import CHANGES, Evidence, Finding, follows, judge, schedule
from app.audit.runs import SCRATCH, Running, Script
from app.errors import UsageError
from app.options import Parser, above_zero, positive, wrapped
from app.reports.past_run import print_text


def main(argv: list[str], environment: Mapping[str, str], *, say: Callable[[str], None]) -> int:
    """Run `samerun audit`; 0: the same run, 1: faults, 2: it could not be judged. Raises UsageError."""
    own, words, module = _split(argv)
    options = _parser().parse_all(own)
    if not words and options.script is None:
        raise UsageError("no script to audit: expected `samerun audit train.py [its arguments]`, or -m MODULE")
    found = list(job_script.check(options.script)) if options.script else []
    evidence = None
    if words:
        script = Script(words[0], words[1:], module, options.steps, options.tail, options.timeout, options.config_file)
        source = _source(script)
        with tempfile.TemporaryDirectory(prefix=SCRATCH) as folder, ExitStack() as ends:
            evidence = _Audit(script, source, Path(folder), environment, say, ends).run(options.resume_args)
        # These causes need no comparison of numbers, so they show in an unseeded script, too.
        found += [one for one in judge(evidence) if not evidence.unseeded or one.cause in (3, 4, 5, 8, 9, 14)]
    return _report(found, evidence, as_json=options.json)


@dataclass(frozen=True)
class _Audit:
    """The runs of one script."""

    script: Script
    source: str
    folder: Path
    environment: Mapping[str, str]
    say: Callable[[str], None]
    ends: ExitStack
    """It ends what still runs when the audit ends."""

    def start(self, name: str, processes: int = 1, *, script: Script | None = None, **orders: Any) -> Running:
        self.say(f"running: {name}")
        folder = self.folder / re.sub(r"\W+", "-", name)
        running = Running(script or self.script, name, processes, folder, self.environment, **orders)
        self.ends.callback(running.end)
        return running

    def run(self, resume_args: str | None) -> Evidence:
        """Run the script in all ways that it allows. Raises UsageError if it cannot be audited."""
        first, second = self.start("1 process"), self.start("1 process again")
        reference, again = first.wait(), second.wait()
        if not reference.ranks or not reference.first.all("accelerator"):
            raise UsageError(f"{self.script.name} builds no Accelerator and no Trainer: an audit records Accelerate")
        if not reference.steps:
            raise UsageError(f"{self.script.name} takes no optimizer step on 1 process")
        evidence = Evidence(self.script.steps, reference, again, self.start("2 processes", 2).wait())
        if not evidence.unseeded and not evidence.are_copies:
            self.compare(evidence)
        if not evidence.unseeded:
            evidence.remarks += self.resume(evidence, resume_args)
        return evidence

    def compare(self, evidence: Evidence) -> None:
        """Run the script with the global batch, order and rates of one process in other parts."""
        reference, accelerator, remarks = evidence.reference, evidence.reference.accelerator, evidence.remarks
        trained = {ranks[0].loader for ranks in reference.passes(training=True)}
        loaders = [event for event in reference.first.all("loader") if event["loader"] in trained]
        if odd := [event["batch_size"] for event in loaders if (event["batch_size"] or 1) % 2]:
            remarks.append(f"Gradients were not compared: the batch of {odd[0]} cannot be halved. Give an even batch.")
            return
        halves = {event["loader"]: 2 for event in loaders}
        orders: dict[str, Any] = {"rates": [step.event["rates"] for step in reference.first.steps]}
        if any(event["sampler"] == "RandomSampler" for event in loaders) and not accelerator["seedable"]:
            orders["fixed_order"] = True
            remarks.append("Without use_seedable_sampler 2 processes shuffle otherwise than 1: the comparison fixes the order.")
        one = self.start("1 process, fixed order", **orders) if "fixed_order" in orders else None
        if accelerator["trainer"] or reference.first.all("accumulate"):
            evidence.accumulated = self.start("1 process, accumulation x 2", **orders, divide=halves, accumulation=2).wait()
        evidence.comparable = one.wait() if one else None
        divide = halves if evidence.natural.batch > 1.5 * reference.batch else {}
        evidence.held = self.start("2 processes, global batch of 1", 2, **orders, divide=divide).wait()

    def resume(self, evidence: Evidence, resume_args: str | None) -> list[str]:
        """Stop the script after a checkpoint and resume it. Return why that was not judged, if it was not."""
        reference, is_trainer = evidence.reference, evidence.reference.accelerator["trainer"]
        advice = 'give --resume-args "--resume {dir}" with the option of the script'
        if not (is_trainer or resume_args or "load_state" in self.source):
            return [f"Resuming was not judged: {advice}."]
        steps = [event["step"] for event in reference.first.all("save") if 0 < event["step"] < len(reference.steps)]
        if not steps:
            return ["Resuming was not judged: the script saves no checkpoint before its last step."]
        starts = {one.from_step for one in reference.first.passes}
        at = next((step for step in steps if step not in starts), steps[0])  # within an epoch, if it saves there
        running = self.start("1 process, stopped after a checkpoint", crash_after=at)
        stopped = running.wait()
        saves = [event for event in stopped.first.all("save") if event["step"] == at]
        path = next((event for event in saves if event["by"] != "torch.save"), saves[0])["path"]
        words = shlex.split((resume_args or "").replace("{dir}", shlex.quote(path)))
        script = replace(self.script, arguments=[*self.script.arguments, *words])
        resume = path if is_trainer and not words else None
        resumed = self.start("1 process, resumed", script=script, work=running.folder / "work", resume=resume).wait()
        if not (resumed.first.all("load") or words):
            return [f"Resuming was not judged: started again, the script loads no checkpoint; {advice}."]
        evidence.resumed = (stopped, resumed)
        return []


def _report(found: Sequence[Finding], evidence: Evidence | None, *, as_json: bool) -> int:
    """Print runs, meaning and findings; return the exit code."""
    faults, unseeded = sum(one.is_fault for one in found), evidence.unseeded if evidence else ""
    code = 1 if faults else 2 if unseeded else 0
    runs, meaning = (evidence.runs, _meaning(evidence)) if evidence else ([], [])
    verdict = f"{faults} fault{'s' * (faults > 1)}." if faults else "No fault was found."
    if unseeded:
        verdict += f" No more can be judged: {unseeded}. Call accelerate.utils.set_seed before model and data are built."
    findings = [asdict(one) | dict(zip(("change", "reports"), CHANGES[one.cause] if one.is_fault else ("", ""), strict=True))
                for one in found]  # fmt: skip
    if as_json:
        rows = [{"name": run.name, "steps": len(run.steps), "ended": run.has_ended} for run in runs]
        print_text(json.dumps({"exit_code": code, "verdict": verdict, "runs": rows, "meaning": meaning, "findings": findings}))
        return code
    for run in runs:
        print_text(f"{run.name:<40} {len(run.steps):>5} steps, {'to its end' if run.has_ended else 'then ended by the audit'}")
    lines = ["", *meaning] * bool(meaning)
    for one in findings:
        since = f" (from step {one['since_step']})" * bool(one["since_step"])
        lines += ["", f"{'FAULT' if one['is_fault'] else 'Note'} {one['cause']}: {one['what']}{since}"]
        lines += [f"  {key.title()}: {one[key]}" for key in ("change", "reports") if one[key]]
    print_text(wrapped("\n".join([*lines, "", verdict])))
    return code


def _meaning(evidence: Evidence) -> list[str]:
    """Return what the script means by its batch and its learning rate, and what was compared."""
    lines = []
    if not evidence.are_copies and evidence.natural.steps:
        size, other_size = evidence.reference.batch, evidence.natural.batch
        each = f"of each process: {size:g} samples per step on 1 process, {other_size:g} on 2"
        lines.append(f"The batch is {each if other_size > size else f'global: {size:g} samples per step'}.")
        (_, shape), (_, other) = schedule(evidence.reference), schedule(evidence.natural)
        if max(shape) - min(shape) > 1e-12:
            kinds = {"of steps": 1.0, "of samples": other_size / size}
            kind = next((it for it, speed in kinds.items() if follows(shape, other, speed)), "that depends on processes")
            lines.append(f"The learning rate is a function {kind}.")
    held = ["Gradients are compared with the same global batch and the same learning rates."] * bool(evidence.held)
    return [*lines, *held, f"Noise floor: {evidence.noise:.1e} (1 process compared with itself).", *evidence.remarks]


def _split(argv: list[str]) -> tuple[list[str], list[str], bool]:
    """Return the options of the audit, the script with its arguments, and whether it is a module."""
    index = 0
    while index < len(argv) and argv[index].startswith("-") and argv[index] != "-m":
        index += 1 if "=" in argv[index] or argv[index] in ("--json", "-h", "--help") else 2
    is_module = argv[index : index + 1] == ["-m"]
    return argv[:index], argv[index + is_module :], is_module


def _source(script: Script) -> str:
    """Return the text of a script. Raises UsageError if it cannot be audited."""
    own = Path(*script.name.split("."))  # a module, in the working folder first, as `python -m` does
    files = [own.with_suffix(".py"), own / "__main__.py"] if script.module else [Path(script.name)]
    try:
        if script.module and not any(map(Path.is_file, files)) and (spec := importlib.util.find_spec(script.name)):
            files = [Path(spec.origin or "")]
        text = next(filter(Path.is_file, files), files[0]).read_text()
        ast.parse(text)
    except (OSError, ValueError, SyntaxError, ImportError) as error:
        raise UsageError(f"{script.name} cannot be read as a Python script: {error}") from error
    imported = set(re.findall(r"^\s*(?:from|import)\s+(\w+)", text, re.MULTILINE))
    if imported & {"lightning", "lightning_fabric", "pytorch_lightning"} and not imported & {
        "accelerate",
        "transformers",
        "trl",
    }:
        raise UsageError(f"{script.name} is written for Lightning, and an audit records Hugging Face Accelerate")
    return text


def _parser() -> Parser:
    parser = Parser("audit", "Run an Accelerate script unchanged on 1 and 2 processes of this CPU, and report what makes its "
                    "runs differ and what to change. Exit code 0: no fault, 1: faults, 2: it could not be judged.",
                    usage="%(prog)s [options] train.py [arguments of the script]")  # fmt: skip
    add, seconds = parser.add_argument, dict[str, Any](type=above_zero, metavar="SECONDS")
    add("-m", dest="module", metavar="MODULE", help="run a module instead of a script, as `python -m` does")
    add("--steps", type=positive, default=12, metavar="N", help="optimizer steps to compare (default: 12)")
    add("--tail", default=10.0, **seconds, help="time after them, to reach ends of epochs and checkpoints (default: 10)")
    add("--timeout", default=120.0, **seconds, help="time to take them (default: 120)")
    add("--resume-args", metavar="TEXT", help='arguments to resume from its checkpoint, such as "--resume {dir}"')
    add("--config-file", "--config_file", type=Path, metavar="FILE", help="start 2 processes by `accelerate launch` with it")
    add("--script", type=Path, metavar="FILE", help="Slurm job script to check, too")
    add("--json", action="store_true", help="print JSON")
    return parser
