"""Stages and models as tables, for ``status``, ``get`` and ``describe``."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from rlctl.cli.render import values
from rlctl.cli.render.printer import View
from rlctl.cli.render.tables import Table, facts, prose
from rlctl.contract import min_healthy
from rlctl.contract.enums import short_name
from rlctl.contract.errors import Reason
from rlctl.v1.common_pb2 import (
    STAGE_STATE_DIRTY,
    STAGE_STATE_UNREACHABLE,
    WORKER_TYPE_REGULAR,
    PauseMode,
    StageState,
    WorkerType,
)
from rlctl.v1.fleet_pb2 import Capabilities, Fleet, Model, Pause, Stage

_STAGES = ("SLOT", "MODEL", "TYPE", "STATE", "ROUTABLE", "VERSION", "SEQ", "RANKS", "HEARD", "WHY NOT")
_STAGES_WIDE = (
    *("SLOT", "MODEL", "TYPE", "STATE", "ROUTABLE", "VERSION", "SEQ", "RANKS", "HEARD"),
    *("ENABLED", "INCARNATION", "ENGINE", "ADDRESS", "ROLLOUT ADDRESS", "DIGEST", "WHY NOT"),
)
_MODELS = ("MODEL", "VERSION", "SEQ", "DIGEST", "UPDATABLE", "STAGES", "ROUTABLE", "MIN HEALTHY", "UPDATE")
_UNHEALABLE = ", UNHEALABLE: "
_MODELS_WIDE = (*_MODELS, "OWNER", "ADMITTED", "TRAINER", "CHECKPOINT")


def stages_view(stages: Sequence[Stage]) -> View:
    return View(list(stages), lambda wide: [stages_table(stages, wide)], lambda: [_slot(stage) for stage in stages])


def view_of(fleet: Fleet, slots: Collection[str]) -> View:
    return stages_view([stage for stage in fleet.stages if stage.registration.slot in slots])


def models_view(fleet: Fleet) -> View:
    return View(
        list(fleet.models), lambda wide: [models_table(fleet, wide)], lambda: [model.name for model in fleet.models]
    )


def fleet_view(fleet: Fleet, endpoint: str) -> View:
    def tables(wide: bool) -> list[Table]:
        about = f"Fleet at {endpoint}, epoch {fleet.header.fleet_epoch}"
        models = models_table(fleet, wide)
        if not fleet.stages:
            return [facts([("Stages", "no stage is registered")], title=about)]
        return [Table(models.headers, models.rows, models.optional, about), stages_table(fleet.stages, wide)]

    return View(fleet, tables, lambda: [_slot(stage) for stage in fleet.stages])


def stages_table(stages: Sequence[Stage], wide: bool) -> Table:
    rows = []
    for stage in stages:
        version = stage.report.weight_version
        ranks = stage.report.ranks
        row = [
            _slot(stage),
            stage.registration.model,
            _type(stage),
            _state(stage),
            values.yes(stage.routable),
            version.label,
            values.sequence(version),
            f"{_alive(stage)}/{len(ranks)}" if ranks else "",
            values.duration(stage.last_heard) if stage.HasField("last_heard") else "",
        ]
        if wide:
            row += [
                values.yes(stage.enabled),
                str(stage.incarnation),
                stage.registration.engine,
                stage.registration.address,
                stage.registration.rollout_address,
                stage.report.model_digest,
            ]
        rows.append([*row, why_not(stage)])
    return Table(_STAGES_WIDE if wide else _STAGES, rows, frozenset({"TYPE", "WHY NOT"}))


def models_table(fleet: Fleet, wide: bool) -> Table:
    rows = []
    for model in fleet.models:
        stages = [stage for stage in fleet.stages if stage.registration.model == model.name]
        row = [
            model.name,
            model.latest.label,
            values.sequence(model.latest),
            model.model_digest,
            values.yes(model.updatable),
            str(len(stages)),
            str(sum(stage.routable for stage in stages)),
            health(model, sum(stage.routable for stage in stages)),
            model.update_id,
        ]
        if wide:
            admitted = values.joined(values.version(version) for version in model.admitted)
            row += [model.update_owner, admitted, str(model.trainer_incarnation), model.checkpoint]
        rows.append(row)
    return Table(_MODELS_WIDE if wide else _MODELS, rows, frozenset({"MIN HEALTHY", "UPDATE", "OWNER"}))


def only_model(fleet: Fleet) -> str:
    """Return the name of the only model. Raises FIELD_REQUIRED, MODEL_NOT_FOUND."""
    if not fleet.models:
        raise Reason.MODEL_NOT_FOUND.error("no stage has registered yet", field="model")
    if len(fleet.models) > 1:
        names = ", ".join(model.name for model in fleet.models)
        raise Reason.FIELD_REQUIRED.error(f"models of the fleet: {names}; choose one with --model", field="model")
    return fleet.models[0].name


def limits_table(fleet: Fleet) -> Table:
    rows = []
    for model in fleet.models:
        stages = [stage for stage in fleet.stages if stage.registration.model == model.name]
        routable = sum(stage.routable for stage in stages)
        rows.append([model.name, min_healthy.words(model.min_healthy) or "none", str(model.min_healthy_stages),
                     str(len(stages)), str(routable), values.yes(routable < model.min_healthy_stages)])  # fmt: skip
    return Table(("MODEL", "MIN HEALTHY", "LIMIT", "STAGES", "ROUTABLE", "BELOW"), rows)


def health(model: Model, routable: int) -> str:
    """Return the limit of a model, with the routable stages if fewer: ``2, below: 1 routable``. "": no limit."""
    text = min_healthy.words(model.min_healthy)
    return f"{text}, below: {routable} routable" if routable < model.min_healthy_stages else text


def why_not(stage: Stage) -> str:
    """Return the reason why a stage is not routable, beyond the state."""
    obstacle, unhealable, cause = stage.not_routable.partition(_UNHEALABLE)
    why = obstacle.removeprefix(_state(stage)).removeprefix(": ")
    if stage.routable or obstacle == _state(stage) or stage.state == STAGE_STATE_DIRTY:
        # The operator's marks are shown in every state: marks outlast the state.
        paused = f"paused {_pause(stage.pause)}" if stage.HasField("pause") else ""
        adapters = [f"adapter {pause.adapter} paused {_pause(pause)}" for pause in stage.adapter_pauses]
        marks = "; ".join(filter(None, [values.error(stage.quarantine), _disabled(stage), paused, *adapters]))
        why = "; ".join(filter(None, [marks or why, _healed(stage)]))
    return "; ".join(filter(None, [why, f"{unhealable}{cause}".removeprefix(", ")]))


def _healed(stage: Stage) -> str:
    if not stage.HasField("heal_time"):
        return ""
    remaining_s = max(0.0, stage.heal_time.ToNanoseconds() / 1e9 - time.time())
    return f"healed in {values.elapsed(remaining_s)} unless an update comes first"


def _disabled(stage: Stage) -> str:
    if stage.enabled:
        return ""
    return f"disabled: {stage.disabled_reason}" if stage.disabled_reason else "disabled"


def stage_view(stage: Stage) -> View:
    return View(stage, lambda _: _stage_tables(stage), lambda: [_slot(stage)], whole_ids=True)


def model_view(model: Model, stages: Sequence[Stage]) -> View:
    def tables(wide: bool) -> list[Table]:
        about = facts(
            [
                ("Model", model.name),
                ("Version", values.version(model.latest)),
                ("Admitted", values.joined(values.version(version) for version in model.admitted)),
                ("Digest", model.model_digest),
                ("Verified", values.verification(model.verification)),
                ("Checkpoint", model.checkpoint),
                ("Adapters", values.adapters(model.adapters)),
                ("Updatable", values.yes(model.updatable)),
                ("Min healthy", health(model, sum(stage.routable for stage in stages))),
                ("Open update", model.update_id),
                ("Owner", model.update_owner),
                (
                    "Update lease",
                    f"{values.duration(model.update_lease)} left" if model.HasField("update_lease") else "",
                ),
                ("Trainer incarnation", str(model.trainer_incarnation)),
            ]
        )
        return [about, stages_table(stages, wide)] if stages else [about]

    return View(model, tables, lambda: [model.name], whole_ids=True)


def _type(stage: Stage) -> str:
    """Return the worker type of a stage, "" for regular."""
    kind = stage.registration.worker_type
    return "" if kind in (0, WORKER_TYPE_REGULAR) else short_name(WorkerType.DESCRIPTOR, kind)


def _stage_tables(stage: Stage) -> list[Table]:
    registration, report, layout = stage.registration, stage.report, stage.registration.layout
    about = facts(
        [
            ("Slot", registration.slot),
            ("Model", registration.model),
            ("Logical stage", registration.stage),
            ("State", _state(stage)),
            ("Routable", values.yes(stage.routable)),
            ("Why not", why_not(stage)),
            ("Enabled", values.yes(stage.enabled)),
            ("Disabled because", stage.disabled_reason),
            ("Disabled since", values.moment(stage.disable_time)),
            ("Quarantine", values.error(stage.quarantine)),
            ("Version", values.version(report.weight_version)),
            ("Digest", report.model_digest),
            ("Checkpoint", report.checkpoint),
            ("Adapters", values.adapters(report.adapters)),
            ("Open update", report.update_id),
            ("Staging", stage.staging_update_id),
            ("Healed at", values.moment(stage.heal_time)),
            ("Unhealable", "yes: its version has no heal source" if stage.unhealable else ""),
            ("Paused", short_name(PauseMode.DESCRIPTOR, report.pause_mode) if report.paused else ""),
            ("Paused by name", _pause(stage.pause) if stage.HasField("pause") else ""),
            *((f"Adapter {name}", why) for name, why in _paused_adapters(stage)),
            ("Released", values.field(report, report.DESCRIPTOR.fields_by_name["released"])),
            ("Serving lease", _lease(stage)),
            ("Engine failed", values.moment(stage.engine_failure.since)),
            ("Failures in a row", str(stage.engine_failure.failures or "")),
            ("Starts again", _starts_again(stage)),
            ("Incarnation", str(stage.incarnation)),
            ("Boot id", registration.boot_id),
            ("Address", registration.address),
            ("Rollout address", registration.rollout_address),
            ("Data address", registration.data_address),
            ("Engine", registration.engine),
            ("Worker type", short_name(WorkerType.DESCRIPTOR, registration.worker_type)),
            ("Layout", f"TP {layout.tp_size}, PP {layout.pp_size}, DP {layout.dp_size}, EP {layout.ep_size}"),
            ("Last heard", f"{values.duration(stage.last_heard)} ago" if stage.HasField("last_heard") else ""),
        ]
    )
    log = prose(stage.engine_failure.log, title="Last lines of the engine's log")
    return [about, *([log] if log.rows else []), _ranks(stage), _capabilities(registration.capabilities)]


def _lease(stage: Stage) -> str:
    if stage.report.lease_held and not _known(stage):
        return "not known: the lease has not run out yet"
    return values.yes(stage.report.lease_held)


def _starts_again(stage: Stage) -> str:
    failure = stage.engine_failure
    if not failure.reason:
        return ""
    if failure.given_up:
        return f"no, the engine has failed too often; `rlctl restart {_slot(stage)}` starts it"
    moment = values.moment(failure.retry_time)
    if moment and failure.retry_time.ToNanoseconds() / 1e9 <= time.time():
        return f"starting since {moment}"
    return moment or "starting now, or not restarted"


def _ranks(stage: Stage) -> Table:
    rows = [
        [
            str(rank.coordinates.rank),
            str(rank.coordinates.tp),
            rank.coordinates.node,
            rank.coordinates.device,
            str(rank.pid or ""),
            "no" if stage.engine_failure.given_up else values.yes(rank.alive) if _known(stage) else "?",
            rank.reason,
        ]
        for rank in stage.report.ranks
    ]
    return Table(("RANK", "TP", "NODE", "DEVICE", "PID", "ALIVE", "WHY NOT"), rows, frozenset({"WHY NOT"}), "Ranks")


def _capabilities(capabilities: Capabilities) -> Table:
    supported = [
        (field.name.replace("_", " ").capitalize(), values.field(capabilities, field).replace(",", ", "))
        for field in capabilities.DESCRIPTOR.fields
        if field.name != "unsupported"
    ]
    unsupported = [(f"No {name}", why) for name, why in sorted(capabilities.unsupported.items())]
    return facts([*supported, *unsupported], title="Capabilities")


def _slot(stage: Stage) -> str:
    return stage.registration.slot


def _known(stage: Stage) -> bool:
    """Return whether the stage's report of ranks is current: an unreachable stage's ranks are unknown."""
    return stage.state != STAGE_STATE_UNREACHABLE and not stage.engine_failure.given_up


def _alive(stage: Stage) -> str:
    """Return the number of running ranks. 0 for an engine that was given up: the last report is older."""
    if stage.engine_failure.given_up:
        return "0"
    return str(sum(rank.alive for rank in stage.report.ranks)) if _known(stage) else "?"


def _paused_adapters(stage: Stage) -> list[tuple[str, str]]:
    """Return the adapters that are paused by name, or about to be, each with the pause."""
    modes = {paused.name: short_name(PauseMode.DESCRIPTOR, paused.mode) for paused in stage.report.paused_adapters}
    pauses = {pause.adapter: _pause(pause) for pause in stage.adapter_pauses}
    return [
        (
            name,
            f"paused {modes[name]} {pauses.get(name, '')}".rstrip()
            if name in modes
            else f"about to pause {pauses[name]}",
        )
        for name in sorted(modes.keys() | pauses.keys())
    ]


def _pause(pause: Pause) -> str:
    return (
        f"since {values.moment(pause.since)}"
        + f" by {pause.by}" * bool(pause.by)
        + f" until {values.moment(pause.until)}" * pause.HasField("until")
        + f": {pause.reason}" * bool(pause.reason)
    )


def _state(stage: Stage) -> str:
    return values.name_of(StageState.DESCRIPTOR, stage.state)
