"""Types of command-line values, options from message fields, text in tables."""

from __future__ import annotations

import contextlib
import time

import click
import pytest
from cli_helpers import run
from google.protobuf.timestamp_pb2 import Timestamp
from hypothesis import given
from hypothesis import strategies as st

from rlctl.cli.app import message_options
from rlctl.cli.app.types import DEVICE, DURATION, LEVEL, EnumType
from rlctl.cli.render import operations
from rlctl.cli.render import values as text
from rlctl.cli.render.printer import plain_data
from rlctl.contract.durations import duration
from rlctl.engine import EngineConfig
from rlctl.launch.local import gpus as devices
from rlctl.v1 import common_pb2, rollout_pb2, verbs_pb2
from rlctl.v1.fleet_pb2 import Capabilities, StageRegistration
from rlctl.v1.results_pb2 import OPERATION_STATE_OK, ExcludedStage, Operation, StageResult
from rlctl.v1.rollout_pb2 import GenerateResponse, Sample


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("30s", 30), ("500ms", 0.5), ("2m", 120), ("1h", 3600), ("90d", 7_776_000), ("1.5s", 1.5), ("7", 7),
        (".5s", 0.5), (" 3s ", 3),
    ],
)  # fmt: skip
def test_durations_are_read(written: str, seconds: float) -> None:
    assert DURATION.convert(written, None, None) == pytest.approx(seconds)


@pytest.mark.parametrize("written", ["", "0", "0s", "-1s", "1w", "d", "s", "1s2", "nan", "1e3s", "one"])
def test_what_is_no_time_is_refused(written: str) -> None:
    with pytest.raises(click.BadParameter, match="time above zero"):
        DURATION.convert(written, None, None)


def test_a_level_of_the_log_is_a_name_in_either_case() -> None:
    assert LEVEL.convert("debug", None, None) == "DEBUG"
    with pytest.raises(click.BadParameter, match=r"'loud' is none of NOTSET, .*CRITICAL"):
        LEVEL.convert("loud", None, None)


@pytest.mark.parametrize(
    "words",
    ["coordinator", "stage --slot a --model-path /", "worker --rank 1 --model-path /", "gateway", "sidecar vllm"],
)
def test_a_server_refuses_a_level_that_there_is_not(words: str) -> None:
    ran = run(*words.split(), "--log-level", "loud")
    assert ran.code == 2
    assert "Invalid value for '--log-level': 'loud'" in ran.err


_SERVERS = {
    "stage --slot a --model-path /": "rlctl.stage.server.StageConfig",
    "worker --rank 1 --model-path /": "rlctl.worker.server.WorkerConfig",
    "worker --rank 1 --model-path / --engine sglang": "rlctl.worker.server.WorkerConfig",
    "sidecar vllm --launch /": "rlctl_vllm.sidecar.server.SidecarConfig",
}


@pytest.mark.parametrize(
    ("gpus", "words", "device"),
    [
        *((0, words, "cpu") for words in _SERVERS),
        *((2, f"{words} --device cpu", "cpu") for words in _SERVERS),
        *((2, f"{words} --device cuda:5", "cuda:5") for words in _SERVERS),
        (2, "stage --slot a --model-path /", "cuda:0"),
        (2, "worker --rank 1 --model-path /", "cuda:1"),
        (2, "worker --rank 1 --model-path / --device cuda", "cuda:1"),
        (1, "worker --rank 1 --model-path /", "cuda:0"),  # on a second host, or where one GPU is shown to it
        (2, "worker --rank 1 --model-path / --engine sglang", "cuda"),  # which has both GPUs of its node
        (2, "sidecar vllm --launch /", "cuda"),
    ],
)
def test_a_server_started_by_hand_computes_on_the_gpus_of_its_machine(
    monkeypatch: pytest.MonkeyPatch, gpus: int, words: str, device: str
) -> None:
    chosen: list[str] = []

    def config(*positional: object, **named: object) -> None:
        engine = next((v for v in (*positional, *named.values()) if isinstance(v, EngineConfig)), None)
        chosen.append(str(named["device"]) if engine is None else engine.device)
        raise click.exceptions.Exit(0)

    monkeypatch.setattr(devices, "gpu_count", lambda: gpus)
    monkeypatch.setattr(next(_SERVERS[known] for known in _SERVERS if words.startswith(known)), config)
    assert run(*words.split()).code == 0
    assert chosen == [device]


@pytest.mark.parametrize("written", ["", "gpu", "cpux", "cuda0", "cuda:", "cuda:x", "cuda:-1"])
def test_a_device_that_there_is_not_is_refused(written: str) -> None:
    with pytest.raises(click.BadParameter, match="auto, cpu, cuda or cuda:N"):
        DEVICE.convert(written, None, None)


