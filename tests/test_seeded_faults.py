"""The list of seeded faults is not stale: each can still be put in its place."""

import ast
import re

import pytest

from tests.fault_list import FAULTS
from tests.faults import ROOT, StaleFaultError, seeded


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_changes_code_that_is_there(fault):
    changed = seeded(fault, ROOT / "eqtrain")
    assert fault.new in changed
    ast.parse(changed)


def test_faults_are_many_over_all_rooms_and_have_names_of_their_own():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 150
    assert len({fault.file.split("/")[0] for fault in FAULTS}) >= 14


def test_the_tests_of_a_fault_are_there():
    for fault in FAULTS:
        for argument in fault.tests:
            file, _, name = argument.partition("::")
            if not file.endswith(".py"):
                continue  # an option, or what -k looks for
            text = (ROOT / "tests" / file).read_text(encoding="utf-8")
            assert not name or re.search(rf"def {name.split('[')[0]}\(", text), argument


def test_fault_that_is_no_longer_in_its_file_is_found():
    stale = FAULTS[0].__class__("stale", "Nothing.", "rows.py", "not there", "nor this", ())
    with pytest.raises(StaleFaultError, match="'stale', whose text is 0 times in rows.py"):
        seeded(stale, ROOT / "eqtrain")
