"""Draw the figures of docs/learn/lesson.md and docs/optimizers.md: `PYTHONPATH=. python docs/figures.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from app.optim import schedule
from app.recipe.schema import OptimRecipe

DOCS = Path(__file__).parent
RANKS = 4
COLORS = {"weights": "#7fa8d9", "gradients": "#f2b26b", "optimizer": "#8fc48b"}
BYTES = {"weights": 4, "gradients": 4, "optimizer": 8}
SHARDED = {"DDP": 0, "ZeRO-1": 1, "ZeRO-2": 2, "ZeRO-3, FSDP2": 3}
"""How many of the three kinds each strategy shards, from the optimizer state on."""
_STYLE = """text{font:15px system-ui,Helvetica,Arial,sans-serif;fill:#111}
.small{font-size:13px;fill:#444}
.bold{font-weight:600}
.middle{text-anchor:middle}
.held{stroke:#333}
.gone{fill:#fff;stroke:#bbb;stroke-dasharray:3 3}
.arrow{fill:none;stroke:#333;stroke-width:1.5;marker-end:url(#head)}"""
_HEAD = (
    '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
    '<path d="M0 0L8 4L0 8z"/></marker>'
)


def zero() -> str:
    """Return a picture of what each rank holds of weights, gradients and optimizer state under DDP and each ZeRO stage."""
    left, top, row, unit, gap = 155, 74, 62, 9, 18
    bar = unit * sum(BYTES.values())
    parts = [_text(left + rank * (bar + gap) + bar / 2, 60, f"rank {rank}", "middle") for rank in range(RANKS)]
    parts += [_text(left + RANKS * (bar + gap), 60, "bytes per weight")]
    at = float(left)
    for kind, color in COLORS.items():
        label = {"optimizer": "optimizer state"}.get(kind, kind)
        parts += [_box(at, 14, 16, 16, color), _text(at + 24, 27, f"{label}: {BYTES[kind]} bytes per weight", "small")]
        at += 60 + 7 * len(f"{label}: 4 bytes per weight")
    for line, (name, stages) in enumerate(SHARDED.items()):
        y = top + line * row
        parts.append(_text(10, y + 26, name, "bold"))
        sharded = list(BYTES)[::-1][:stages]
        total = sum(size / (RANKS if kind in sharded else 1) for kind, size in BYTES.items())
        for rank in range(RANKS):
            x = float(left + rank * (bar + gap))
            for kind, size in BYTES.items():
                for shard in range(RANKS):
                    width = size * unit / RANKS
                    parts.append(_box(x, y, width, 40, COLORS[kind] if kind not in sharded or shard == rank else None))
                    x += width
        parts.append(_text(left + RANKS * (bar + gap) + 8, y + 26, f"{total:g}", "bold"))
    parts.sort(key=lambda part: 'class="gone"' not in part)  # below the boxes next to them
    return _svg("Memory of each rank under DDP and ZeRO on 4 processes", 940, top + len(SHARDED) * row - 8, parts)


def ring() -> str:
    """Return a picture of a ring all-reduce on four processes: at the start, after the reduce-scatter, after the all-gather."""
    titles = ("Start: own gradients", "After the reduce-scatter (N-1 steps)", "After the all-gather (N-1 steps)")
    notes = (
        "Each rank has its own gradient, in 4 chunks.",
        "Each rank has the sum of one chunk.",
        "Each rank has the sum of all chunks.",
    )
    parts = [_HEAD]
    for panel, (title, note) in enumerate(zip(titles, notes, strict=True)):
        parts += _ring(170 + panel * 330, 170, panel)
        parts += [_text(170 + panel * 330, 24, title, "bold middle"), _text(170 + panel * 330, 330, note, "small middle")]
    for index, (color, label) in enumerate(
        (("#e4e4e4", "a rank's own chunk"), (COLORS["weights"], "chunk summed over all ranks"))
    ):
        parts += [_box(270 + index * 230, 350, 16, 16, color), _text(294 + index * 230, 363, label, "small")]
    return _svg("Ring all-reduce on 4 processes", 1000, 380, parts)


def _ring(x: float, y: float, panel: int) -> Iterator[str]:
    places = [(x, y - 95), (x + 110, y), (x, y + 95), (x - 110, y)]  # clockwise from the top
    arrows = ["M{} {}Q{} {} {} {}".format(*points) for points in (
        (x + 52, y - 90, x + 95, y - 85, x + 110, y - 34),
        (x + 110, y + 36, x + 95, y + 85, x + 52, y + 92),
        (x - 52, y + 92, x - 95, y + 85, x - 110, y + 36),
        (x - 110, y - 34, x - 95, y - 85, x - 52, y - 90),
    )]  # fmt: skip
    for action in ("add", "copy")[panel : panel + 1]:  # what turns this panel into the next
        yield _text(x, y - 2, "each step: send", "small middle")
        yield _text(x, y + 15, f"1 chunk, {action} it", "small middle")
        yield from (f'<path class="arrow" d="{arrow}"/>' for arrow in arrows)
    for rank, (left, top) in enumerate(places):
        yield _text(left, top - 14, f"rank {rank}", "middle small")
        for chunk in range(RANKS):
            summed = (False, chunk == (rank + 1) % RANKS, True)[panel]
            yield _box(left - 36 + chunk * 18, top - 8, 18, 24, COLORS["weights"] if summed else "#e4e4e4")


def schedules() -> str:
    """Return a plot of the learning rate of each `optim.schedule` over 1,000 steps, and of the decays of wsd."""
    steps, width, height = 1000, 210, 110
    common: dict[str, Any] = {"lr": 1.0, "warmup_steps": 100, "final_lr_ratio": 0.1, "power": 2.0}
    common |= {"decay_epochs": (40, 75), "decay_factor": 0.3}
    sizes = {"global_batch_size": 1, "steps_per_epoch": 10, "total_steps": steps}
    panels: dict[str, list[dict[str, Any]]] = {name: [{"schedule": name, "decay_steps": 200}] for name in schedule.USED_KEYS}
    decays = ("linear", "sqrt", "cosine")
    panels["wsd: decay_type"] = [{"schedule": "wsd", "decay_steps": 600, "decay_type": name} for name in decays]
    labels = {"polynomial": "polynomial, power 2", "step": "step, factor 0.3", "wsd": "wsd, decay_steps 200"}
    parts = []
    for number, (title, drawn) in enumerate(panels.items()):
        left, top = 20 + number % 4 * (width + 25), 34 + number // 4 * (height + 60)
        axis = f"M{left} {top}V{top + height}H{left + width}"
        parts += [_text(left, top - 10, labels.get(title, title), "bold"), f'<path fill="none" stroke="#999" d="{axis}"/>']
        for keys in drawn:
            optim = OptimRecipe(**common, **keys)
            rates = ((step, schedule.lr_at(step, optim=optim, **sizes)) for step in range(0, steps + 1, 10))
            points = " ".join(f"{left + step / steps * width:.1f},{top + (1 - rate) * height:.1f}" for step, rate in rates)
            parts.append(f'<polyline fill="none" stroke="#2b6cb0" stroke-width="2" points="{points}"/>')
        if len(drawn) > 1:
            for name, x, y in (("cosine", 128, 0.14), ("linear", 168, 0.48), ("sqrt", 64, 0.55)):
                parts.append(_text(left + x, top + y * height, name, "small"))
    parts.append(_text(20, 2 * (34 + height) + 62, "From left to right 1,000 steps, the first 100 of them warm-up, and from 0 "
                       "to the peak; optim.final_lr_ratio is 0.1.", "small"))  # fmt: skip
    return _svg("Learning rate schedules", 950, 2 * (34 + height) + 80, parts)


def _box(x: float, y: float, width: float, height: float, color: str | None) -> str:
    look = f'class="held" fill="{color}"' if color else 'class="gone"'
    return f'<rect {look} x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"/>'


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{text}</text>'


def _svg(title: str, width: int, height: int, parts: list[str]) -> str:
    inside = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">\n'
        f'<title>{title}</title>\n<style>{_STYLE}</style>\n<rect width="{width}" height="{height}" rx="8" fill="#fff"/>\n'
        f"{inside}\n</svg>\n"
    )


FIGURES = {"learn/ring-all-reduce.svg": ring, "learn/zero.svg": zero, "schedules.svg": schedules}


def main() -> None:
    """Write the figures."""
    for name, draw in FIGURES.items():
        (DOCS / name).write_text(draw())


if __name__ == "__main__":
    main()
