"""The faults of `make mutants` fit the repository: it takes minutes to put them in, and a moment to see that they can be."""

import pytest

from tests.mutants.fault import Fault, guarantees, text_of
from tests.mutants.faults import TWENTY
from tests.mutants.others import OTHERS

FAULTS = (*TWENTY, *OTHERS)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_applies_and_names_tests_that_exist(fault: Fault) -> None:
    assert fault.applied()
    assert fault.tests
    for node in fault.tests:
        file, function = text_of(node)
        assert f"def {function or 'test_'}" in file.read_text(), node


def test_every_guarantee_has_a_fault() -> None:
    rows = guarantees()
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert {fault.row(rows) for fault in FAULTS} == {*rows}
    assert len({fault.row(rows) for fault in TWENTY}) == len(TWENTY) == 20
