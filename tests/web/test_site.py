"""The site under test itself: who is logged in, what is in the log."""

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from tests.web.site import Site


def test_a_user_is_logged_in_by_the_cookie(site: Site) -> None:
    site.user("admin", is_staff=True, is_superuser=True)
    status, page = site.get("/admin/", cookie=site.login("admin"))
    assert status == 200
    assert "Site administration" in page


def test_a_path_that_leads_nowhere_is_refused_without_a_word_in_the_log(site: Site) -> None:
    with pytest.raises(InvalidStatus) as refused:
        connect(f"{site.ws_url}/ws/nowhere/", origin=site.url)
    assert refused.value.response.status_code == 403
    assert site.faults() == []


def test_the_site_returns_at_its_address(site: Site) -> None:
    before = site.url
    site.restart()
    assert site.url == before
    assert site.get("/there-is-nothing/")[0] == 404
