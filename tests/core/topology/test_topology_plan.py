"""Engines, ranks, GPUs and offsets; what changes against a fleet that runs; slime's examples as it states them."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping

import pytest
from test_topology_resolve import HF, REGULAR, flagged, good, load, model

from rlctl.engine import KnownOptions
from rlctl.launch.interface.spec import EngineSpec
from rlctl.topology.diff import Change, difference
from rlctl.topology.flags import Flags
from rlctl.topology.json_schema import schema
from rlctl.topology.plan import Plan, plan
from rlctl.topology.schema import FILE, GROUP, MODEL
from rlctl.topology.support import missing, unsupported


def planned(text: str, flags: Flags = HF, *, gpus: int = 0, running: dict[str, EngineSpec] | None = None) -> Plan:
    return plan(good(text, flags), gpus=gpus, running=running)


def of(num_gpus: int, per_engine: int, more: str = "") -> str:
    """A regular group."""
    more = f", {more}" if more else ""
    return f"- {{worker_type: regular, num_gpus: {num_gpus}, num_gpus_per_engine: {per_engine}{more}}}"


def shape(made: Plan) -> dict[str, tuple[str, int, tuple[int, ...]]]:
    return {e.spec.slot: (e.spec.worker_type, e.spec.tp_size, e.spec.gpus) for e in made.engines}


# The examples of slime's page on --sglang-config.

BASIC = """\
sglang:
  - name: default
    server_groups:
      - worker_type: regular
        num_gpus: 8
"""
PD_PAGE = """\
sglang:
  - name: actor
    server_groups:
      - worker_type: prefill
        num_gpus: 4
        num_gpus_per_engine: 2    # 2 prefill engines, TP=2
      - worker_type: decode
        num_gpus: 12
        num_gpus_per_engine: 4    # 3 decode engines, TP=4
"""
MULTI = """\
sglang:
  - name: actor
    update_weights: true              # receives weight updates from training
    server_groups:
      - worker_type: regular
        num_gpus: 8
        num_gpus_per_engine: 4

  - name: ref
    model_path: /path/to/ref_model    # different model checkpoint
    update_weights: false              # frozen, no weight updates
    server_groups:
      - worker_type: regular
        num_gpus: 4
        num_gpus_per_engine: 2

  - name: reward
    model_path: /path/to/reward_model
    update_weights: false
    server_groups:
      - worker_type: regular
        num_gpus: 4
        num_gpus_per_engine: 2
"""
PD_AND_REF = """\
sglang:
  - name: actor
    update_weights: true
    server_groups:
      - worker_type: prefill
        num_gpus: 4
        num_gpus_per_engine: 2
      - worker_type: decode
        num_gpus: 8
        num_gpus_per_engine: 4

  - name: ref
    model_path: /path/to/ref_model
    update_weights: false
    server_groups:
      - worker_type: regular
        num_gpus: 4
        num_gpus_per_engine: 2
"""
KEPT_FREE = """\
sglang:
  - name: actor
    server_groups:
      - worker_type: regular
        num_gpus: 6
        num_gpus_per_engine: 2
      - worker_type: placeholder
        num_gpus: 2                   # reserve 2 GPUs (no engines created)
"""
OVERRIDDEN = """\
sglang:
  - name: actor
    server_groups:
      - worker_type: regular
        num_gpus: 8
        num_gpus_per_engine: 4
        overrides:
          mem_fraction_static: 0.85
          context_length: 32768
          chunked_prefill_size: 4096
          enable_torch_compile: true
"""
AGENT = """\
sglang:
  - name: actor
    update_weights: true
    server_groups:
      - worker_type: prefill
        num_gpus: 4
        num_gpus_per_engine: 2
        overrides:
          chunked_prefill_size: 8192
      - worker_type: decode
        num_gpus: 12
        num_gpus_per_engine: 4
        overrides:
          mem_fraction_static: 0.88

  - name: ref
    model_path: /data/models/Qwen3-32B
    update_weights: false
    server_groups:
      - worker_type: regular
        num_gpus: 8
        num_gpus_per_engine: 4

  - name: reward
    model_path: /data/models/reward-model
    update_weights: false
    server_groups:
      - worker_type: regular
        num_gpus: 8
        num_gpus_per_engine: 4
