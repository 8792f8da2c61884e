"""The OpenAPI document is true: calls made from it, sound and unsound, are answered as it says."""

import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import requests
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.rest.callers import Caller
from tests.rest.test_exchanges import PERMISSIONS
from tests.sql.conftest import World
from tests.web.site import Site


def aimed(case: Any, is_known: bool) -> None:
    """Use existing names, and never wait long."""
    names = {"ns": "default", "queue": "orders", "topic": "ROOM", "name": "x1"}
    if is_known:
        for name in set(names) & set(case.path_parameters or {}):
            case.path_parameters[name] = names[name]
        if isinstance(case.query, dict):
            case.query.pop("ident", None)
    if isinstance(case.query, dict) and "to" in case.query:
        with suppress(TypeError, ValueError):
            if 0 < float(case.query["to"]) <= 3600:
                case.query["to"] = 0.01


@pytest.mark.timeout(400)
# The larger one has a thousand calls.
@pytest.mark.parametrize("examples", [2, pytest.param(25, marks=pytest.mark.nightly)])
def test_documented_answers(site: Site, caller: Callable[..., Caller], rest: World, examples: int):
    import schemathesis  # takes a second, also where these tests do not run
    from schemathesis.specs.openapi import checks

    conformance = [
        checks.status_code_conformance, checks.content_type_conformance,
        checks.response_schema_conformance,
    ]  # fmt: skip
    staff = caller("stella", "worker", is_staff=True, permissions=PERMISSIONS)
    seen: set[int] = set()

    def tried(case: Any, is_known: bool) -> None:
        aimed(case, is_known)
        # No client can send these.
        with suppress(requests.exceptions.InvalidHeader, UnicodeEncodeError):
            response = case.call(base_url=staff.site.url, headers=staff.headers, timeout=60)
            seen.add(response.status_code)
            # 504: nothing came in time. 405: the path became that of another operation.
            assert response.status_code < 500 or response.status_code == 504
            if response.status_code != 405:
                case.validate_response(response, checks=conformance)

    repeatably = settings(
        max_examples=examples, deadline=None, derandomize=True, database=None,
        phases=[Phase.generate], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    document = schemathesis.openapi.from_url(f"{site.url}/api/openapi.json")
    operations = [each.ok() for each in document.get_all_operations()]
    assert len(operations) == 27
    for operation in operations:
        address = site.url + re.sub(r"\{\w+\}", "1", operation.path)
        assert requests.request(operation.method, address, timeout=30).status_code == 401
        for mode in schemathesis.GenerationMode:
            with suppress(schemathesis.errors.InvalidSchema):
                cases = operation.as_strategy(generation_mode=mode)
                repeatably(given(cases, st.booleans())(tried))()
    assert seen >= {200, 400, 403, 404}
