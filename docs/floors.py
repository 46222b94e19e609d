"""Layers of the packages ("floors" of "rooms"), their imports, and the picture docs/floors.svg.

The layers are listed here; tests/test_floors.py checks every import. The lines of the picture are the imports.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
OURS = ("app", "launch", "benchmarks")

# From the lowest layer up. Each entry is a room: a package, or a module outside of any listed package.
FLOORS: list[list[str]] = [
    ["app.errors"],
    ["app.files", "app.tasks"],
    ["app.environment", "app.runs"],
    ["app.recipe"],
    ["app.tasks.causal_lm.sections", "app.tasks.image_classification.sections"],
    ["app.options"],
    ["app.optim", "app.data"],
    ["app.distributed"],
    ["app.task"],
    ["app.runs.ledger", "app.checks.arithmetic", "app.evaluation", "app.init"],
    ["app.tasks.causal_lm", "app.tasks.image_classification", "app.tasks.own"],
    ["app.distributed.control"],
    ["app.metrics"],
    ["app.checkpoints"],
    ["app.building", "app.planning"],
    ["app.loop"],
    ["app.attempt", "app.autopsy"],
    ["app.session"],
    ["app.train"],
    ["app.evaluate", "app.predict", "app.export", "app.reports"],
    ["app.checks", "app.audit", "app.planning.plan"],
    ["benchmarks"],
]
LAUNCHER_FLOOR = 5  # the highest layer that launch/ may import
STARTERS_FLOOR = 19  # the lowest layer that may start processes with launch/
# The rooms of launch/; each may import the ones before it.
LAUNCH_ROOMS: list[tuple[str, ...]] = [
    (
        "launch.shipped",
        "launch.preset",
        "launch.run_module",
        "launch.node_command",
    ),
    ("launch.schedulers",),
    ("launch.start",),
    ("launch.cases",),
    ("launch.submit",),
    ("launch.cli",),
]

Graph = dict[str, set[str]]
"""Rooms that each room imports."""


def modules() -> dict[str, Path]:
    """Return the files of all modules, without `__init__.py`, by name."""
    return {name: file for name, file in _all_modules().items() if file.stem != "__init__"}


@functools.cache
def _all_modules() -> dict[str, Path]:
    files = [file for folder in OURS for file in sorted((REPOSITORY / folder).rglob("*.py"))]
    return {".".join(file.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


def place(module: str) -> tuple[int, str] | None:
    """Return the layer and the room of a module; the innermost room counts."""
    found = [(floor, room) for floor, rooms in enumerate(FLOORS) for room in rooms if f"{module}.".startswith(f"{room}.")]
    return max(found, key=lambda it: len(it[1]), default=None)


def imports(file: Path, *, for_types: bool = True) -> set[str]:
    """Return the modules of this repository that a file imports anywhere, with `for_types` also under TYPE_CHECKING."""
    known = _all_modules()
    found = set()
    tree = ast.parse(file.read_text())
    checked = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    left_out = set() if for_types else {id(inner) for node in checked for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in left_out:
            continue
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            below = {f"{node.module}.{name.name}" for name in node.names}
            found |= {name if name in known else node.module for name in below}
    return {name for name in found if name.split(".")[0] in OURS and name not in OURS}


def rooms_imported() -> Graph:
    """Return the rooms that each room imports, without transitive ones (A -> C if A -> B -> C). launch/ is one room."""
    graph: Graph = {room: set() for rooms in FLOORS for room in rooms} | {"launch": set()}
    for module, file in modules().items():
        here = _room(module)
        graph[here] |= {_room(imported) for imported in imports(file)} - {here}
    reached = {room: _reached(graph, room) for room in graph}
    return {room: {to for to in below if not any(to in reached[other] for other in below)} for room, below in graph.items()}


def _room(module: str) -> str:
    found = place(module)
    return found[1] if found else module.split(".")[0]


def _reached(graph: Graph, room: str) -> set[str]:
    """Return all rooms that a room imports, directly or indirectly."""
    found: set[str] = set()
    ahead = [room]
    while ahead:
        new = graph[ahead.pop()] - found
        found |= new
        ahead += new
    return found


# The picture: a row for each layer, its rooms in boxes, and a line from each room down to what it imports. launch/ is at the
# side, above the layers that it imports and below those that start processes with it.
_WIDTH, _ROW, _BOX = 900, 46, 24
_LEFT, _RIGHT, _ASIDE = 40, 890, 760
_LAUNCH_FLOOR = 12
_STYLE = """text{font:12px ui-monospace,Menlo,Consolas,monospace;fill:#111}
rect{fill:#fff;stroke:#333}
path{fill:none;stroke:#888}
.band{fill:#f2f2f2;stroke:none}
.side{fill:#555}
.edge{stroke:#333;stroke-dasharray:5 4}"""


def picture() -> str:
    """Return docs/floors.svg."""
    graph = rooms_imported()
    centers = _centers(graph)
    height = _ROW * len(FLOORS) + 8
    imported = [(room, to) for room in sorted(graph) for to in sorted(graph[room])]
    drawn = [*_bands(), *(_line(centers, room, to) for room, to in imported), *(_box(*it) for it in sorted(centers.items()))]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" role="img">\n'
        f"<title>The layers: a package imports only packages of lower layers</title>\n<style>{_STYLE}</style>\n"
        f'<rect width="{_WIDTH}" height="{height}" style="stroke:none"/>\n{chr(10).join(drawn)}\n</svg>\n'
    )


def _bands() -> Iterator[str]:
    for floor in range(len(FLOORS)):
        if floor % 2 == 0:
            yield f'<rect class="band" x="0" y="{_y(floor) - _ROW / 2:g}" width="{_WIDTH}" height="{_ROW}"/>'
        yield f'<text class="side" x="10" y="{_y(floor) + 4:g}">{floor}</text>'
    edges = ((STARTERS_FLOOR - 1, 15, "those above may start launch"), (LAUNCHER_FLOOR, -6, "launch imports those below"))
    for below, shift, words in edges:
        y = _y(below) - _ROW / 2
        yield f'<path class="edge" d="M{_LEFT} {y:g}H{_WIDTH}"/>'
        yield f'<text class="side" x="{_RIGHT}" y="{y + shift:g}" text-anchor="end">{words}</text>'


def _y(floor: int) -> float:
    """Return the y coordinate of the middle of a layer."""
    return 4 + _ROW * (len(FLOORS) - floor - 0.5)


def _name(room: str) -> str:
    return room.removeprefix("app.")


def _width(room: str) -> float:
    return round(len(_name(room)) * 7.3 + 18)


def _centers(graph: Graph) -> dict[str, tuple[float, float]]:
    """Return the middle of each box. Within a layer, boxes are ordered by their neighbors, so that few lines cross."""
    joined = {room: sorted(graph[room] | {other for other in graph if room in graph[other]}) for room in graph}
    order = [list(rooms) for rooms in FLOORS]
    x = {"launch": float(_ASIDE)}
    for _ in range(8):
        for floor, rooms in enumerate(order):
            x |= _spread(rooms, _ASIDE - 80 if LAUNCHER_FLOOR < floor < STARTERS_FLOOR else _RIGHT)
        for rooms in order:
            rooms.sort(key=lambda room: (sum(x[other] for other in joined[room]) / len(joined[room]), room))
    floors = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms} | {"launch": _LAUNCH_FLOOR}
    return {room: (x[room], _y(floor)) for room, floor in floors.items()}


def _spread(rooms: list[str], right: float) -> dict[str, float]:
    """Return the middles of the boxes of a layer, evenly spaced."""
    gap = (right - _LEFT - sum(map(_width, rooms))) / (len(rooms) + 1)
    begins = [_LEFT + gap * (index + 1) + sum(map(_width, rooms[:index])) for index in range(len(rooms))]
    return {room: round(begin + _width(room) / 2, 1) for room, begin in zip(rooms, begins, strict=True)}


def _box(room: str, center: tuple[float, float]) -> str:
    (x, y), width = center, _width(room)
    return (
        f'<rect x="{x - width / 2:g}" y="{y - _BOX / 2:g}" width="{width:g}" height="{_BOX}" rx="4"/>'
        f'<text x="{x:g}" y="{y + 4:g}" text-anchor="middle">{_name(room)}</text>'
    )


def _line(centers: dict[str, tuple[float, float]], room: str, to: str) -> str:
    (x, y), (to_x, to_y) = centers[room], centers[to]
    y, to_y = y + _BOX / 2, to_y - _BOX / 2
    bend = min(0.5 * (to_y - y), 60)
    curve = f"M{x:g} {y:g}C{x:g} {y + bend:g} {to_x:g} {to_y - bend:g} {to_x:g} {to_y:g}"
    return f'<path d="{curve}"><title>{room} imports {to}</title></path>'