"""
PD_TP = """
- {worker_type: prefill, num_gpus: 4, num_gpus_per_engine: 2}
- {worker_type: decode, num_gpus: 12, num_gpus_per_engine: 4}
"""


@pytest.mark.parametrize(
    ("text", "flags", "engines", "total"),
    [
        (BASIC, {"num_gpus_per_engine": 2}, {("default", "regular", 2): 4}, 8),
        (PD_PAGE, {}, {("actor", "prefill", 2): 2, ("actor", "decode", 4): 3}, 16),
        (
            MULTI,
            {},
            {("actor", "regular", 4): 2, ("ref", "regular", 2): 2, ("reward", "regular", 2): 2},
            16,
        ),
        (PD_AND_REF, {}, {("actor", "prefill", 2): 2, ("actor", "decode", 4): 2, ("ref", "regular", 2): 2}, 16),
        (KEPT_FREE, {}, {("actor", "regular", 2): 3}, 8),
        (OVERRIDDEN, {}, {("actor", "regular", 4): 2}, 8),
        (
            AGENT,
            {},
            {
                ("actor", "prefill", 2): 2, ("actor", "decode", 4): 3, ("ref", "regular", 4): 2,
                ("reward", "regular", 4): 2,
            },
            32,
        ),
    ],
)  # fmt: skip
def test_slimes_examples_have_the_engines_that_it_states(
    text: str, flags: dict[str, int], engines: dict[tuple[str, str, int], int], total: int
) -> None:
    """Word by word, with the sizes of their groups and the total that its commands name, and no other total."""
    made = planned(text, Flags(hf_checkpoint="/m", num_gpus=total, **flags))  # type: ignore[arg-type]
    assert Counter((e.spec.model, e.spec.worker_type, e.spec.tp_size) for e in made.engines) == engines
    for other in (total - 1, total + 1):
        _, problems = load(text, Flags(hf_checkpoint="/m", num_gpus=other, **flags))  # type: ignore[arg-type]
        (wrong,) = problems.errors
        assert wrong.key == "--rollout-num-gpus"
        assert f"the groups have {total} GPUs" in wrong.message


def test_the_arguments_of_slimes_examples_are_those_of_their_groups() -> None:
    (options, _) = (engine.spec.options for engine in planned(OVERRIDDEN).engines)
    assert options == {
        "mem_fraction_static": "0.85", "context_length": "32768", "chunked_prefill_size": "4096",
        "enable_torch_compile": "true",
    }  # fmt: skip
    made = planned(AGENT, Flags(hf_checkpoint="/m", num_gpus=32))
    by_slot = {engine.spec.slot: engine.spec for engine in made.engines}
    assert by_slot["actor-prefill-1"].options["chunked_prefill_size"] == "8192"
    assert by_slot["actor-decode-2"].options["mem_fraction_static"] == "0.88"
    assert not by_slot["ref-0"].options
    assert [(plan.name, plan.update_weights, plan.world_size) for plan in made.models] == [
        ("actor", True, 17), ("ref", False, 0), ("reward", False, 0)
    ]  # fmt: skip


def test_prefill_and_decode_have_slots_sizes_and_flags_of_their_own() -> None:
    made = planned(model(PD_TP))
    assert shape(made) == {
        "actor-prefill-0": ("prefill", 2, (0, 1)),
        "actor-prefill-1": ("prefill", 2, (2, 3)),
        "actor-decode-0": ("decode", 4, (4, 5, 6, 7)),
        "actor-decode-1": ("decode", 4, (8, 9, 10, 11)),
        "actor-decode-2": ("decode", 4, (12, 13, 14, 15)),
    }
    options = {engine.spec.slot: engine.spec.options for engine in made.engines}
    assert options["actor-prefill-1"] == {"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": "8999"}
    assert options["actor-decode-0"] == {"disaggregation_mode": "decode"}
    assert {rank.node for rank in made.engines[3].ranks} == {1}
    assert "--worker-type prefill" in made.engines[0].commands["actor-prefill-0"]


def test_every_prefill_server_of_sglang_has_a_bootstrap_port_of_its_own_and_keeps_it() -> None:
    """All of them are on one host, whatever group or model they are of."""

    def ports(made: Plan) -> dict[str, str]:
        taken = {e.spec.slot: e.spec.options for e in made.engines if e.spec.worker_type == "prefill"}
        return {slot: options["disaggregation_bootstrap_port"] for slot, options in taken.items()}

    def text(prefill: int, first: str = "") -> str:
        groups = (
            f"- {{worker_type: prefill, num_gpus: {prefill}{first}}}\n"
            "- {worker_type: prefill, num_gpus: 1, overrides: {disaggregation_bootstrap_port: 9000}}\n"
            "- {worker_type: decode, num_gpus: 1}"
        )
        return model(groups) + model(groups.replace(": 9000", ": 8998"), "name: b")[8:]

    before = planned(text(1))
    assert ports(before) == {
        "actor-prefill-0": "8998", "actor-prefill2-0": "9000", "b-prefill-0": "8999", "b-prefill2-0": "9001"
    }  # fmt: skip
    grown = planned(text(2), running=running(before))
    assert ports(grown) == {**ports(before), "actor-prefill-1": "9002", "b-prefill-1": "9003"}
    moved = planned(text(1, ", overrides: {disaggregation_bootstrap_port: 9500}"), running=running(grown))
    assert ports(moved) == {
        "actor-prefill-0": "9500", "actor-prefill2-0": "9000", "b-prefill-0": "9501", "b-prefill2-0": "9001"
    }  # fmt: skip


def test_a_plan_of_a_thousand_engines_is_made_in_time() -> None:
    """What is installed was looked up twice for every engine, which took minutes."""
    before = time.monotonic()
    assert len(planned(model(of(2000, 2))).engines) == 1000
    assert time.monotonic() - before < 15


def test_pairs_of_the_torch_engine_are_told_their_part_and_find_each_other_by_themselves() -> None:
    made = planned(model(PD_TP, "name: a\nengine: torch"))
    assert {engine.spec.slot: dict(engine.spec.options) for engine in made.engines} == {
        **{f"a-prefill-{index}": {"disaggregation_mode": "prefill"} for index in range(2)},
        **{f"a-decode-{index}": {"disaggregation_mode": "decode"} for index in range(3)},
    }
    assert unsupported(made.topology) == []


def test_frozen_models_get_no_offsets() -> None:
    made = planned(MULTI)
    assert [(e.spec.slot, e.rank_offset) for e in made.engines] == [
        ("actor-0", 1),
        ("actor-1", 5),
        ("ref-0", None),
        ("ref-1", None),
        ("reward-0", None),
        ("reward-1", None),
    ]
    assert [(m.name, m.world_size) for m in made.models] == [("actor", 9), ("ref", 0), ("reward", 0)]
    assert "--frozen" in made.engines[2].commands["ref-0"]


def test_an_engine_larger_than_a_node_fills_whole_ones() -> None:
    made = planned(model(of(3, 1) + "\n" + of(16, 16)))
    assert [engine.spec.gpus[0] for engine in made.engines] == [0, 1, 2, 8]
    assert {rank.node for rank in made.engines[3].ranks} == {1, 2}
    assert made.nodes == 3


def test_a_server_larger_than_a_node_has_a_process_on_each_of_its_nodes() -> None:
    made = planned("fleet: {launcher: ray, num_gpus_per_node: 2, device: cuda}\n" + model(of(4, 4)))
    assert not unsupported(made.topology)
    (engine,) = made.engines
    assert (engine.spec.nodes, engine.spec.ranks_each, list(engine.spec.followers)) == (2, 2, [1])
    assert not engine.spec.restarts_itself, "its nodes are started together, by the launcher"
    assert "--rank 1" in engine.commands["actor-0.1"]
    assert "--device cuda:2" in engine.commands["actor-0.1"]
    assert "--follower '<actor-0.1>'" in engine.commands["actor-0"]
    here = planned("fleet: {num_gpus_per_node: 2, device: cpu}\n" + model(of(4, 4))).engines[0]
    assert (here.spec.nodes, here.spec.ranks_each) == (1, 4), "the local launcher has one node"


def test_no_engine_lies_over_the_end_of_a_node_and_the_gap_is_used() -> None:
    made = planned(model(of(9, 3) + "\n" + of(2, 1)))
    assert [engine.spec.gpus for engine in made.engines] == [(0, 1, 2), (3, 4, 5), (8, 9, 10), (6,), (7,)]


def test_placeholders_reserve_their_places() -> None:
    made = planned(model("- {worker_type: placeholder, num_gpus: 2}\n- {worker_type: regular, num_gpus: 1}"))
    assert made.reserved == {"actor-placeholder": ((0, 0), (0, 1))}
    assert made.engines[0].spec.gpus == (2,)


def test_a_placeholder_stays_where_it_is_whatever_grows_before_it() -> None:
    """Whoever trains there would have an engine on its GPUs."""
    kept_free = "- {worker_type: placeholder, num_gpus: 2}"
    before = planned(model(REGULAR.replace("4", "1") + kept_free))
    assert before.reserved == {"actor-placeholder": ((0, 1), (0, 2))}
    grown = plan(
        good(model(REGULAR.replace("4", "3") + kept_free.replace("2", "3"))), gpus=0, running=running(before),
        kept_free=before.placeholders,
    )  # fmt: skip
    assert [engine.spec.gpus for engine in grown.engines] == [(0,), (3,), (4,)]
    assert grown.reserved == {"actor-placeholder": ((0, 1), (0, 2), (0, 5))}
    without = plan(good(model(REGULAR)), gpus=0, running=running(grown), kept_free=grown.placeholders)
    assert [engine.spec.gpus for engine in without.engines] == [(0,), (3,), (4,), (1,)]


def test_bundles_that_are_too_few_for_the_plan_are_missing() -> None:
    ray = "fleet: {launcher: ray, ray: {placement_group: g, bundles: [0, 1, 2]}}\n"
    assert (
        "3 bundles may be used, and the plan has places for 4"
        in missing(planned(ray + model(REGULAR)), gpus=0, cores=1)[0].message
    )
    assert missing(planned(ray + model(REGULAR.replace("4", "3"))), gpus=0, cores=1) == []


def test_pipeline_ranks_follow_the_tensor_parallel_ones() -> None:
    made = planned(model(of(4, 4, "overrides: {pp_size: 2}")))
    (engine,) = made.engines
    assert [(rank.tp, rank.pp) for rank in engine.ranks] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert engine.spec.tp_size == 2
    assert "--tp-size 2" in engine.commands["actor-0"]


def test_external_engines_are_attached_and_take_no_gpus() -> None:
    topology, _ = flagged(external_addresses=["h:1", "h:2"], num_gpus_per_engine=2)
    made = plan(topology, gpus=0)
    assert [engine.spec.options["url"] for engine in made.engines] == ["http://h:1", "http://h:2"]
    assert all(engine.spec.attached and not engine.ranks for engine in made.engines)
    assert [engine.rank_offset for engine in made.engines] == [1, 3]


def test_the_device_is_that_of_the_machine_unless_it_is_said() -> None:
    assert planned(model(REGULAR)).engines[0].spec.device == "cpu"
    made = planned(model(REGULAR), gpus=4)
    assert "--device cuda:3" in made.engines[3].commands["actor-3"]
    assert planned(model(REGULAR + "  device: cpu"), gpus=4).engines[0].spec.device == "cpu"
    assert [problem.message for problem in missing(made, gpus=2, cores=1) if "GPUs" in problem.message] == [
        "it needs 4 GPUs, and this machine has 2"
    ]


def test_a_plan_is_the_same_every_time() -> None:
    for text in (BASIC, MULTI, model(PD_TP)):
        first, again = (json.dumps(planned(text).data) for _ in range(2))
        assert first == again


# Against a fleet that runs.


def running(made: Plan) -> dict[str, EngineSpec]:
    return {spec.slot: spec for spec in made.specs}


def actions(made: Plan, before: Plan) -> dict[str, str]:
    return {change.slot: change.action for change in difference(made.specs, running(before))}


def test_a_group_that_grows_moves_nobody() -> None:
    before = planned(model(REGULAR.replace("4", "1")) + model(REGULAR.replace("4", "1"), "name: ref")[8:])
    after = planned(
        model(REGULAR.replace("4", "3")) + model(REGULAR.replace("4", "1"), "name: ref")[8:], running=running(before)
    )
    assert actions(after, before) == {"actor-0": "unchanged", "actor-1": "add", "actor-2": "add", "ref-0": "unchanged"}
    places = {engine.spec.slot: engine.spec.gpus for engine in after.engines}
    assert places == {"actor-0": (0,), "ref-0": (1,), "actor-1": (2,), "actor-2": (3,)}
    assert actions(before, after) == {
        "actor-0": "unchanged",
        "ref-0": "unchanged",
        "actor-1": "remove",
        "actor-2": "remove",
    }


def test_a_change_says_what_differs() -> None:
    before = planned(model(REGULAR.replace("4", "1")))
    after = planned(model(REGULAR.replace("4", "1") + "  overrides: {context_length: 9}"))
    assert difference(after.specs, running(before)) == [Change("actor-0", "restart", ("options",))]
    after = planned(model("- {worker_type: regular, num_gpus: 2, num_gpus_per_engine: 2}"))
    assert difference(after.specs, running(before)) == [Change("actor-0", "restart", ("tp_size",))]


def test_another_group_renames_nobody() -> None:
    before = planned(model(REGULAR))
    after = planned(model("- {worker_type: placeholder, num_gpus: 1}\n" + REGULAR + REGULAR), running=running(before))
    assert set(actions(after, before).values()) == {"unchanged", "add"}
    assert [engine.spec.slot for engine in after.engines][4:] == [f"actor-regular2-{i}" for i in range(4)]


def test_a_spec_survives_the_way_to_the_supervisor() -> None:
    for engine in planned(MULTI).engines:
        assert EngineSpec.of(json.loads(json.dumps(engine.spec.data))) == engine.spec


# What this version cannot run.


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (model(PD_TP + "\n- {worker_type: encoder, num_gpus: 1}"), "encoder engines cannot be run yet"),
        (model(PD_TP, "name: a\nengine: fake"), "engine fake has no prefill engines"),
        (
            "fleet: {launcher: ray}\n" + model(PD_TP, "name: a\nengine: torch"),
            "prefill and decode engines meet on one host, and launcher ray puts engines on several",
        ),
        (model(of(4, 4, "stages: [{name: a, num_gpus: 1}, {name: b, num_gpus: 3}]")), "several pipeline stages"),
        (
            model(REGULAR, "name: a\ngateway: 127.0.0.1:1\nrouter_policy: cache_aware"),
            "the gateway has no policy 'cache_aware'; there are: consistent_hashing, round_robin",
        ),
        (
            model(
                REGULAR,
                "name: a\ngateway: 127.0.0.1:1\nrouter: {backend: sglang-router}\nrouter_policy: consistent_hashing",
            ),
            "sglang-router has no policy 'consistent_hashing'; there are: cache_aware, ",
        ),
    ],
)
def test_what_cannot_be_run_is_said_with_its_reason(text: str, words: str) -> None:
    assert any(words in problem.message for problem in unsupported(planned(text).topology))
    assert unsupported(planned(BASIC).topology) == []


def test_settings_that_rule_out_updates_are_refused_for_a_model_that_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def known_options(engine: str, given: Mapping[str, str]) -> KnownOptions:
        kept = {name: f"{name} keeps KV entries" for name in given if name == "mem_fraction_static"}
        return KnownOptions(frozenset(), frozen=kept)

    monkeypatch.setattr("rlctl.topology.support.known_options", known_options)
    group = "- {worker_type: regular, num_gpus: 1, overrides: {mem_fraction_static: 0.5}}"
    (problem,) = unsupported(planned(model(group)).topology)
    assert problem.message.startswith("mem_fraction_static keeps KV entries: it takes no updates")
    assert unsupported(planned(model(group, "name: a\nupdate_weights: false")).topology) == []
    assert unsupported(planned(model(REGULAR)).topology) == []


def test_a_plug_in_whose_servers_have_one_node_is_not_started_over_several(monkeypatch: pytest.MonkeyPatch) -> None:
    topology = planned("fleet: {launcher: ray, num_gpus_per_node: 2}\n" + model(of(4, 4))).topology
    assert unsupported(topology) == []
    monkeypatch.setattr("rlctl.topology.support.spans_nodes", lambda _: False)
    assert [problem.message for problem in unsupported(topology)] == [
        "engine sglang starts no server over several nodes"
    ]


def test_checkpoints_that_are_not_there_are_missing() -> None:
    assert [problem.message for problem in missing(planned(BASIC), gpus=0, cores=1)] == ["there is no directory /m"]


def test_a_gateway_is_told_where_its_models_tokenizer_lies() -> None:
    """The coordinator does not know once a version has come over a group."""
    (gateway,) = planned(model(REGULAR, "name: a\ngateway: 127.0.0.1:1")).gateways
    arguments = gateway.arguments("c")
    assert arguments[arguments.index("--tokenizer") + 1] == "/m"


def test_a_router_in_front_of_prefill_and_decode_engines_picks_pairs() -> None:
    routed = "name: a\ngateway: 127.0.0.1:1\nrouter: {backend: sglang-router}"
    for groups, flags in ((PD_TP, ["--router-pairs"]), (REGULAR, [])):
        made = planned(model(groups, routed))
        assert unsupported(made.topology) == []
        (gateway,) = made.gateways
        assert [flag for flag in gateway.arguments("c") if flag == "--router-pairs"] == flags


def test_a_router_that_is_not_installed_is_missing() -> None:
    made = planned(model(REGULAR, "name: a\ngateway: 127.0.0.1:1\nrouter: {backend: sglang-router}"))
    (wrong, _) = missing(made, gpus=0, cores=1, routers=())
    assert (wrong.key, wrong.message) == (
        "sglang[0].router.backend",
        "sglang-router is not installed here: pip install 'rlctl[router]'",
    )
    assert len(missing(made, gpus=0, cores=1)) == 1, "the checkpoint"


def test_cores_that_ranks_are_bound_to_must_be_there() -> None:
    made = planned(model(of(4, 2, "cpus_per_rank: 3"), "name: a\nengine: torch"))
    assert [problem.message for problem in missing(made, gpus=0, cores=8)][1:] == [
        "its ranks are bound to 12 cores, and this machine has 8"
    ]
    assert len(missing(made, gpus=0, cores=12)) == 1
    engine = made.engines[0].spec
    assert engine.cpus == 3
    assert planned(model(of(2, 2, "cpus_per_rank: 3"))).engines[0].spec.cpus == 6, "SGLang brings its ranks"


def test_the_json_schema_has_every_key() -> None:
    found = schema()
    models = found["properties"]["models"]["items"]
    assert found["properties"].keys() == {key.name for key in FILE}
    assert models["properties"].keys() == {key.name for key in MODEL} | {"engine_groups"}
    assert models["properties"]["server_groups"]["items"]["properties"].keys() == {key.name for key in GROUP}
    assert models["required"] == ["name"]
    json.dumps(found)


def test_the_limit_of_restarts_goes_to_engines_that_start_themselves_and_changes_none() -> None:
    text = """
