"""The page of a coordinator: content, access, headers, bounds, and how a browser shows it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from chromium import chromium
from updating import Held

from rlctl.cli.render import timeline
from rlctl.cli.web import content, server
from rlctl.cli.web.server import WebServer
from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.scopes import Grant
from rlctl.testing.in_process_fleet import InProcessFleet
from rlctl.transport import access_file
from rlctl.transport.access_file import Entry, TokenHash, hash_of
from rlctl.transport.tls.authority import Authority
from rlctl.transport.tls.credentials import Tls
from rlctl.v1.coordinator_pb2 import GetOperationRequest, ListAuditRecordsRequest, SetStageEnabledRequest
from rlctl.v1.verbs_pb2 import PauseGenerationRequest, UpdateWeightsFromDiskRequest

TOKEN = "the fleet's own token"
MARKUP = "<img src=https://elsewhere.example/x onerror=document.title='taken'>"


@contextlib.asynccontextmanager
async def page_of(fleet: InProcessFleet) -> AsyncIterator[str]:
    web = WebServer(fleet.server)
    url = await web.start("127.0.0.1:0")
    try:
        yield url
    finally:
        await web.stop()


@contextlib.asynccontextmanager
async def busy(
    make_fleet: Callable, checkpoint: Callable[[str], str], **settings: Any
) -> AsyncIterator[InProcessFleet]:
    """Stage a, disabled with a reason that is markup, and stage b: an update has ended, a pause is running."""
    async with make_fleet(a=1, b=2, heal=False, **settings) as fleet:
        token = (("authorization", f"Bearer {fleet.token}"),) if fleet.token else ()
        update = UpdateWeightsFromDiskRequest(model_path=checkpoint("other"), weight_version="step-1")
        await fleet.stub.UpdateWeightsFromDisk(update, metadata=token)
        await fleet.stub.SetStageEnabled(SetStageEnabledRequest(slots=["a"], reason=MARKUP), metadata=token)
        held = Held(fleet, "pause_generation")
        pausing = asyncio.ensure_future(fleet.stub.PauseGeneration(PauseGenerationRequest(), metadata=token))
        await asyncio.wait_for(held.begun.wait(), 5)
        try:
            yield fleet
        finally:
            held.may_end.set()
            await pausing


async def get(url: str, **headers: str) -> tuple[int, Any, str]:
    """Status, headers, text."""
    async with aiohttp.ClientSession() as http, http.get(url, headers=headers) as answer:
        return answer.status, answer.headers, await answer.text()


def basic(password: str, user: str = "me") -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def rows(state: dict[str, Any], name: str) -> list[dict[str, str]]:
    (table,) = [table for table in state["tables"] if table["name"] == name]
    return [dict(zip(table["headers"], row, strict=True)) for row in table["rows"]]


async def test_the_state_has_fleet_operations_and_timelines(
    make_fleet: Callable, checkpoint: Callable[[str], str]
) -> None:
    async with busy(make_fleet, checkpoint) as fleet, page_of(fleet) as url, aiohttp.ClientSession() as http:
        async with http.get(f"{url}api/state") as answer:
            state = await answer.json()
        async with http.get(f"{url}operations/{rows(state, 'history')[0]['OPERATION']}") as answer:
            drawn, policy = await answer.text(), answer.headers["Content-Security-Policy"]
    assert state["title"].endswith("of 2 stages routable")
    assert fleet.server.address in state["about"]
    a, b = rows(state, "stages")
    assert (a["SLOT"], a["VERSION"], a["SEQ"], a["ROUTABLE"]) == ("a", "step-1", "2", "no")
    assert f"disabled: {MARKUP}" in a["WHY NOT"], "the page shows it as text"
    assert b["SLOT"] == "b"
    assert rows(state, "models")[0]["VERSION"] == "step-1"
    (running,) = rows(state, "running")
    assert (running["VERB"], running["PROGRESS"].partition("/")[2]) == ("PauseGeneration", "2")
    (ended,) = rows(state, "history")
    assert (ended["VERB"], ended["STATE"], ended["CONFIRMED"]) == ("UpdateWeightsFromDisk", "OK", "2/2")
    assert 'class="name">transfer</span>' in drawn
    assert "script-src" not in policy
    assert policy.startswith("default-src 'none'")


async def test_only_the_pages_own_script_and_style_may_run(make_fleet: Callable) -> None:
    async with make_fleet(a=1) as fleet, page_of(fleet) as url:
        status, headers, text = await get(url)
        missing, of_missing, _ = await get(f"{url}operations/none")
        async with aiohttp.ClientSession() as http, http.post(f"{url}api/state") as answer:
            assert answer.status == 405
        assert (await get(f"{url}elsewhere"))[0] == 404
    assert (status, missing) == (200, 404)
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
    assert "unsafe" not in policy
    assert "://" not in policy + text
    assert "innerHTML" not in text
    for answered in (headers, of_missing):
        assert answered["Cache-Control"] == "no-store"
        assert answered["X-Content-Type-Options"] == "nosniff"
        assert "Content-Security-Policy" in answered


async def test_a_reader_needs_a_token_where_the_fleet_has_tokens(make_fleet: Callable, tmp_path: Path) -> None:
    principals = {
        name: Entry(name, (Grant.parse("viewer"),), (TokenHash(hash_of(name), 0.0, expires),), ())
        for name, expires in (("watcher", None), ("former", 1.0))
    }
    access_file.write(tmp_path / "access.json", principals)
    async with (
        make_fleet(a=1, token=TOKEN, access_file=str(tmp_path / "access.json")) as fleet,
        page_of(fleet) as url,
    ):
        for path in ("", "api/state", "operations/x", "elsewhere"):
            status, headers, _ = await get(url + path)
            assert (status, headers["WWW-Authenticate"].partition(" ")[0]) == (401, "Basic")
        assert fleet.server.denials._open == {}, "every browser begins without a token"
        for allowed in (basic(TOKEN), basic("watcher"), basic("watcher", ""), "Bearer watcher"):
            assert (await get(f"{url}api/state", Authorization=allowed))[0] == 200
        assert (await get(f"{url}operations/x", Authorization=basic("wrong")))[0] == 401
        for wrong in (basic("wrong"), basic("former"), "Basic ???", f"Basic {TOKEN}", "Bearer ", "Digest x"):
            assert (await get(f"{url}api/state", Authorization=wrong))[0] == 401, wrong
        await asyncio.gather(*fleet.server._recording)
        records = await fleet.server.coordinator.list_audit_records(ListAuditRecordsRequest())
        denied = {(each.method, each.reason) for each in records.records if each.method.startswith("GET")}
        assert denied == {("GET /operations/{id}", "TOKEN_INVALID")}, "no path of a caller; the others are counted"


async def test_a_foreign_name_does_not_reach_the_page_of_a_fleet_without_tokens(make_fleet: Callable) -> None:
    async with make_fleet(a=1) as fleet, page_of(fleet) as url:
        for own in ("127.0.0.1", "localhost:5090", "[::1]:5090", "192.0.2.7:80"):
            assert (await get(f"{url}api/state", Host=own))[0] == 200, own
        for foreign in ("elsewhere.example", "elsewhere.example:5090", "127.0.0.1.elsewhere.example", ""):
            assert (await get(f"{url}api/state", Host=foreign))[0] == 403, foreign


async def test_other_hosts_reach_the_page_over_tls_only(make_fleet: Callable) -> None:
    async with make_fleet(a=1, token=TOKEN) as fleet:
        with pytest.raises(RlctlError) as refused:
            await WebServer(fleet.server).start("0.0.0.0:0")
    assert refused.value.reason is Reason.INSECURE_BIND
    assert "--tls-cert" in refused.value.next_step


async def test_with_tls_a_certificate_of_the_fleet_or_a_token_admits(make_fleet: Callable, tmp_path: Path) -> None:
    authority = Authority.init(tmp_path / "tls", "lab")

    def context(path: str) -> ssl.SSLContext:
        made = Tls(authority.ensured(path)).client_context() if path else ssl.create_default_context()
        made.load_verify_locations(tmp_path / "tls" / "ca.crt")
        made.check_hostname = False
        return made

    async def status(url: str, path: str, **headers: str) -> int:
        async with aiohttp.ClientSession() as http, http.get(url, ssl=context(path), headers=headers) as answer:
            return answer.status

    async with make_fleet(a=1, authority=authority) as fleet, page_of(fleet) as url:
        assert url.startswith("https://127.0.0.1:")
        assert await status(url, "client/alice") == 200
        assert await status(url, "stage/a") == 403
        with pytest.raises(aiohttp.ClientError):
            await status(url, "")
    async with make_fleet(a=1, authority=authority, token=TOKEN) as fleet, page_of(fleet) as url:
        assert await status(url, "", Authorization=basic(TOKEN)) == 200
        assert await status(url, "") == 401


async def test_answers_and_connections_are_bounded(
    make_fleet: Callable, checkpoint: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content, "MOST_STAGES", 1)
    monkeypatch.setattr(content, "MOST_CHARACTERS", 36)
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 1)
    made = []

    async def counted(self: content.Content) -> dict[str, Any]:
        made.append(self)
        return await real(self)

    real = content.Content.state
    monkeypatch.setattr(content.Content, "state", counted)
    async with busy(make_fleet, checkpoint) as fleet, page_of(fleet) as url, aiohttp.ClientSession() as http:
        for _ in range(3):
            async with http.get(f"{url}api/state") as answer:
                state = await answer.json()
        assert (await get(url))[0] == 503, "the first connection is still open"
        update = rows(state, "history")[0]["OPERATION"]
        operation = await fleet.server.coordinator.get_operation(GetOperationRequest(operation_id=update))
    assert len(made) == 1, "one state for all readers of a second"
    assert [table["title"] for table in state["tables"]][2] == "Stages (1 of 2; rlctl status lists all)"
    assert [each["SLOT"] for each in rows(state, "stages")] == ["a"], "stages that are not routable come first"
    assert max(len(cell) for table in state["tables"] for row in table["rows"] for cell in row) <= 36
    assert len(timeline.page(operation, 1)) < len(timeline.page(operation))
    assert "1 more: rlctl describe operation ID" in timeline.page(operation, 1)


async def test_a_browser_shows_the_fleet_on_a_phone_and_on_a_desk(
    make_fleet: Callable, checkpoint: Callable[[str], str], tmp_path: Path
) -> None:
    directory = tmp_path / "browser"
    directory.mkdir()
    async with (
        chromium(directory) as page,
        busy(make_fleet, checkpoint, token=TOKEN) as fleet,
        page_of(fleet) as url,
    ):
        address = url.removeprefix("http://")
        for width, layout in ((1280, "table-row"), (390, "flex")):
            signed_in = f"http://me:{TOKEN.replace(' ', '%20')}@{address}"
            await page.open(signed_in, width, "document.querySelector('#history tbody')")
            assert await page.value("document.title") == "rlctl: 0 of 2 stages routable"
            assert await page.value("[...document.querySelectorAll('h2')].map(h => h.textContent)") == [
                "Running operations",
                "Models",
                "Stages",
                "History",
            ]
            assert MARKUP in await page.value("document.querySelector('#stages tbody tr').textContent")
            assert await page.value("document.querySelectorAll('img').length") == 0
            assert await page.value("document.querySelector('#running progress').max") == 2
            assert await page.value("document.documentElement.scrollWidth <= innerWidth"), "nothing is cut at the side"
            assert await page.value("getComputedStyle(document.querySelector('#stages tbody tr')).display") == layout
            hidden = await page.value("getComputedStyle(document.querySelector('#stages thead')).display") == "none"
            assert hidden == (width == 390)
        await page.open(
            await page.value("document.querySelector('#history a').href"), 390, "document.querySelector('dl')"
        )
        assert await page.value("document.querySelectorAll('.track').length > 5")
        assert await page.value("document.documentElement.scrollWidth <= innerWidth")
        assert {each for each in page.urls if address not in each} <= {"about:blank", "data:,"}
    assert not page.complaints
