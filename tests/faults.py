"""Seeds faults into a copy of the package, one at a time, and says which test notices each.

    python tests/faults.py                     every fault, with the tests named beside it
    python tests/faults.py mask-ignored ...    these alone
    python tests/faults.py --all               and the whole default tier for what they let pass
    python tests/faults.py --baseline          the named tests on the code as it is: all must pass
    python tests/faults.py --list              the faults, with nothing run

The last line counts. The exit status is 1 if a fault survived, or if there was no verdict: a fault
that cannot be put in its place, or tests that cannot be run, prove nothing.
"""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.fault_list import FAULTS, Fault  # noqa: E402

COPIED = (
    *("eqtrain", "models", "benchmarks", "examples", "tests", "docs"),
    *("pyproject.toml", "README.md"),
)
# A test that fails may leave a file open, whose warning must not hide that it failed.
PYTEST = (
    *("-x", "-q", "-n0", "-p", "no:cacheprovider", "--tb=line"),
    *("-W", "ignore::ResourceWarning", "-W", "ignore::pytest.PytestUnraisableExceptionWarning"),
)
# Seconds. What waits for ever is no verdict.
PATIENCE = 1200

# Runs pytest, and sees that it was the copy that was tested and not an installed package.
RUN = """
import pathlib, sys
import pytest
status = pytest.main(sys.argv[1:])
import eqtrain
if not pathlib.Path(eqtrain.__file__).is_relative_to(pathlib.Path.cwd()):
    sys.exit(f"tested {eqtrain.__file__}, which is not of the copy")
sys.exit(f"no verdict, pytest says {status!r}" if status > 1 else 10 + status)
"""
PASSED, FAILED = 10, 11


class StaleFaultError(Exception):
    """A fault whose text is not, or not once, in its file, or which leaves no code."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of a fault: "killed", "survived" or "unknown", by which test, or why not."""

    fault: Fault
    outcome: str
    by: str
    seconds: float


def seeded(fault: Fault, package: Path) -> str:
    """The text of a fault's file with the fault in it.

    **Raises:** `StaleFaultError` that names the fault.
    """
    text = (package / fault.file).read_text(encoding="utf-8")
    found = text.count(fault.old)
    if found != 1 or fault.new == fault.old:
        raise StaleFaultError(
            f"The text of a fault must be once in its file, and change. Got {fault.name!r}, whose "
            f"text is {found} times in {fault.file}. Adapt it in `tests/fault_list.py`."
        )
    changed = text.replace(fault.old, fault.new)
    try:
        ast.parse(changed)
    except SyntaxError as error:
        raise StaleFaultError(
            f"A fault must leave code that runs. Got {fault.name!r}: {error}. Adapt it."
        ) from error
    return changed


@contextlib.contextmanager
def copy_of_the_tree() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        copy = Path(folder).resolve() / "copy"
        copy.mkdir()
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(source, copy / name)
        yield copy


@contextlib.contextmanager
def with_fault(fault: Fault, copy: Path) -> Iterator[None]:
    """The copy with the fault in it. Python is made to look at the file anew, before and after."""
    path = copy / "eqtrain" / fault.file
    right, wrong = path.read_text(encoding="utf-8"), seeded(fault, copy / "eqtrain")

    def write(text: str) -> None:
        path.write_text(text, encoding="utf-8")
        for compiled in path.parent.joinpath("__pycache__").glob(f"{path.stem}.*"):
            compiled.unlink()

    write(wrong)
    try:
        yield
    finally:
        write(right)