@pytest.mark.parametrize("written", ["99999999999999h", "9" * 400])
def test_a_time_that_no_timer_holds_is_refused(written: str) -> None:
    with pytest.raises(click.BadParameter, match=r"too long|above zero"):
        DURATION.convert(written, None, None)
    assert run("--endpoint", "127.0.0.1:1", "--timeout", written, "status").code == 2


@given(st.text())
def test_a_duration_is_a_positive_number_or_refused(written: str) -> None:
    with contextlib.suppress(click.BadParameter):
        assert DURATION.convert(written, None, None) > 0


def test_moments_are_told_in_local_time(monkeypatch: pytest.MonkeyPatch) -> None:
    stamp = Timestamp(seconds=1_700_000_000)  # 2023-11-14T22:13:20Z
    for zone, told in (("UTC", "2023-11-14T22:13:20"), ("Asia/Tokyo", "2023-11-15T07:13:20")):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        assert text.moment(stamp) == told
    monkeypatch.undo()
    time.tzset()


def test_what_is_counted_is_one_or_many() -> None:
    assert [text.count(number, "engine") for number in (0, 1, 2)] == ["0 engines", "1 engine", "2 engines"]


@pytest.mark.parametrize("written", ["in_place", "in-place", "IN_PLACE", "PAUSE_MODE_IN_PLACE"])
def test_enum_values_have_short_and_full_names(written: str) -> None:
    kind = EnumType(common_pb2.PauseMode.DESCRIPTOR)
    assert kind.convert(written, None, None) == common_pb2.PAUSE_MODE_IN_PLACE


@pytest.mark.parametrize("written", ["", "freeze", "PAUSE_MODE_UNSPECIFIED", "PAUSE_MODE_FREEZE"])
def test_enum_values_that_do_not_exist_are_refused_with_those_that_do(written: str) -> None:
    with pytest.raises(click.BadParameter, match=f"^'{written}' is none of abort, retract, in_place, drain$"):
        EnumType(common_pb2.PauseMode.DESCRIPTOR).convert(written, None, None)


def test_a_level_that_requests_refuse_is_not_offered() -> None:
    fields = message_options.fields_of(verbs_pb2.UpdateWeightsFromDiskRequest.DESCRIPTOR)
    verify = next(message_options.option(field) for field in fields if field.flag == "--verify")
    metavar = verify.type.get_metavar(verify, click.Context(click.Command("update")))
    assert metavar == "[none|probe|received|replica|expected]"


def path(field: message_options.Field) -> str:
    return ".".join(step.name for step in field.path)


def test_nested_options_are_flattened_and_repeated_messages_left_out() -> None:
    update = {
        field.flag: path(field)
        for field in message_options.fields_of(verbs_pb2.UpdateWeightsFromDiskRequest.DESCRIPTOR)
    }
    assert update["--model-path"] == "model_path"
    assert update["--pause"] == "options.pause"
    assert update["--flush-cache"] == "options.flush_cache"
    assert "--header" not in update
    group = {field.flag for field in message_options.fields_of(verbs_pb2.InitWeightsUpdateGroupRequest.DESCRIPTOR)}
    assert "--members" not in group
    assert "--group-timeout" in group


def test_a_field_named_like_an_option_of_every_command_gets_a_prefix() -> None:
    flags = [
        field.flag
        for field in message_options.fields_of(verbs_pb2.LoadAdapterRequest.DESCRIPTOR, {"--name", "--version"})
    ]
    assert flags == ["--request-name", "--path", "--request-version", "--pinned", "--abort-requests", "--only-new"]


def _assigned(message: object, **values: object) -> object:
    by_name = {path(field): field for field in message_options.fields_of(message.DESCRIPTOR)}  # type: ignore[attr-defined]
    for name, value in values.items():
        message_options.assign(message, by_name[name.replace("__", ".")], value)  # type: ignore[arg-type]
    return message


def test_values_land_in_their_fields() -> None:
    request = _assigned(
        verbs_pb2.UpdateWeightsFromDiskRequest(),
        model_path="/m",
        options__pause=common_pb2.PAUSE_MODE_RETRACT,
        options__flush_cache=False,
        options__abort_all_requests=False,
        target_modules=("vae", "unet"),
        token_step=None,
    )
    assert request == verbs_pb2.UpdateWeightsFromDiskRequest(
        model_path="/m",
        options=verbs_pb2.UpdateOptions(pause=common_pb2.PAUSE_MODE_RETRACT, flush_cache=False),
        target_modules=["vae", "unet"],
    )
    flush = _assigned(verbs_pb2.FlushCacheRequest(), idle_timeout=1.5)
    assert flush == verbs_pb2.FlushCacheRequest(idle_timeout=duration(1.5))


