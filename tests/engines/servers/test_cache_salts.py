"""Cache salts: what they name, what becomes of a caller's own, and that both ways to a server have them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from google.protobuf.struct_pb2 import Struct
from passed_answers import answered
from rlctl_servers.adapters.lora_table import Held, LoraTable
from rlctl_servers.data_port.passing import Passing
from rlctl_servers.requests.cache_salts import salt_of, with_own
from rlctl_servers.requests.requests import Requests
from rlctl_servers.updates.version_labels import Stamps
from rlctl_sglang.requests import passing as sglang
from rlctl_sglang.requests.bodies import Limits as SGLangLimits
from rlctl_sglang.requests.requests import Native
from rlctl_vllm.requests import passing as vllm
from rlctl_vllm.requests.bodies import MOST_SALT
from rlctl_vllm.requests.bodies import Limits as VLLMLimits
from rlctl_vllm.requests.requests import TokensInOut

from rlctl.engine import HttpRequest
from rlctl.runtime.http_client import Response
from rlctl.v1.common_pb2 import WeightVersion
from rlctl.v1.rollout_pb2 import GenerateRequest, SamplingParams, TokenIds
from rlctl.v1.verbs_pb2 import Adapter

ONE, TWO = WeightVersion(label="x", sequence=1), WeightVersion(label="x", sequence=2)
SALT = salt_of(ONE)


def test_a_salt_names_label_sequence_and_adapter() -> None:
    adapters = ["", "policy@1#1", "policy@1#2"]
    versions = [ONE, TWO, WeightVersion(label="x/1@", sequence=1), WeightVersion(label="x1", sequence=1)]
    salts = {salt_of(version, adapter) for version in versions for adapter in adapters}
    assert len(salts) == 12
    assert all(salt.isalnum() and len(salt) == 32 for salt in salts), "vLLM takes neither @ nor /, and 128 characters"
    assert salt_of(WeightVersion(label="x", sequence=1)) == SALT


@pytest.mark.parametrize(
    ("own", "most", "value"),
    [
        (None, 128, SALT),
        ("mine", 128, f"{SALT}.mine"),
        ("m" * 95, 128, f"{SALT}.{'m' * 95}"),
        ("a@b", 128, f"{SALT}.a@b"),
        # Refused by vLLM, so they are not made into values that it takes.
        ("", 128, ""),
        ("m" * 129, 128, "m" * 129),
        (7, 128, 7),
        # SGLang takes a value for each prompt, and an empty one for none.
        ("", None, SALT),
        (["a", "", 7], None, [f"{SALT}.a", SALT, 7]),
    ],
)
def test_a_salt_of_the_callers_stays_part_of_the_value(own: object, most: int | None, value: object) -> None:
    assert with_own(SALT, own, most) == value


def test_a_salt_that_has_no_room_beside_rlctls_is_digested() -> None:
    made = {str(with_own(SALT, letter * 128, MOST_SALT)) for letter in "ab"}
    assert len(made) == 2
    assert all(value.startswith(f"{SALT}.") and len(value) <= MOST_SALT for value in made)


class Echo:
    """A server that notes bodies. The data port's get their body as the answer."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    async def forward(self, method: str, target: str, headers: Any, body: bytes) -> Response:
        del method, target, headers
        return answered(body, "text/plain")

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        self.sent.append({"path": path, **body})
        yield {}


