"""The rooms of the package, and the doors between them: no import goes against the arrows.

Also the page that says which rooms there are: `docs/internals.md` draws what is listed here.
"""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import eqtrain
from tests.test_package import public

PACKAGE = Path(eqtrain.__file__).parent
# From the bottom to the top. A room may import those of the lines above it, and no other; rooms of
# one line do not see one another.
STOREYS = [
    ["_util"],
    ["_metrics", "random"],
    ["_sharding"],
    ["_ops", "_jaxpr", "_state", "_preemption", "rows"],
    ["_guard"],
    ["_core"],
    ["explain"],
    ["_transforms"],
    ["bundles"],
    ["_programs"],
    ["checkpoint", "data", "interop"],
    ["_cli"],
]
HEIGHT = {room: height for height, rooms in enumerate(STOREYS) for room in rooms}
# `data` stands beside the house: batches know of meshes alone.
SIDE_DOORS = {"data": {"_util", "_sharding"}, "interop": {"_util", "_state"}}


def room_of(module: str) -> str:
    return module.split(".")[0]


def imports_of(path: Path, package: Path = PACKAGE) -> set[str]:
    """The modules of the package that a file imports anywhere, by their dotted names inside it."""
    here = path.relative_to(package).parts[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*here[: len(here) - node.level + 1], *filter(None, [node.module])]
            # `from .. import a` imports the module `a`; `from ..a import b` imports from `a`.
            names = [".".join(base)] if node.module else []
            names += [] if node.module else [".".join([*base, alias.name]) for alias in node.names]
            found |= {
                f"{name}.{alias.name}" if _is_module(package, f"{name}.{alias.name}") else name
                for name in names
                for alias in node.names
            }
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module.split(".")[0] == package.name:
                found |= {node.module.partition(".")[2] or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            dotted = [alias.name.split(".") for alias in node.names]
            found |= {".".join(name[1:]) for name in dotted if name[0] == package.name and name[1:]}
    return found


def _is_module(package: Path, dotted: str) -> bool:
    path = package.joinpath(*dotted.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def files() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def wrong_doors(edges: dict[str, set[str]]) -> list[str]:
    """The imports that go up, sideways, or through a door that a side room does not have."""
    wrong = []
    for module, imported in edges.items():
        room = room_of(module)
        for other in imported:
            below = room_of(other)
            if below == room:
                continue
            allowed = SIDE_DOORS.get(room)
            if HEIGHT[below] >= HEIGHT[room] or allowed is not None and below not in allowed:
                # `checkpoint` exports weights in the formats that `interop` writes.
                if (room, below) != ("checkpoint", "interop"):
                    wrong.append(f"{module} imports {other}")
    return wrong


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Circles of modules that import one another."""
    done: set[str] = set()
    found: list[list[str]] = []

    def visit(module: str, path: list[str]) -> None:
        if module in path:
            found.append([*path[path.index(module) :], module])
        elif module not in done:
            for other in sorted(edges.get(module, ())):
                visit(other, [*path, module])
            done.add(module)

    for module in edges:
        visit(module, [])
    return found


EDGES = {name_of(path): imports_of(path) for path in files()}


def test_every_room_has_its_place():
    rooms = {room_of(name) for name in EDGES}
    assert rooms == set(HEIGHT)


def test_every_door_leads_down():
    assert wrong_doors(EDGES) == []


def test_no_modules_import_one_another_in_a_circle():
    assert circles(EDGES) == []


@pytest.mark.parametrize(
    ("module", "imported"),
    [("_sharding.mesh", "_core.levels"), ("data.loader", "_core.levels"), ("_ops.a", "_state.b")],
)
def test_wrong_door_is_found(module, imported):
    assert wrong_doors({module: {imported}}) == [f"{module} imports {imported}"]


def test_circle_is_found():
    assert circles({"_a.x": {"_a.y"}, "_a.y": {"_a.z"}, "_a.z": {"_a.y"}}) == [
        ["_a.y", "_a.z", "_a.y"]
    ]


def test_imports_are_found_in_every_form(tmp_path):
    package = tmp_path / "eqtrain"
    (package / "room").mkdir(parents=True)
    (package / "other").mkdir()
    (package / "other" / "leaf.py").touch()
    (package / "top.py").touch()
    path = package / "room" / "file.py"
    path.write_text(
        "import eqtrain.other\nfrom .beside import a\nfrom ..other import leaf, name\n"
        "def f():\n    from .. import top\n    from eqtrain.other.leaf import x\n"
    )
    assert imports_of(path, package) == {
        "other",
        "room.beside",
        "other.leaf",
        "top",
    }


COMPLETE = """
import rlcompleter
import eqtrain as et

completer, names, state = rlcompleter.Completer({"et": et}), [], 0
while (match := completer.complete("et.", state)) is not None:
    names.append(match.removeprefix("et.").rstrip("()"))
    state += 1
print(*names)
"""


def test_tab_completion_shows_what_is_public_and_nothing_else():
    # In a process of its own: the tests' import hook adds names to every module.
    command = [sys.executable, "-c", COMPLETE]
    shown = subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True, check=True)
    assert sorted(shown.stdout.split()) == sorted(public())


def test_contents_page_starts_with_the_transforms():
    text = inspect.getsource(eqtrain)
    first = next(line for line in text.splitlines() if line.startswith("from ."))
    assert first.startswith("from ._transforms.")
