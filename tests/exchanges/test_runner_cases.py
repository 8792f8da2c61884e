"""The loop: what becomes of elements, by the cases that hold for any runner."""

from collections.abc import Callable

import pytest

from tests.exchanges.cases import CASES
from tests.exchanges.field import Field

pytestmark = pytest.mark.usefixtures("committing")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_it_holds(field: Field, case: Callable[[Field, Callable[[], None]], None]) -> None:
    case(field, field.run_until_idle)
