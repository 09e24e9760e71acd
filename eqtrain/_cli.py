"""The command `eqtrain`."""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import sys
from collections.abc import Sequence
from typing import Any


class UsageError(Exception):
    """What a user gave on the command line cannot be used."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command, and returns its exit status: 2 for what cannot be used, in one line."""
    parser = argparse.ArgumentParser(prog="eqtrain", description="Tools around train steps.")
    commands = parser.add_subparsers(dest="command", required=True)
    explain = commands.add_parser(
        "explain",
        help="take the step of a replay bundle again, on one device, and say what went wrong",
        description="Takes the step of a replay bundle again, on one device. Modules are looked "
        "for in the current folder first.",
        epilog="example: eqtrain explain runs/bad/step-8-call-9 --loss train:loss "
        "--make train:make",
    )
    explain.add_argument("bundle", metavar="BUNDLE", help="the folder that was saved")
    explain.add_argument(
        "--loss",
        required=True,
        metavar="MODULE:NAME",
        help="the loss, or the train step that was made of it",
    )
    explain.add_argument(
        "--make",
        required=True,
        metavar="MODULE:NAME",
        help="the function of a key that returns the model, or (model, state)",
    )
    given = parser.parse_args(arguments)
    try:
        _explain(given.bundle, given.loss, given.make)
    except UsageError as error:
        print(f"eqtrain {given.command}: {error}", file=sys.stderr)
        return 2
    return 0


def _explain(path: str, loss: str, make: str) -> None:
    # Imported here, so that `--help` needs no JAX.
    from .bundles.bundle import read_bundle
    from .bundles.files import BundleError
    from .bundles.replay import explain_bundle
    from .explain.explanation import render

    try:
        bundle = read_bundle(path)
    except (BundleError, ImportError) as error:
        raise UsageError(str(error)) from error
    loss_function, make_function = load(loss, "--loss"), load(make, "--make")
    try:
        inspect.signature(make_function).bind("key")
    except TypeError as error:
        raise UsageError(
            "`--make` takes a function of one argument, a key. "
            f"Got {make!r}, which takes {inspect.signature(make_function)}. "
            "Name the function that `init` is given."
        ) from error
    try:
        explanation = explain_bundle(bundle, loss_function, make_function)
    except BundleError as error:
        raise UsageError(str(error)) from error
    reason = ", ".join(f"{name} {text}" for name, text in bundle.reason.items())
    print(f"step {bundle.step} of {bundle.chain}")
    print(f"saved in {bundle.path}" + (f": {reason}" if reason else ""))
    for note in bundle.notes:
        print(f"note: {note}")
    render(explanation)


def load(name: str, option: str) -> Any:
    """What `module:name` names; the name may have dots. The current folder is looked in first.

    **Raises:** `UsageError` that says which of the two there is not.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise UsageError(
            f"`{option}` takes module:name. Got {name!r}. Write, for example, {option} train:loss."
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == module_name
        raise UsageError(
            f"`{option}` takes the name of a module that can be imported. Got {module_name!r}, "
            + (
                f"which is neither in {os.getcwd()} nor installed. Run it in the module's folder."
                if missing
                else f"which raised {type(error).__name__}: {' '.join(str(error).split())}. "
                f"Try `python -c 'import {module_name}'`."
            )
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise UsageError(
                f"`{option}` takes a name that its module has. "
                f"Got {attribute!r}, which {module_name!r} has not. Correct the name."
            )
        found = getattr(found, part)
    if not callable(found):
        raise UsageError(
            f"`{option}` takes a function. Got {name!r}, which is {type(found).__name__}. "
            "Name the function itself."
        )
    return found


if __name__ == "__main__":
    sys.exit(main())