fleet: {{restart: {{{limit}}}}}
models:
  - {{name: actor, model_path: /m/actor, engine: {engine}, server_groups: [{{worker_type: regular, num_gpus: 1}}]}}
"""
    limited = planned(text.format(limit="limit: 3, within_s: 90", engine="sglang"))
    (engine,) = limited.engines
    assert (engine.spec.restarts, engine.spec.restarts_within_s) == (3, 90)
    assert "--restarts 3 --restarts-within 90s" in engine.commands[engine.spec.slot]
    usual = planned(text.format(limit="", engine="sglang"))
    assert "--restarts" not in usual.engines[0].commands[engine.spec.slot]
    assert not usual.engines[0].spec.differs(engine.spec)
    (torch,) = planned(text.format(limit="limit: 3", engine="torch")).engines
    assert "--restarts" not in torch.commands[torch.spec.slot], "the launcher starts it again"


def test_a_fleet_with_metrics_starts_every_server_with_them() -> None:
    text = """
fleet: {{{metrics}gateways: 127.0.0.1}}
models:
  - {{name: actor, server_groups: [{{worker_type: regular, num_gpus: 2}}]}}
"""
    made = planned(text.format(metrics="metrics: true, "))
    assert [engine.spec.metrics for engine in made.engines] == [True, True]
    assert [gateway.metrics for gateway in made.gateways] == [True]
    assert all("--metrics 127.0.0.1:0" in engine.commands[engine.spec.slot] for engine in made.engines)
    usual = planned(text.format(metrics=""))
    assert not any(each.metrics for each in (*(engine.spec for engine in usual.engines), *usual.gateways))


def test_the_page_of_the_coordinator_has_an_address_of_its_own() -> None:
    text = """
fleet: {{{web}listen: "127.0.0.1:5080"}}
models:
  - {{name: actor, server_groups: [{{worker_type: regular, num_gpus: 1}}]}}
"""
    assert planned(text.format(web="")).topology.web == ""
    assert planned(text.format(web="web: 127.0.0.1:5090, ")).topology.web == "127.0.0.1:5090"
    flag = Flags(hf_checkpoint="/m", web="127.0.0.1:5091")
    assert planned(text.format(web="web: 127.0.0.1:5090, "), flag).topology.web == "127.0.0.1:5091"
    for wrong in ("5090", "127.0.0.1:5080"):
        _, problems = load(text.format(web=f"web: '{wrong}', "), Flags(hf_checkpoint="/m"))
        assert "fleet.web" in str(problems) or "web" in {each.key.rpartition(".")[2] for each in problems}, wrong
