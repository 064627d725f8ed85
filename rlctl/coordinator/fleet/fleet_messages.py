"""The messages in which watchers get models, stages and changes of the fleet."""

from __future__ import annotations

from rlctl.contract.durations import duration
from rlctl.coordinator.fleet.model_state import ModelState
from rlctl.coordinator.fleet.slot import Slot
from rlctl.v1 import common_pb2
from rlctl.v1.fleet_pb2 import Fleet, Model, Stage


def model_message(model: ModelState, now: float, min_healthy_stages: int) -> Model:
    """Return a model for watchers. ``now``: the clock's."""
    return Model(
        name=model.record.name,
        updatable=model.record.updatable,
        latest=model.record.latest,
        admitted=model.admitted,
        model_digest=model.record.model_digest,
        update_id=model.update_id,
        update_owner=model.update_owner,
        trainer_incarnation=model.record.trainer_incarnation,
        checkpoint=model.record.checkpoint,
        adapters=model.record.adapters,
        verification=model.record.verification if model.record.HasField("verification") else None,
        update_lease=duration(max(0.0, model.lease_until - now)) if model.lease_until is not None else None,
        min_healthy=model.record.min_healthy if model.record.min_healthy.WhichOneof("limit") else None,
        min_healthy_stages=min_healthy_stages,
    )


def stage_message(slot: Slot, now: float) -> Stage:
    """Return a stage for watchers. ``now``: the clock's."""
    heard = now - slot.commander.last_heard if slot.commander else None
    obstacle = slot.not_routable()
    staging = slot.report is not None and slot.report.update_staged
    is_planned = slot.heal_at is not None and now < slot.heal_at and not slot.unhealable
    stage = Stage(
        registration=slot.record.registration,
        incarnation=slot.record.incarnation,
        state=slot.state,
        report=slot.report,
        enabled=slot.record.enabled,
        routable=not obstacle,
        not_routable=obstacle,
        quarantine=slot.quarantine,
        staging_update_id=slot.report.update_id if slot.report is not None and staging else "",
        last_heard=duration(heard) if heard is not None else None,
        unhealable=bool(slot.unhealable),
        engine_failure=slot.failure,
        disabled_reason=slot.record.disabled_reason,
        disable_time=slot.record.disable_time if slot.record.HasField("disable_time") else None,
        pause=slot.pause,
        adapter_pauses=[pause for _, pause in sorted(slot.adapter_pauses.items())],
        heal_time=slot.heal_time if is_planned else None,
    )
    if stage.HasField("report") and not slot.linked and now >= slot.lease_until:
        stage.report.lease_held = False  # the last report is older than the end of the lease
    return stage


def difference(fleet: Fleet, previous: dict[str, bytes]) -> Fleet:
    """Return the models and stages that differ from ``previous``, and update ``previous``."""
    changed = Fleet(header=fleet.header, revision=fleet.revision)
    for model in fleet.models:
        steady = Model()
        steady.CopyFrom(model)
        steady.ClearField("update_lease")
        content = steady.SerializeToString(deterministic=True)
        if previous.get("m:" + model.name) != content:
            previous["m:" + model.name] = content
            changed.models.add().CopyFrom(model)
    for stage in fleet.stages:
        quiet = Stage()
        quiet.CopyFrom(stage)
        quiet.ClearField("last_heard")
        content = quiet.SerializeToString(deterministic=True)
        if previous.get("s:" + stage.registration.slot) != content:
            previous["s:" + stage.registration.slot] = content
            changed.stages.add().CopyFrom(stage)
    keys = {"s:" + stage.registration.slot for stage in fleet.stages}
    for name in [name for name in previous if name.startswith("s:") and name not in keys]:
        # The stage has deregistered. Without this event a watcher would keep the stage.
        stage = changed.stages.add()
        stage.ParseFromString(previous.pop(name))
        stage.state, stage.routable, stage.not_routable = common_pb2.STAGE_STATE_RETIRED, False, "RETIRED"
    return changed
