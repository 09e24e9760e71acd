"""Runs what docs/guard.md shows, as it stands there."""

from tests.pages import blocks_of, run


def test_what_the_page_shows_is_what_comes_out(capsys):
    blocks = blocks_of("guard.md")
    assert len(blocks) == 3
    names = run("guard.md", blocks)
    assert float(names["metrics"]["skipped"]) == 1
    assert names["trip"].causes == ("loss", "check")
    [failure] = names["trip"].failures
    assert failure.example == 13 and failure.message.startswith("z is 300.0")
    out = capsys.readouterr().out
    assert "step 1: the loss was nan; a check failed\n" in out
    assert "The first NaN is of `log` (batch.z), in the forward pass" in out
    assert "rows of the global batch to blame: 5\n" in out