def test_fields_of_one_oneof_exclude_each_other() -> None:
    with pytest.raises(click.BadParameter, match="excludes --text"):
        _assigned(rollout_pb2.GenerateRequest(), text="hello", input_ids__ids=(1, 2))


def test_a_number_that_does_not_fit_is_refused() -> None:
    with pytest.raises(click.BadParameter, match="out of range"):
        _assigned(rollout_pb2.SamplingParams(), max_new_tokens=1 << 40)


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.0012, "1ms"), (0.25, "250ms"), (1.26, "1.3s"), (125, "2m05s"), (11220, "3h07m")]
)
def test_elapsed_time_is_short(seconds: float, shown: str) -> None:
    assert text.elapsed(seconds) == shown


def test_maps_are_in_the_order_of_their_keys_however_they_were_filled() -> None:
    names = ["PullWeights", "ListAdapters", "UnloadAdapter", "LoadAdapter", "Zz", "Aa"]
    for order in (names, names[::-1]):
        made = StageRegistration(capabilities=Capabilities(unsupported=dict.fromkeys(order, "why")))
        assert list(plain_data(made)["capabilities"]["unsupported"]) == sorted(names)


def test_numbers_of_an_engines_own_that_json_has_not_are_told_as_those_of_other_fields_are() -> None:
    sample = Sample(output_logprobs=[{"logprob": float("-inf")}])
    sample.engine_meta.update({"at": {"all": [1, float("-inf"), {"x": float("nan")}]}, "most": float("inf")})
    (told,) = plain_data(GenerateResponse(samples=[sample]))["samples"]
    assert told["output_logprobs"][0]["logprob"] == "-Infinity"
    assert told["engine_meta"] == {"at": {"all": [1, "-Infinity", {"x": "NaN"}]}, "most": "Infinity"}
    assert sample.engine_meta["most"] == float("inf"), "what is printed stays as it is"


def test_any_field_of_any_message_can_be_shown() -> None:
    report = verbs_pb2.CheckReport(changed=["x", "y"], elapsed=duration(2), action=verbs_pb2.CHECK_ACTION_COMPARE)
    shown = {field.name: text.field(report, field) for field in report.DESCRIPTOR.fields}
    assert shown["changed"] == "x,y"
    assert shown["elapsed"] == "2.0s"
    assert shown["action"] == "compare"
    assert shown["tensors"] == ""
    adapters = verbs_pb2.AdapterList(adapters=[verbs_pb2.Adapter(name="math"), verbs_pb2.Adapter(name="code")])
    assert text.field(adapters, adapters.DESCRIPTOR.fields_by_name["adapters"]) == "math,code"


def test_the_verification_of_both_kinds_is_shown() -> None:
    expected, probe, none = (
        common_pb2.VERIFICATION_LEVEL_EXPECTED,
        common_pb2.VERIFICATION_LEVEL_PROBE,
        common_pb2.VERIFICATION_LEVEL_NONE,
    )
    assert text.verification(common_pb2.Verification(held=expected, computed=probe)) == "EXPECTED,PROBE"
    assert text.verification(common_pb2.Verification(held=expected, computed=none)) == "EXPECTED"
    assert text.verification(common_pb2.Verification(held=none, computed=probe)) == "PROBE"
    assert text.verification(common_pb2.Verification(held=none, computed=none)) == "NONE"
    assert text.verification(common_pb2.Verification()) == ""


def test_the_end_of_an_update_says_what_it_does_not_prove_and_what_it_leaves_paused() -> None:
    def told(verified: common_pb2.VerificationLevel.ValueType, state: common_pb2.StageState.ValueType) -> str:
        stage = StageResult(slot="a", outcome=common_pb2.OUTCOME_APPLIED, verified=verified, state=state)
        operation = Operation(
            operation_id="u", update_id="u", verb="WeightUpdate", state=OPERATION_STATE_OK, targets=["a"],
            stage_results=[stage], pause_time=duration(0.5),
        )  # fmt: skip
        return operations.summary(operation)

    ready, paused = common_pb2.STAGE_STATE_READY, common_pb2.STAGE_STATE_PAUSED
    expected, none = common_pb2.VERIFICATION_LEVEL_EXPECTED, common_pb2.VERIFICATION_LEVEL_NONE
    assert told(expected, ready) == "WeightUpdate OK: 1 of 1 stage confirmed; paused 500ms. (operation u)"
    assert "; not verified: a; paused 500ms." in told(none, ready)
    assert "; paused 500ms, still paused." in told(expected, paused)
    away = ExcludedStage(slot="b", reason="UNREACHABLE")
    operation = Operation(operation_id="u", update_id="u", verb="WeightUpdate", excluded=[away])
    assert "; excluded: b (UNREACHABLE)" in operations.summary(operation)
