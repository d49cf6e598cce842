"""Which cases `make test` takes."""

import jax
import pytest

import conftest


class Case:
    """As much of a collected test as matters."""

    def __init__(self, nodeid, *marks):
        self.nodeid, self.marks = nodeid, [*marks]

    def get_closest_marker(self, name):
        return name if name in self.marks else None

    def add_marker(self, mark):
        self.marks.append(mark.name)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_the_first_and_the_last_case_of_each_test_are_taken(n):
    cases = [Case(f"tests/test_a.py::test_b[{i}]") for i in range(n)]
    passed_over = [Case("tests/test_a.py::test_b[slow]", "slow")]
    if jax.default_backend() != "gpu":
        passed_over.append(Case("tests/test_a.py::test_b[gpu]", "gpu"))
    others = [Case("tests/test_a.py::test_c"), Case("tests/test_b.py::test_b[0]")]
    conftest.pytest_collection_modifyitems([*cases, *passed_over, *others])
    left = [case.nodeid for case in (*cases, *others) if "further" not in case.marks]
    ends = dict.fromkeys([cases[0].nodeid, cases[-1].nodeid])
    assert left == [*ends, *(case.nodeid for case in others)]
