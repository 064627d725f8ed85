"""slime's rules, one by one, and what is silently wrong there."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from rlctl.engine import KnownOptions
from rlctl.topology import document
from rlctl.topology.context import Engines
from rlctl.topology.flags import Flags, document_of
from rlctl.topology.problems import COMMAND_LINE, Problems
from rlctl.topology.resolve import resolve
from rlctl.topology.resolved import Topology

NAMES = frozenset(
    {
        "mem_fraction_static", "context_length", "chunked_prefill_size", "enable_torch_compile", "pp_size",
        "disaggregation_bootstrap_port",
    }
)  # fmt: skip
SGLANG = KnownOptions(NAMES, {"tp_size": "write num_gpus_per_engine"}, "SGLang 0")
TORCH = KnownOptions(frozenset({"max_running"}), origin="the torch engine")


def known(engine: str, given: Mapping[str, str]) -> KnownOptions | None:
    del given
    return {"sglang": SGLANG, "torch": TORCH}.get(engine)


ENGINES = Engines(["fake", "sglang", "torch"], known)
HF = Flags(hf_checkpoint="/m")


def load(text: str, flags: Flags = HF) -> tuple[Topology, Problems]:
    problems = Problems("f.yaml")
    root = document.parse(text, problems)
    assert root is not None
    return resolve(root, flags, ENGINES, problems, file=True), problems


def good(text: str, flags: Flags = HF) -> Topology:
    topology, problems = load(text, flags)
    assert problems.errors == []
    return topology


def errors(text: str, flags: Flags = HF) -> list[str]:
    return [str(problem) for problem in load(text, flags)[1].errors]


def flagged(**given: Any) -> tuple[Topology, Problems]:
    """What flags without a file come to."""
    flags = Flags(**{"hf_checkpoint": "/m", **given})
    problems = Problems(COMMAND_LINE)
    return resolve(document_of(flags, problems), flags, ENGINES, problems, file=False), problems


def model(groups: str, head: str = "name: actor") -> str:
    """A file with one model."""
    fields = "".join(f"    {line}\n" for line in head.splitlines()).removeprefix("    ")
    body = "".join(f"      {line}\n" for line in groups.strip().splitlines())
    return f"sglang:\n  - {fields}    server_groups:\n{body}"


REGULAR = "- worker_type: regular\n  num_gpus: 4\n"

# The cascade.


@pytest.mark.parametrize(
    ("group", "of_model", "flag", "expected"),
    [("4", "2", 1, 4), ("", "2", 1, 2), ("", "", 2, 2), ("", "", None, 1)],
)
def test_gpus_per_engine_are_the_groups_the_models_the_flags(
    group: str, of_model: str, flag: int | None, expected: int
) -> None:
    groups = REGULAR + (f"  num_gpus_per_engine: {group}" if group else "")
    head = "name: actor" + (f"\nnum_gpus_per_engine: {of_model}" if of_model else "")
    (found,) = good(model(groups, head), Flags(hf_checkpoint="/m", num_gpus_per_engine=flag)).models[0].groups
    assert found.num_gpus_per_engine == expected
    assert found.engines == 4 // expected


@pytest.mark.parametrize(
    ("override", "of_model", "expected"),
    [("/g", "/x", "/g"), ("", "/x", "/x"), ("", "", "/m"), ("/g", "", "/g")],
)
def test_the_path_is_the_groups_the_models_the_flags(override: str, of_model: str, expected: str) -> None:
    groups = REGULAR + (f"  overrides: {{model_path: {override}}}" if override else "")
    head = "name: actor" + (f"\nmodel_path: {of_model}" if of_model else "")
    found = good(model(groups, head)).models[0]
    assert found.model_path == expected
    assert "model_path" not in found.groups[0].overrides


@pytest.mark.parametrize(
    ("path", "said", "expected"),
    [
        ("", "", True),
        ("/m", "", True),
        ("/m/", "", True),
        ("/x", "", False),
        ("/x", "true", True),
        ("/m", "false", False),
    ],
)
def test_whether_weights_are_received_follows_from_the_path_unless_it_is_said(
    path: str, said: str, expected: bool
) -> None:
    head = "name: actor" + (f"\nmodel_path: {path}" if path else "") + (f"\nupdate_weights: {said}" if said else "")
    topology, problems = load(model(REGULAR, head))
    assert topology.models[0].update_weights is expected
    assert bool(problems.entries) == (not expected and not said), "a model that is frozen unasked is a warning"


def test_without_a_checkpoint_of_the_fleet_every_model_receives_weights_unless_it_is_said() -> None:
    text = model(REGULAR, "name: a\nmodel_path: /a")
    text += model(REGULAR, "name: b\nmodel_path: /b\nupdate_weights: false")[8:]
    topology, problems = load(text, Flags())
    assert ([each.update_weights for each in topology.models], problems.entries) == ([True, False], [])


def test_arguments_are_the_groups_over_the_models_over_the_flags() -> None:
    text = model(
        REGULAR + "  overrides: {mem-fraction-static: 0.5, enable_torch_compile: false}",
        "name: actor\noverrides: {mem_fraction_static: 0.6, context_length: 1024}",
    )
    base = {
        "mem_fraction_static": "0.7",
        "context_length": "7",
        "chunked_prefill_size": "8",
        "enable_torch_compile": "true",
    }
    flags = Flags(hf_checkpoint="/m", sglang=base)
    overrides = good(text, flags).models[0].groups[0].overrides
    # false takes a switch away that something below has turned on.
    assert overrides == {"mem_fraction_static": "0.5", "context_length": "1024", "chunked_prefill_size": "8"}


def test_flags_of_sglang_are_for_sglang() -> None:
    text = model(REGULAR, "name: actor\nengine: torch")
    assert (
        good(text, Flags(hf_checkpoint="/m", sglang={"mem_fraction_static": "0.7"})).models[0].groups[0].overrides == {}
    )


def test_an_older_name_of_server_groups_is_accepted() -> None:
    assert good(model(REGULAR).replace("server_groups", "engine_groups")).models[0].groups[0].num_gpus == 4


def test_the_engine_is_sglang_under_its_key_and_torch_elsewhere_and_each_model_may_say() -> None:
    text = model(REGULAR)
    assert good(text).models[0].engine == "sglang"
    assert good(text.replace("sglang:", "models:")).models[0].engine == "torch"
    assert good(text, Flags(hf_checkpoint="/m", engine="fake")).models[0].engine == "fake"
    assert (
        good(model(REGULAR, "name: a\nengine: torch"), Flags(hf_checkpoint="/m", engine="fake")).models[0].engine
        == "torch"
    )


def test_several_models_may_receive_weights() -> None:
    text = model(REGULAR, "name: a\nupdate_weights: true") + model(REGULAR, "name: b\nupdate_weights: true")[8:]
    assert [found.update_weights for found in good(text).models] == [True, True]


# What must be an error. {4}: the line where it stands.


def test_who_heals_a_model_is_the_models_own() -> None:
    text = model("- {worker_type: regular, num_gpus: 1}", "name: a\nhealing: by_hand")
    text += model("- {worker_type: regular, num_gpus: 1}", "name: b")[8:]
    assert [(each.name, each.heals_itself) for each in good(text).models] == [("a", False), ("b", True)]
    _, problems = load(text.replace("by_hand", "by-hand"))
    assert "'by-hand' is not one of automatic, by_hand; did you mean 'by_hand'?" in str(problems.errors[0])


@pytest.mark.parametrize(
    ("written", "text", "problem"),
    [
        ("2", "2", ""),
        ("'50%'", "50%", ""),
        ("50%", "50%", ""),
        ("0", "", ""),
        ("3", "", "it is 3, and the model has 2 engines"),
        ("101%", "", "min_healthy is '101%'; it must be a number or 0% to 100%"),
        ("half", "", "min_healthy is 'half'; it must be a number or 0% to 100%"),
        ("-1", "", "a whole number or a text such as 50%"),
        ("true", "", "a whole number or a text such as 50%"),
    ],
)
def test_a_model_says_how_many_engines_stay_routable(written: str, text: str, problem: str) -> None:
    document = model("- {worker_type: regular, num_gpus: 2}", f"name: a\nmin_healthy: {written}")
    if not problem:
        assert [each.min_healthy for each in good(document).models] == [text]
        return
    _, problems = load(document)
    assert problem in str(problems.errors[0])


PD = "- worker_type: prefill\n  num_gpus: 2\n- worker_type: decode\n  num_gpus: 2\n"

WRONG: dict[str, tuple[str, str]] = {
    "a key that does not exist": (
        model(REGULAR + "  num_gpu: 1"),
        "f.yaml:6: sglang[0].server_groups[0].num_gpu: there is no such key; did you mean 'num_gpus'?",
    ),
    "at the top": ("sglan: []\nmodels: []", "f.yaml:1: sglan: there is no such key; did you mean 'sglang'?"),
    "no models": ("fleet: {}", "f.yaml:1: models: it is required"),
    "an empty list": ("sglang: []", "f.yaml:1: sglang: it must have one model or more"),
    "no name": (model(REGULAR, "num_gpus_per_engine: 1"), "sglang[0].name: it is required"),
    "a name twice": (
        model(REGULAR) + model(REGULAR)[8:],
        "f.yaml:6: sglang[1].name: a model 'actor' was there already, in line 2",
    ),
    "a worker type that does not exist": (
        model(REGULAR.replace("regular", "decoder")),
        "f.yaml:4: sglang[0].server_groups[0]."
        "worker_type: 'decoder' is not one of regular, prefill, decode, encoder, placeholder; "
        "did you mean 'decode'?",
    ),
    "no worker type": (model("- num_gpus: 4"), "worker_type: it is required"),
    "no GPUs": (model("- worker_type: regular"), "num_gpus: it is required"),
    "zero GPUs": (
        model(REGULAR.replace("4", "0")),
        "f.yaml:5: sglang[0].server_groups[0].num_gpus: it must be a whole number, 1 or more and 16384 at most, not 0",
    ),
    "more GPUs than there can be": (model(REGULAR.replace("4", "9" * 99)), "1 or more and 16384 at most"),
    "a text for a number": (
        model(REGULAR.replace("4", "four")),
        "it must be a whole number, 1 or more and 16384 at most, not 'four'",
    ),
    "true for a number": (model(REGULAR.replace("4", "true")), "at most, not true"),
    "a number for true": (model(REGULAR, "name: a\nupdate_weights: 1"), "it must be true or false, not 1"),
    "GPUs that do not divide": (
        model(REGULAR + "  num_gpus_per_engine: 3"),
        "4 is not divisible by num_gpus_per_engine 3: 1 engine leaves 1 over",
    ),
    "an engine larger than its group": (model(REGULAR + "  num_gpus_per_engine: 8"), "0 engines leave 4 over"),
    "an engine of one node and a half": (
        model("- {worker_type: regular, num_gpus: 12, num_gpus_per_engine: 12}"),
        "larger than a node of 8 and must fill whole ones",
    ),
    "regular beside prefill": (
        model(REGULAR + PD),
        "f.yaml:6: sglang[0].server_groups: regular engines (line 4) and prefill "
        "ones (line 6) cannot serve one model together",
    ),
    "regular beside decode": (
        model(PD[PD.index("- worker_type: decode") :] + REGULAR),
        "cannot serve one model together",
    ),
    "prefill alone": (model("- {worker_type: prefill, num_gpus: 1}"), "prefill engines need decode ones"),
    "decode alone": (model("- {worker_type: decode, num_gpus: 1}"), "decode engines need prefill ones"),
    "an encoder alone": (model("- {worker_type: encoder, num_gpus: 1}"), "encoders need regular engines"),
    "two paths in a model": (
        model(REGULAR + "  overrides: {model_path: /a}\n" + REGULAR),
        "f.yaml:6: sglang[0].server_groups[0].overrides.model_path: all groups of a model have one model_path",
    ),
    "an argument that does not exist": (
        model(REGULAR + "  overrides:\n    mem_fraction: 1"),
        "f.yaml:7: sglang[0].server_groups[0]."
        "overrides.mem_fraction: SGLang 0 has no argument 'mem_fraction'; "
        "did you mean 'mem_fraction_static'?",
    ),
    "an argument that rlctl sets": (
        model(REGULAR + "  overrides: {tp-size: 2}"),
        "rlctl sets tp_size itself: write num_gpus_per_engine",
    ),
    "an argument in both spellings": (
        model(REGULAR + "  overrides: {context-length: 1, context_length: 2}"),
        "context_length: it is context_length of line 6 again",
    ),
    "a pipeline that does not divide": (model(REGULAR + "  overrides: {pp_size: 3}"), "pp_size '3' does not divide"),
    "a placeholder with arguments": (
        model("- {worker_type: placeholder, num_gpus: 1, overrides: {context_length: 1}}"),
        "a placeholder starts nothing",
    ),
    "a key twice": (model(REGULAR, "name: a\nname: b"), "f.yaml:3: sglang[0].name: 'name' was given already in line 2"),
    "both spellings of server_groups": (
        model(REGULAR) + "    engine_groups: []",
        "it is the same key as 'server_groups'",
    ),
    "no groups": ("sglang: [{name: a, server_groups: []}]", "it must have one group or more"),
    "both lists": (model(REGULAR) + "models: []", "`models:` and `sglang:` exclude each other"),
    "an engine that is not installed": (
        model(REGULAR, "name: a\nengine: sglan"),
        "no plug-in 'sglan' is installed; there are: fake, sglang, torch; did you mean 'sglang'?",
    ),
    "slots of two models": (
        model(REGULAR + "  name: b", "name: a") + model(REGULAR, "name: a-b")[8:],
        "its slots a-b-0, ... are those of model 'a'",
    ),
    "an address that is none": (model("- {worker_type: regular, external: [here]}"), "'here' is not HOST:PORT"),
    "an address twice": (model("- {worker_type: regular, external: ['h:1', 'http://h:1']}"), "is there twice"),
    "servers that cannot be attached to": (
        model("- {worker_type: regular, external: ['h:1']}", "name: a\nengine: torch"),
        "torch engines cannot be attached to",
    ),
    "a token in the open": (
        model(REGULAR + "  environment: {RLCTL_TOKEN: x}"),
        "tokens belong in fleet.auth.token_file",
    ),
    "stages that do not add up": (model(REGULAR + "  stages: [{name: a, num_gpus: 3}]"), "they have 3 GPUs"),
    "a model name that is no name": (model(REGULAR, "name: a/b"), "'a/b' must be letters"),
    "a network that is none": ("fleet: {network: {interface: 10.0.0.0/99}}\n" + model(REGULAR), "is no network"),
    "bundles of no group": (
        "fleet: {launcher: ray, ray: {bundles: [1]}}\n" + model(REGULAR),
        "it needs placement_group",
    ),
    "a bundle twice": (
        "fleet:\n  launcher: ray\n  ray: {placement_group: g, bundles: [3, 1, 3]}\n" + model(REGULAR),
        "f.yaml:3: fleet.ray.bundles: bundle 3 is there twice",
    ),
    "no bundles": (
        "fleet: {launcher: ray, ray: {placement_group: g, bundles: []}}\n" + model(REGULAR),
        "it must have one bundle or more",
    ),
    "a bundle that is no number": (
        "fleet: {launcher: ray, ray: {placement_group: g, bundles: [0, -1]}}\n" + model(REGULAR),
        "fleet.ray.bundles: it must be a list of whole numbers, 0 or more",
    ),
    "more than a bundle": (
        "fleet: {launcher: ray, ray: {placement_group: g, bundle_share: 1.5}}\n" + model(REGULAR),
        "bundle_share: it must be 1 at most, not 1.5",
    ),
    "GPUs that nobody has written": (
        model("- worker_type: regular\n  num_gpus:"),
        "f.yaml:4: sglang[0].server_groups[0].num_gpus: it is required: a whole number, 1 or more",
    ),
    "models that nobody has written": ("sglang:", "f.yaml:1: models: it is required"),
    "a checkpoint among the arguments of a model": (
        model(REGULAR, "name: a\noverrides: {model-path: /x}"),
        "f.yaml:3: sglang[0].overrides.model-path: write model_path in the model",
    ),
    "an empty checkpoint of a group": (
        model(REGULAR + "  overrides: {model_path: ''}"),
        "server_groups[0].overrides.model_path: it must be a text",
    ),
    "a group whose name is no name": (
        model(REGULAR + "  name: ../../x"),
        "f.yaml:6: sglang[0].server_groups[0].name: '../../x' must be letters",
    ),
    "a pipeline size that is no number": (
        model(REGULAR + "  overrides: {pp_size: ²}"),
        "pp_size '²' does not divide num_gpus_per_engine 1",
    ),
    "a bootstrap port that is none": (
        model(PD.replace("gpus: 2", "gpus: 2\n  overrides: {disaggregation_bootstrap_port: x}", 1)),
        "f.yaml:6: sglang[0].server_groups[0].overrides: disaggregation_bootstrap_port 'x' is no port",
    ),
    "bootstrap ports that there are not": (
        model(PD.replace("gpus: 2", "gpus: 2\n  overrides: {disaggregation_bootstrap_port: 65535}", 1)),
        "2 servers take ports from 65535 on, and the last there is is 65535",
    ),
    "two gateways at one address": (
        model(REGULAR, "name: a\ngateway: 127.0.0.1:3000") + model(REGULAR, "name: b\ngateway: 127.0.0.1:3000")[8:],
        "f.yaml:8: sglang[1].gateway: 127.0.0.1:3000 is where sglang[0].gateway (line 3) listens already",
    ),
    "a router where the gateway is": (
        model(REGULAR, "name: a\ngateway: h:3000\nrouter: {backend: sglang-router, listen: 'h:3000'}"),
        "sglang[0].router.listen: h:3000 is where sglang[0].gateway (line 3) listens already",
    ),
    "a gateway where the coordinator is": (
        "fleet: {listen: '127.0.0.1:3000'}\n" + model(REGULAR, "name: a\ngateway: 127.0.0.1:3000"),
        "f.yaml:4: sglang[0].gateway: 127.0.0.1:3000 is where fleet.listen (line 1) listens already",
    ),
    "a server in two models": (
        model("- {worker_type: regular, external: ['h:1']}", "name: a")
        + model("- {worker_type: regular, external: ['h:1']}", "name: b")[8:],
        "f.yaml:7: sglang[1].server_groups[0].external: http://h:1 is attached to already (line 4)",
    ),
    "a server without a port": (model("- {worker_type: regular, external: ['h:0']}"), "'h:0' is not HOST:PORT"),
    "an address of two ports": ("fleet: {listen: 'h:1:2'}\n" + model(REGULAR), "listen: 'h:1:2' is not HOST:PORT"),
    "an address with a space": (model(REGULAR, "name: a\ngateway: a b:1"), "gateway: 'a b:1' is not HOST:PORT"),
    "an address of IPv6 without brackets": (
        "fleet: {listen: '::1:5'}\n" + model(REGULAR),
        "fleet.listen: '::1:5' is not HOST:PORT",
    ),
    "a gateway that is no port": (model(REGULAR, "name: a\ngateway: 'unix:/x'"), "'unix:/x' is not HOST:PORT"),
    "gateways on a port": ("fleet: {gateways: 'h:1'}\n" + model(REGULAR), "fleet.gateways: 'h:1' is no host"),
    "a list for a section": ("fleet: [1]\n" + model(REGULAR), "fleet: it must be keys and values, not a list"),
}


@pytest.mark.parametrize("case", WRONG)
def test_is_an_error(case: str) -> None:
    text, expected = WRONG[case]
    found = errors(text)
    assert any(expected in problem for problem in found), found


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("nope: 1\n" + model(REGULAR), "nope"),
        ("fleet: {nope: 1}\n" + model(REGULAR), "fleet.nope"),
        ("fleet: {ray: {nope: 1}}\n" + model(REGULAR), "fleet.ray.nope"),
        ("fleet: {auth: {nope: 1}}\n" + model(REGULAR), "fleet.auth.nope"),
        ("fleet: {network: {nope: 1}}\n" + model(REGULAR), "fleet.network.nope"),
        ("fleet: {restart: {nope: 1}}\n" + model(REGULAR), "fleet.restart.nope"),
        ("fleet: {router: {backend: sglang-router, listen: 'h:1'}}\n" + model(REGULAR), "fleet.router.listen"),
        (model(REGULAR, "name: a\nnope: 1"), "sglang[0].nope"),
        (model(REGULAR, "name: a\nrouter: {nope: 1}"), "sglang[0].router.nope"),
        (model(REGULAR + "  nope: 1"), "sglang[0].server_groups[0].nope"),
        (model(REGULAR + "  stages: [{nope: 1}]"), "sglang[0].server_groups[0].stages[0].nope"),
    ],
)
def test_a_key_that_does_not_exist_is_an_error_at_every_level(text: str, key: str) -> None:
    assert [each for each in errors(text) if f" {key}: there is no such key" in each], errors(text)


def test_a_checkpoint_of_a_group_may_be_written_as_a_flag() -> None:
    for name in ("model_path", "model-path", "--model-path"):
        assert good(model(REGULAR + f"  overrides: {{{name}: /g}}")).models[0].model_path == "/g"


def test_a_model_that_is_there_again_and_again_is_told_once_each() -> None:
    found = errors(model(REGULAR) + model(REGULAR)[8:] * 2)
    assert [each.partition(": sglang")[2] for each in found] == [
        f"[{index}].name: a model 'actor' was there already, in line 2" for index in (1, 2)
    ]


def test_a_file_of_nothing_but_mistakes_is_told_in_time() -> None:
    """It was the square of their number, and took minutes."""
    before = time.monotonic()
    assert len(errors("sglang:\n" + "  - {name: a}\n" * 5_000)) == 9_999
    assert time.monotonic() - before < 30


def test_a_message_is_in_bounds_however_large_the_value_is() -> None:
    for text in (model(REGULAR, f"name: {'é' * 90_000}"), f"? {'k' * 90_000}\n: 1\n" + model(REGULAR)):
        (found,) = errors(text)
        assert len(found) < 1000


def test_without_a_checkpoint_it_is_required() -> None:
    assert "model_path: it is required" in errors(model(REGULAR), Flags())[0]
    assert errors(model("- {worker_type: placeholder, num_gpus: 1}"), Flags()) == []


def test_everything_wrong_is_told_at_once_in_the_order_of_the_lines() -> None:
    text = model(
        "- worker_type: prefil\n  num_gpus: 0\n  overrides: {nope: 1}\n  colour: red", "name: a\nmodel_pth: /x"
    )
    _, problems = load(text)
    lines = [problem.line for problem in problems.in_order()]
    assert len(lines) == 5
    assert lines == sorted(lines)


def test_arguments_of_an_engine_that_is_not_known_are_a_warning() -> None:
    _, problems = load(model(REGULAR + "  overrides: {anything: 1}", "name: a\nengine: fake"))
    assert problems.errors == []
    assert "not checked" in str(problems.entries[0])


# Flags.


@pytest.mark.parametrize("given", [4, 8])
def test_the_gpus_of_all_groups_are_those_of_the_flag(given: int) -> None:
    text = model(REGULAR + "- {worker_type: placeholder, num_gpus: 4}")
    found = errors(text, Flags(hf_checkpoint="/m", num_gpus=given))
    assert found == (
        [] if given == 8 else ["command line: --rollout-num-gpus: the groups have 8 GPUs (actor 8), not 4"]
    )


def test_the_gpus_of_all_groups_are_those_of_the_file() -> None:
    assert errors("fleet: {num_gpus: 5}\n" + model(REGULAR)) == [
        "f.yaml:1: fleet.num_gpus: the groups have 4 GPUs (actor 4), not 5"
    ]


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ({"prefill_num_servers": 1}, "--prefill-num-servers"),
        ({"external": True, "external_addresses": ["h:1"]}, "--rollout-external"),
        ({"external_addresses": ["h:1"]}, "--rollout-external-engine-addrs"),
        ({"model": "x"}, "--model"),
    ],
)
def test_what_excludes_a_file(flags: dict[str, Any], name: str) -> None:
    found = errors(model(REGULAR), Flags(**{"hf_checkpoint": "/m", **flags}))
    assert found[0].startswith(f"command line: {name}: it cannot be given with a file")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"listen": "5080"}, "--listen: '5080' is not HOST:PORT"),
        ({"address": "here", "launcher": "ray"}, "--address: 'here' is not HOST:PORT"),
        ({"gateways": "h:1"}, "--gateways: 'h:1' is no host"),
        ({"name": "../x"}, "--name: '../x' must be letters"),
        ({"engine": "sglan"}, "--engine: no plug-in 'sglan' is installed"),
        *(({name: ""}, f"--{name.replace('_', '-')}: it must not be empty") for name in (
            "name", "engine", "listen", "hf_checkpoint", "gateways", "launcher", "address", "placement_group")),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_flag_is_told_under_its_name(given: dict[str, Any], expected: str) -> None:
    found = errors(model(REGULAR), replace(HF, **given))
    assert any(each.startswith(f"command line: {expected}") for each in found), found


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"model": "a/b"}, "--model: 'a/b' must be letters"),
        ({"model": ""}, "--model: it must not be empty"),
        ({"num_gpus": 5, "num_gpus_per_engine": 2}, "--rollout-num-gpus: 5 is not divisible by"),
        ({"num_gpus": 0}, "--rollout-num-gpus: 0 GPUs start no engine"),
        ({"external_addresses": ["h"]}, "--rollout-external-engine-addrs: 'h' is not HOST:PORT"),
    ],
)
def test_what_is_wrong_with_flags_alone_is_told_under_their_names(given: dict[str, Any], expected: str) -> None:
    found = [str(problem) for problem in flagged(**given)[1].errors]
    assert any(each.startswith(f"command line: {expected}") for each in found), found


def test_external_engines_exclude_prefill_servers_and_need_addresses() -> None:
    _, problems = flagged(external_addresses=["h:1"], prefill_num_servers=1)
    assert "it cannot be given with --rollout-external" in str(problems.errors[0])
    _, problems = flagged(external=True)
    assert "it needs --rollout-external-engine-addrs" in str(problems.errors[0])


def test_flags_alone_are_a_fleet() -> None:
    topology, problems = flagged(num_gpus=4, num_gpus_per_engine=2, model="ref", engine="fake")
    assert problems.errors == []
    (found,) = topology.models
    assert (found.name, found.engine, found.groups[0].engines) == ("ref", "fake", 2)


def test_prefill_servers_leave_the_rest_to_decode() -> None:
    topology, problems = flagged(num_gpus=8, num_gpus_per_engine=2, prefill_num_servers=1)
    assert problems.errors == []
    assert [(g.worker_type, g.engines) for g in topology.models[0].groups] == [("prefill", 1), ("decode", 3)]
    _, problems = flagged(num_gpus=4, num_gpus_per_engine=2, prefill_num_servers=2)
    assert "prefill and decode both need some" in str(problems.errors[0])


def test_external_engines_are_attached_to() -> None:
    topology, problems = flagged(external_addresses=["host1:10090", "host2:10091"])
    assert problems.errors == []
    assert topology.models[0].engine == "sglang"
    assert topology.models[0].groups[0].external == ("http://host1:10090", "http://host2:10091")
    assert topology.num_gpus == 0


def test_a_cluster_is_the_files_or_the_flags() -> None:
    text = "fleet: {launcher: ray, ray: {address: '10.0.0.1:6379'}, load_timeout_s: 60}\n" + model(REGULAR)
    made = good(text)
    assert (made.launcher, made.cluster, made.load_timeout_s) == ("ray", "10.0.0.1:6379", 60)
    assert good(text, replace(HF, address="10.0.0.2:6379")).cluster == "10.0.0.2:6379"
    assert errors(model(REGULAR), replace(HF, address="10.0.0.2:6379")) == [
        "command line: --address: it is a Ray cluster's, and needs --launcher ray"
    ]
    (wrong,) = errors("fleet: {launcher: ray, network: {advertise: me}}\n" + model(REGULAR))
    assert "fleet.network.advertise: launcher ray has several nodes, and each has its own address" in wrong


def test_gateways_are_the_models_or_one_each() -> None:
    text = "fleet: {gateways: 10.0.0.1}\n" + model(REGULAR, "name: actor\ngateway: 10.0.0.1:3000")
    text += model(REGULAR, "name: ref\nupdate_weights: false")[8:]
    assert [made.gateway for made in good(text).models] == ["10.0.0.1:3000", "10.0.0.1:0"]
    assert [made.gateway for made in good(text, replace(HF, gateways="::1")).models] == ["10.0.0.1:3000", "[::1]:0"]
    assert [made.gateway for made in good(model(REGULAR)).models] == [""]


@pytest.mark.parametrize("policy", ["round_robin", "consistent_hashing", "cache_aware"])
def test_slimes_router_policies_are_a_flag_over_the_file(policy: str) -> None:
    text = "fleet: {router_policy: random}\n" + model(REGULAR, "name: a\nrouter_policy: manual")
    text += model(REGULAR, "name: b")[8:]
    assert [each.router_policy for each in good(text).models] == ["manual", "random"]
    assert [each.router_policy for each in good(text, replace(HF, router_policy=policy)).models] == [policy] * 2


def test_routers_stand_in_front_of_gateways() -> None:
    own = "name: actor\ngateway: 10.0.0.1:3000\nrouter: {backend: sglang-router, listen: '10.0.0.1:4000'}"
    text = "fleet: {router: {backend: sglang-router}}\n" + model(REGULAR, own)
    text += model(REGULAR, "name: ref\nupdate_weights: false\ngateway: 10.0.0.1:3001")[8:]
    text += model(REGULAR, "name: reward\nupdate_weights: false")[8:]
    made = good(text).models
    assert [(each.router, each.router_listen) for each in made] == [
        ("sglang-router", "10.0.0.1:4000"),
        ("sglang-router", "10.0.0.1:0"),
        ("", ""),
    ]
    (wrong,) = errors(model(REGULAR, "name: a\nrouter: {backend: sglang-router}"))
    assert "router: it stands in front of a gateway, and the model has none" in wrong
    (wrong, where) = errors(model(REGULAR, "name: a\ngateway: a:1\nrouter: {backend: sglang_router, listen: here}"))
    assert "router.backend: 'sglang_router' is not one of sglang-router; did you mean 'sglang-router'?" in wrong
    assert "router.listen: 'here' is not HOST:PORT" in where


def test_whether_a_fleet_is_insecure_is_said_or_not() -> None:
    assert good(model(REGULAR)).insecure is None
    assert good("fleet: {auth: {insecure: false}}\n" + model(REGULAR)).insecure is False
    assert good("fleet: {auth: {insecure: false}}\n" + model(REGULAR), replace(HF, insecure=True)).insecure


def test_a_placement_group_is_of_a_ray_cluster() -> None:
    flags = Flags(hf_checkpoint="/m", placement_group="g", bundles=(0, 1), bundle_share=0.5)
    assert [str(error) for error in load(model(REGULAR), flags)[1].errors] == [
        f"command line: {flag}: it is of a Ray cluster, and needs --launcher ray"
        for flag in ("--placement-group", "--bundles", "--bundle-share")
    ]
    topology = good(model(REGULAR), Flags(**{**vars(flags), "launcher": "ray"}))
    assert (topology.placement_group, topology.bundles, topology.bundle_share) == ("g", (0, 1), 0.5)