def run_tests(arguments: Sequence[str], copy: Path, *options: str) -> tuple[int | None, str]:
    """The exit status and output of pytest in the copy; None if it did not end."""
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(copy.parent / "compiled"),
        "JAX_COMPILATION_CACHE_INCLUDE_METADATA_IN_KEY": "1",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    given = [f"tests/{one}" if ".py" in one else one for one in arguments]
    files = [copy / one.split("::")[0] for one in given if ".py" in one]
    if any("pytest.mark.codegen" in file.read_text(encoding="utf-8") for file in files):
        cache["EQTRAIN_TESTS_COMPILE_BY_DEFAULT"] = "1"  # else those tests leave it to another
    try:
        done = subprocess.run(
            [sys.executable, "-c", RUN, *PYTEST, *options, *given],
            cwd=copy,
            env={**cache, **os.environ, "PYTHONPATH": str(copy)},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
    except subprocess.TimeoutExpired:
        return None, f"did not end within {PATIENCE} s"
    return done.returncode, done.stdout + done.stderr


def failures(output: str) -> list[str]:
    """The tests that pytest says failed."""
    words = (line.split() for line in output.splitlines())
    return [line[1] for line in words if len(line) > 1 and line[0] in ("FAILED", "ERROR")]


def judge(fault: Fault, copy: Path, everything: bool) -> tuple[Verdict, str]:
    start = time.monotonic()
    with with_fault(fault, copy):
        status, output = run_tests(fault.tests, copy)
        if status == PASSED and everything:
            status, output = run_tests((), copy)
    outcome = {PASSED: "survived", FAILED: "killed"}.get(status or 0, "unknown")
    last = output.strip().splitlines()[-1:] or ["pytest said nothing"]
    by = {"survived": "", "killed": ", ".join(failures(output))}.get(outcome, last[0])
    return Verdict(fault, outcome, by, time.monotonic() - start), output


def baseline(faults: Sequence[Fault]) -> int:
    """Runs the tests of the faults on the code as it is, and says which of them do not pass."""
    sets: dict[tuple[str, ...], list[str]] = collections.defaultdict(list)
    for fault in faults:
        sets[fault.tests].append(fault.name)
    # Those that choose by a word run by themselves.
    together = sorted({one for tests in sets if "-k" not in tests for one in tests})
    runs = [tuple(together)] * bool(together) + [tests for tests in sets if "-k" in tests]
    wrong = 0
    with copy_of_the_tree() as copy:
        for tests in runs:
            status, output = run_tests(tests, copy, "--maxfail=1000")
            failed = failures(output)
            if status == PASSED:
                continue
            wrong += 1
            print(output.strip().splitlines()[-1] if not failed else "\n".join(failed))
            for given, names in sets.items():
                hit = [one for one in given if any(f"tests/{one}" in name for name in failed)]
                if hit or given == tests:
                    print(f"  without the fault too: {', '.join(names)}")
    print(f"{len(runs)} runs of the named tests, {wrong} of them with failures")
    return int(wrong > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", help="which faults; all unless given")
    parser.add_argument("--all", action="store_true", help="the whole default tier for survivors")
    parser.add_argument("--baseline", action="store_true", help="run the tests without any fault")
    parser.add_argument("--list", action="store_true", help="print the faults")
    parser.add_argument("--verbose", action="store_true", help="print what pytest says of each")
    given = parser.parse_args()
    unknown = set(given.names) - {fault.name for fault in FAULTS}
    if unknown:
        parser.error(f"no fault is called {', '.join(sorted(unknown))}")
    faults = [fault for fault in FAULTS if not given.names or fault.name in given.names]
    if given.list:
        for fault in faults:
            print(f"{fault.name}\n  {fault.file}: {fault.breaks}\n  {' '.join(fault.tests)}")
        return 0
    if given.baseline:
        return baseline(faults)
    for fault in faults:
        seeded(fault, ROOT / "eqtrain")
    width = max(len(fault.name) for fault in faults)
    verdicts = []
    with copy_of_the_tree() as copy:
        for fault in faults:
            verdict, output = judge(fault, copy, given.all)
            verdicts.append(verdict)
            took = f"{verdict.seconds:5.0f} s"
            print(f"{fault.name:{width}}  {verdict.outcome:8}  {took}  {verdict.by}", flush=True)
            if given.verbose:
                print(output, flush=True)
    counts = collections.Counter(verdict.outcome for verdict in verdicts)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    return int(counts["killed"] < len(verdicts))


if __name__ == "__main__":
    sys.exit(main())