class World:
    """A server at version one with one adapter, and what sends requests to it."""

    def __init__(self, product: str) -> None:
        self.http: Any = Echo()
        self.table, self.stamps = LoraTable(), Stamps("default")
        self.table.put(Held("policy@2#1", Adapter(name="policy", version="2"), 1, 1))
        self.stamps.bind(ONE)
        self.dialect: Any
        reader: Any
        if product == "vllm":
            limits = VLLMLimits(100, 512, 500)
            self.dialect = TokensInOut(self.http, limits, self.stamps, self.table)
            reader = vllm.Reader(limits, "base", lambda: (), self.table)
        else:
            sglang_limits = SGLangLimits(100, 512, 500)
            always: Any = lambda *_: None  # noqa: E731
            self.dialect = Native(
                self.http,
                sglang_limits,
                self.stamps,
                self.table,
                incremental=True,
                stopped=lambda: False,
                admit=always,
                admit_passed=always,
            )
            reader = sglang.Reader(sglang_limits, "base")
        self._port = Passing(self.http, reader, Requests(self.dialect), self.stamps, self.table)

    def update(self) -> None:
        self.stamps.bind(TWO, Stamps.of(TWO))
        self.stamps.label = Stamps.of(TWO)

    def read(self, path: str, **document: Any) -> Any:
        return self._port.read(HttpRequest("POST", path, (), json.dumps(document).encode(), document))

    async def passed(self, path: str, **document: Any) -> dict[str, Any]:
        """The body that the server gets for one of the data port."""
        return await sent(self.read(path, **document))

    async def generated(self, **fields: Any) -> dict[str, Any]:
        """The body that the server gets for one of a rollout."""
        request = GenerateRequest(input_ids=TokenIds(ids=[1]), sampling_params=SamplingParams(), **fields)
        (reading,) = await self.dialect.begin(request, ["r"])
        async for _ in reading.events():
            pass
        return dict(self.http.sent[-1])


async def whole(exchange: Any) -> bytes:
    with contextlib.closing(exchange):
        body: bytes = (await exchange.begin()).body
        return body


async def sent(exchange: Any) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(await whole(exchange))
    return body


FIELDS = {"vllm": "cache_salt", "sglang": "extra_key"}
ROUTES = {"vllm": "/v1/completions", "sglang": "/generate"}


@pytest.mark.parametrize("product", FIELDS)
async def test_both_ways_to_a_server_have_the_salt_of_version_and_adapter(product: str) -> None:
    world, field, path = World(product), FIELDS[product], ROUTES[product]
    with_adapter = {"model": "policy"} if product == "vllm" else {"lora_path": "policy"}
    salt = salt_of(ONE, "policy@2#1")
    assert (await world.passed(path, prompt="1"))[field] == SALT
    assert (await world.passed(path, prompt="1", **with_adapter))[field] == salt
    assert (await world.passed(path, prompt="1", **{field: "mine"}))[field] == f"{SALT}.mine"
    assert (await world.generated())[field] == SALT
    assert (await world.generated(adapter="policy"))[field] == salt
    own = Struct()
    own.update({field: "mine"})
    assert (await world.generated(engine_fields=own))[field] == f"{SALT}.mine"


@pytest.mark.parametrize("product", FIELDS)
async def test_a_request_that_waits_through_an_update_has_the_new_salt(product: str) -> None:
    world, field = World(product), FIELDS[product]
    exchange = world.read(ROUTES[product], prompt="1")
    request = GenerateRequest(input_ids=TokenIds(ids=[1]), sampling_params=SamplingParams())
    (reading,) = await world.dialect.begin(request, ["r"])
    world.update()
    assert (await sent(exchange))[field] == salt_of(TWO)
    async for _ in reading.events():
        pass
    assert world.http.sent[-1][field] == salt_of(TWO)


@pytest.mark.parametrize("product", FIELDS)
async def test_the_rest_of_a_body_stays_byte_for_byte(product: str) -> None:
    world = World(product)
    body = b'{ "prompt":"\\u0031" ,"temperature":1.00}  '
    exchange = world._port.read(HttpRequest("POST", ROUTES[product], (), body, json.loads(body)))
    assert (await whole(exchange)).startswith(body.rstrip()[:-1])


async def test_routes_that_take_no_salt_get_none() -> None:
    """What these servers' routes take in 0.32.0 and 0.5.23."""
    unsalted = {"vllm": {"/v2/embed"}, "sglang": set(sglang._GATED) - set(sglang._SALTED)}
    gated = {"vllm": vllm._GATED, "sglang": sglang._GATED}
    for product, field in FIELDS.items():
        world = World(product)
        bodies = await asyncio.gather(*(world.passed(path, prompt="1") for path in gated[product]))
        without = {path for path, body in zip(gated[product], bodies, strict=True) if field not in body}
        assert without == unsalted[product]
