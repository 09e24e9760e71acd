"""An explanation says all that is known, as text and as a table."""

import doctest
import inspect
import io
import sys

import jax
import jax.numpy as jnp
import pytest

import eqtrain.explain
from eqtrain.explain import (
    Explanation,
    RowBlame,
    all_faults,
    describe,
    first_fault,
    render,
    statistics,
    watch,
)

EXPORTS = vars(eqtrain.explain)


@pytest.mark.parametrize("name", ["watch", "blame_rows"])
def test_example_runs(name):
    [example] = doctest.DocTestFinder().find(
        inspect.unwrap(EXPORTS[name]), name, module=False, globs={**EXPORTS, "jax": jax, "jnp": jnp}
    )
    report: list[str] = []
    result = doctest.DocTestRunner(verbose=False).run(example, out=report.append)
    assert result.attempted > 0 and result.failed == 0, "".join(report)


def loss(model, batch):
    h = jnp.take(model["table"], batch["tokens"], axis=0)
    return jnp.log(h).sum()


@pytest.fixture(scope="module")
def explanation() -> Explanation:
    model = {"table": jnp.full((5, 2), 2.0)}
    batch = {"tokens": jnp.asarray([0, 7, -9, 1])}
    flags = jax.jit(watch(loss, names=("model", "batch")))(model, batch)[1]
    fault = first_fault(flags)
    assert fault is not None
    probed = watch(loss, names=("model", "batch"), probe=fault.site)
    return describe(
        fault,
        statistics(jax.jit(probed)(model, batch)[1], fault),
        device={"data": 2, "model": 1},
        num_devices=4,
        microbatch=3,
        rows=RowBlame((1, 2), ((5, 6),), 9, False),
        others=tuple(all_faults(flags)),
    )


def test_fields_name_the_fault(explanation):
    assert (explanation.kind, explanation.primitive) == ("index", "gather")
    assert explanation.file == __file__
    assert explanation.function == "loss"
    assert explanation.code == 'h = jnp.take(model["table"], batch["tokens"], axis=0)'
    assert explanation.line == loss.__code__.co_firstlineno + 1
    assert explanation.leaves == ("model.table", "batch.tokens")


EXPECTED = [
    "An index out of bounds is of `gather` (model.table, batch.tokens), in the forward pass",
    'h = jnp.take(model["table"], batch["tokens"], axis=0)',
    "on device data=2, model=1, and 3 more",
    "in microbatch 3",
    "2 indices out of bounds, -4 to 7, where 0 to 4 are allowed",
    "rows of the global batch to blame: 1, 2",
    "rows that fail only together: 5, 6",
    "(the search stopped after 9 trials)",
    "in 0 model.table",
]


@pytest.mark.parametrize("text", EXPECTED)
def test_text_holds(explanation, text):
    assert text in str(explanation)


def test_text_without_what_is_unknown_is_short():
    text = str(Explanation("nan", "log", "backward"))
    assert text == "The first NaN is of `log`, in the backward pass"


def test_loops_are_named():
    text = str(Explanation("nan", "log", "forward", loops=(("scan", 3), ("while", 0))))
    assert "step 3 of the scan around it\n  step 0 of the while around it" in text


def test_render_makes_a_table_with_rich(explanation, capsys):
    console = pytest.importorskip("rich.console")
    render(explanation)
    assert "gather" in capsys.readouterr().out
    out = io.StringIO()
    console.Console(file=out, width=150).print(explanation)
    assert "\u2503" in out.getvalue() and "model.table" in out.getvalue()
    # What a user named with brackets is no markup.
    assert 'model["table"]' in out.getvalue()


def test_render_does_without_rich(explanation, capsys, monkeypatch):
    for name in ("rich", "rich.console"):
        monkeypatch.setitem(sys.modules, name, None)  # what cannot be imported
    render(explanation)
    assert capsys.readouterr().out == f"{explanation}\n"
