"""What the package promises before it is used: its files, its imports, its documentation."""

import ast
import dataclasses
import inspect
import re
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import FunctionType, ModuleType

import pytest

import eqtrain

ROOT = Path(__file__).parent.parent
# Import names of what an extra brings, now or later.
OPTIONAL = set(
    "beartype flax grain haiku matplotlib orbax pandas rich safetensors sklearn tensorboardX torch "
    "transformers tyro".split()
)


def public() -> dict[str, object]:
    """Returns what `eqtrain/__init__.py` exports: all that it imports `as` something.

    Read from the text, because importing a submodule leaves it in `vars(eqtrain)` unasked.
    """
    tree = ast.parse(inspect.getsource(eqtrain))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names = [alias.asname or "_" for node in imports for alias in node.names]
    names = [name for name in names if not name.startswith("_")]
    assert names, "`eqtrain/__init__.py` exports nothing."
    return {name: getattr(eqtrain, name) for name in names}


def undocumented(values: Mapping[str, object]) -> list[str]:
    """Returns the names of modules, functions and classes without a docstring of their own.

    `inspect.getdoc` would hand a class its base's docstring, and a dataclass makes up a docstring
    that repeats its signature: neither counts. Other values have no docstring to write.
    """
    bad = []
    for name, value in values.items():
        if not isinstance(value, type | ModuleType | FunctionType):
            continue
        doc = vars(value).get("__doc__") if isinstance(value, type) else value.__doc__
        if not doc or doc.startswith(f"{name}("):
            bad.append(name)
    return bad


def unmentioned(names: list[str], text: str) -> list[str]:
    """Returns the names that stand nowhere in `text` as code, inline or in a block."""
    code = "\n".join(re.findall(r"```.*?```|`[^`\n]+`", text, flags=re.DOTALL))
    return [
        name for name in names if not re.search(rf"(?<![\w.])(?:(?:et|eqtrain)\.)?{name}\b", code)
    ]


def loaded_by(statement: str) -> set[str]:
    """Returns the optional packages that a fresh interpreter holds after `statement`."""
    script = f"import sys\n{statement}\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(result.stdout.split()) & OPTIONAL


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # hatchling itself, and not through pip: this needs no network and no copy of the repository.
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    (path,) = folder.glob("*.whl")
    return path


def test_wheel_holds_exactly_the_package(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "eqtrain").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert "eqtrain/py.typed" in expected and "eqtrain/__init__.py" in expected
    assert found == expected


def test_wheel_states_licence_and_core_dependencies(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        info = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(info).decode().split("\n\n")[0]
        licences = [name for name in archive.namelist() if name.endswith("licenses/LICENSE")]
    required = re.findall(r"^Requires-Dist: ([\w.-]+)[^;\n]*$", metadata, flags=re.MULTILINE)
    assert sorted(required) == ["einops", "equinox", "jax", "jaxtyping", "numpy", "optax"]
    assert "License-Expression: Apache-2.0" in metadata
    assert len(licences) == 1


def test_import_loads_no_extra():
    assert loaded_by("import eqtrain") == set()
    # Negative control: the same look does see one that is imported.
    assert loaded_by("import eqtrain, beartype") == {"beartype"}


def test_every_public_name_has_a_docstring():
    assert undocumented(public()) == []


def test_missing_docstrings_are_found():
    class Documented:
        """Says what it is."""

    class Inherits(Documented):
        pass

    @dataclasses.dataclass
    class Generated:
        field: int

    def bare():
        pass

    values = {value.__name__: value for value in (Documented, Inherits, Generated, bare)}
    assert undocumented(values) == ["Inherits", "Generated", "bare"]


def test_every_public_name_is_in_the_documentation():
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    assert unmentioned(list(public()), text) == []


def test_unmentioned_names_are_found():
    text = "Prose says update. Code says `et.accumulate(8)` and\n```python\nguarded(et.mean)\n```"
    assert unmentioned(["accumulate", "mean", "update", "guard"], text) == ["update", "guard"]


def test_what_is_imported_when_used_is_listed_and_found_and_nothing_else_is():
    assert {"checkpoint", "data", "interop", "update"} <= set(dir(eqtrain))
    assert eqtrain.data.Loader.__module__ == "eqtrain.data.loader"
    with pytest.raises(AttributeError, match="no attribute 'loader'"):
        getattr(eqtrain, "loader")  # noqa: B009
