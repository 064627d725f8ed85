"""Which weights a stage may be told to be the latest version, and what the first version of a model is."""

from __future__ import annotations

from typing import Any, cast

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from rlctl.command_stream.commander import Commander
from rlctl.coordinator.fleet import versions
from rlctl.coordinator.fleet.model_state import ModelState
from rlctl.coordinator.fleet.roster import Roster
from rlctl.coordinator.fleet.slot import Slot
from rlctl.v1 import common_pb2 as common
from rlctl.v1.common_pb2 import STAGE_STATE_READY, STAGE_STATE_STALE, StageState, WeightVersion
from rlctl.v1.fleet_pb2 import Capabilities, StageRegistration, StageReport
from rlctl.v1.journal_pb2 import ModelRecord, SlotRecord
from rlctl.v1.verbs_pb2 import Adapter

FIRST = WeightVersion(label="now", sequence=1)
LATEST = WeightVersion(label="now", sequence=5)
NOW = Timestamp(seconds=1)
UNUSABLE = (
    common.STAGE_STATE_UNSPECIFIED,
    common.STAGE_STATE_JOINING,
    common.STAGE_STATE_UPDATING,
    common.STAGE_STATE_DIRTY,
    common.STAGE_STATE_ASLEEP,
)


def slot(label: str = "", **said: Any) -> Slot:
    registration = StageRegistration(slot="a", model="actor", weight_version=label)
    return Slot(SlotRecord(registration=registration), report=StageReport(**{"state": STAGE_STATE_STALE} | said))


def fleet(**known: Any) -> Roster:
    slots = dict(enumerate(known.pop("others", ())))
    record = ModelRecord(**{"name": "actor", "latest": LATEST, "former_labels": ["was", "now"]} | known)
    return cast(Roster, type("Fleet", (), {"models": {"actor": ModelState(record)}, "slots": slots})())


def adoptable(said: Slot, **known: Any) -> bool:
    return versions.adoptable(fleet(**known), said)


def learnt(said: Slot, **known: Any) -> bool:
    """Whether the model takes its first version's digest over from the stage."""
    record = versions.first_digest(fleet(**known), said)
    return record is not None and record.model_digest == said.report.model_digest


@pytest.mark.parametrize(
    ("known", "said", "adopted"),
    [
        ({"model_digest": "d"}, {"model_digest": "d"}, True),
        ({"model_digest": "d"}, {"model_digest": "other"}, False),
        # A checkpoint of that name may have been written anew: where there are digests, they alone count.
        ({"model_digest": "d", "checkpoint": "/c"}, {"model_digest": "other", "checkpoint": "/c"}, False),
        ({"model_digest": "d", "checkpoint": "/c"}, {"checkpoint": "/c"}, False),
        ({"checkpoint": "/c"}, {"model_digest": "d", "checkpoint": "/c"}, False),
        ({"checkpoint": "/c"}, {"checkpoint": "/c"}, True),
        ({"checkpoint": "/c"}, {"checkpoint": "/other"}, False),
        ({}, {}, False),
        ({"model_digest": "d", "latest": WeightVersion()}, {"model_digest": "d"}, False),
    ],
)
def test_weights_are_the_latest_version_by_their_digest_or_without_one_by_their_checkpoint(
    known: dict[str, Any], said: dict[str, Any], *, adopted: bool
) -> None:
    assert adoptable(slot(**said), **known) == adopted
    for state in UNUSABLE:
        assert not adoptable(slot(**said, state=state), **known)


DIGESTS = Capabilities(verification=[common.VERIFICATION_LEVEL_EXPECTED])


def peer(capabilities: Capabilities, held: WeightVersion | None, state: StageState.ValueType) -> Slot:
    """``held``: None for one that has said nothing yet."""
    registration = StageRegistration(slot="b", model="actor", capabilities=capabilities)
    there = cast(Commander, type("Link", (), {"lost": False})())
    report = StageReport(state=state, weight_version=held) if held is not None else None
    return Slot(SlotRecord(registration=registration), there, report)


@pytest.mark.parametrize(
    ("can", "others", "adopted"),
    [
        (Capabilities(), [], {"model", "stage"}),
        # What can digest is healed, which tells: it, or one that it is compared with.
        (DIGESTS, [], {"stage"}),
        (Capabilities(), [(DIGESTS, FIRST, common.STAGE_STATE_READY)], {"model"}),
        # These can be compared with nothing.
        (Capabilities(), [(Capabilities(), FIRST, common.STAGE_STATE_READY)], {"model", "stage"}),
        (Capabilities(), [(DIGESTS, WeightVersion(), common.STAGE_STATE_STALE)], {"model", "stage"}),
        (Capabilities(), [(DIGESTS, WeightVersion(), common.STAGE_STATE_DIRTY)], {"model", "stage"}),
        # This one can tell later.
        (Capabilities(), [(DIGESTS, FIRST, common.STAGE_STATE_ASLEEP)], {"model"}),
        (Capabilities(), [(DIGESTS, None, common.STAGE_STATE_UNSPECIFIED)], {"model"}),
    ],
)
def test_where_one_side_has_a_digest_and_nobody_can_compare_the_first_version_is_its_checkpoint(
    can: Capabilities, others: list[tuple[Any, ...]], adopted: set[str]
) -> None:
    """``adopted``: by which of the two it is known, the digest of the model or of the stage."""
    for knows, decided in (("model", adoptable), ("stage", learnt)):
        known: dict[str, Any] = {"checkpoint": "/c", "latest": FIRST, "others": [peer(*other) for other in others]}
        said = slot(checkpoint="/c", model_digest="d" * (knows == "stage"))
        said.record.registration.capabilities.CopyFrom(can)
        known["model_digest"] = "d" * (knows == "model")
        assert decided(said, **known) == (knows in adopted)
        assert not decided(said, **known | {"latest": LATEST})
        assert not decided(said, **known | {"checkpoint": "/other"})


KEY = bytes(16)
KEYED, OTHER = f"{'a' * 64}@{KEY.hex()}", f"{'b' * 64}@{KEY.hex()}"


@pytest.mark.parametrize(
    ("computed", "needed", "adopted"),
    [
        ({}, True, False),
        ({KEY: KEYED}, False, True),
        ({KEY: OTHER}, False, False),
        ({KEY: ""}, False, False),
        ({b"1" * 16: KEYED}, True, False),
    ],
    ids=["not computed", "equal", "different", "failed", "another key"],
)
@pytest.mark.parametrize("first", ["", "c" * 64], ids=["no digest", "SHA-256"])
def test_first_weights_are_a_version_with_a_keyed_digest_by_that_digest_only(
    first: str, computed: dict[bytes, str], *, needed: bool, adopted: bool
) -> None:
    said = slot(model_digest=first, checkpoint="/c")
    said.keyed_digests = computed
    said.record.registration.capabilities.CopyFrom(DIGESTS)
    said.record.registration.capabilities.keyed_digests = True
    known = {"model_digest": KEYED, "checkpoint": "/c"}
    assert (versions.needs_keyed_digest(fleet(**known), said), adoptable(said, **known)) == (needed, adopted)
    assert not versions.needs_keyed_digest(fleet(model_digest="d" * 64), said)
    assert not adoptable(said, model_digest="d" * 64)
    at_version = slot(weight_version=FIRST)
    at_version.record.CopyFrom(said.record)
    assert not versions.needs_keyed_digest(fleet(**known), at_version)
    assert said.report is not None
    for state in UNUSABLE:
        said.report.state = state
        assert not versions.needs_keyed_digest(fleet(**known), said)
        assert not adoptable(said, **known)
    said.report.state = STAGE_STATE_STALE
    said.record.registration.capabilities.keyed_digests = False
    assert not versions.needs_keyed_digest(fleet(**known), said)


def test_a_version_takes_the_digest_of_the_first_stage_that_has_one_and_is_at_it_by_name() -> None:
    known: dict[str, Any] = {"checkpoint": "/c", "latest": FIRST}
    said = slot(checkpoint="/c", model_digest="d")
    assert not adoptable(said, **known)  # before that is on record
    record = versions.first_digest(fleet(**known), said)
    assert record is not None
    assert adoptable(said, **known | {"model_digest": record.model_digest})
    assert not adoptable(slot(checkpoint="/c", model_digest="e"), **known | {"model_digest": record.model_digest})
    assert not learnt(slot(checkpoint="/c", model_digest="e"), **known | {"model_digest": "d"})
    assert not learnt(slot(checkpoint="/c", model_digest="d", weight_version=FIRST), **known)
    assert not learnt(slot(model_digest="d"), latest=FIRST)
    gone = peer(DIGESTS, None, common.STAGE_STATE_UNSPECIFIED)
    gone.record.retired = True
    assert learnt(said, **known, others=[gone])
    for state in UNUSABLE:
        assert not learnt(slot(checkpoint="/c", model_digest="d", state=state), **known)


@pytest.mark.parametrize(
    ("held", "adopted"),
    [
        (WeightVersion(label="was", sequence=5), True),
        (WeightVersion(label="never", sequence=5), False),
        (WeightVersion(label="was", sequence=4), False),
        (LATEST, False),
    ],
)
def test_a_stage_at_a_version_is_told_another_label_of_it_and_no_other_version(
    held: WeightVersion, *, adopted: bool
) -> None:
    assert adoptable(slot(weight_version=held, model_digest="d"), model_digest="d") == adopted


def test_a_stage_that_has_said_nothing_holds_nothing() -> None:
    silent = Slot(SlotRecord(registration=StageRegistration(slot="a", model="actor")))
    assert not adoptable(silent, model_digest="d")
    assert versions.first_version(ModelState(ModelRecord(name="actor")), silent, NOW) is None


def test_the_first_version_is_what_the_first_stage_has_loaded_or_has_been_brought_to() -> None:
    model = ModelState(ModelRecord(name="actor", group_generation=3, reserved_sequence=1))
    fresh = versions.first_version(model, slot(model_digest="d", checkpoint="/c"), NOW)
    assert fresh is not None
    assert (fresh.latest, fresh.reserved_sequence) == (WeightVersion(label="initial", sequence=1), 1)
    assert (fresh.model_digest, fresh.checkpoint, fresh.group_generation) == ("d", "/c", 3)
    named = versions.first_version(model, slot("base"), NOW)
    assert named is not None
    assert named.latest.label == "base"
    # Another coordinator was here: its groups may stand, and its sequences are used.
    used = versions.first_version(model, slot("base", weight_version=LATEST, state=STAGE_STATE_READY), NOW)
    assert used is not None
    assert (used.latest, used.reserved_sequence, used.group_generation) == (LATEST, 5, 1000)
    # The fleet was started over: the numbers go on.
    over = ModelState(ModelRecord(name="actor", first_sequence=12))
    assert versions.reserved(over, 2).reserved_sequence == 13, "12 is the first version's"
    twelfth = versions.first_version(over, slot(model_digest="d"), NOW)
    assert twelfth is not None
    assert (twelfth.latest, twelfth.reserved_sequence) == (WeightVersion(label="initial", sequence=12), 12)
    assert versions.first_version(ModelState(used), slot(model_digest="d"), NOW) is None
    for state in UNUSABLE:
        assert versions.first_version(model, slot(model_digest="d", state=state), NOW) is None


def test_what_a_version_leaves_behind() -> None:
    before = ModelState(ModelRecord(name="actor", latest=LATEST, former_labels=["was"], reserved_sequence=5))
    assert versions.reserved(ModelState(ModelRecord()), 2).reserved_sequence == 2, "1 is the first version's"
    reserved = versions.reserved(before, 2)
    assert (reserved.reserved_sequence, reserved.trainer_incarnation, reserved.latest) == (6, 2, LATEST)
    after = WeightVersion(label="next", sequence=6)
    evidence = common.Verification(held=common.VERIFICATION_LEVEL_EXPECTED, computed=common.VERIFICATION_LEVEL_NONE)
    record = versions.published(before, after, model_digest="d", checkpoint="/c", now=NOW, verification=evidence)
    assert record.verification == evidence
    assert (record.latest, list(record.former_labels), record.model_digest, record.checkpoint) == (after, [], "d", "/c")
    assert [(v.version, v.checkpoint) for v in versions.history(record)] == [(after, "/c"), (LATEST, "")]
    assert versions.history(record)[0].publish_time == NOW
    assert versions.history(ModelRecord(name="actor")) == []
    with pytest.raises(AssertionError):
        versions.published(before, LATEST, model_digest="", checkpoint="", now=NOW, verification=evidence)
    versions.publish(before, record, [LATEST])
    assert (before.record, before.admitted) == (record, [LATEST, after])
    versions.close(before)
    assert before.admitted == [after]
    later = record
    for sequence in range(7, 7 + 2 * versions.HISTORY):
        later = versions.published(
            ModelState(later),
            WeightVersion(label="n", sequence=sequence),
            model_digest="",
            checkpoint="",
            now=NOW,
            verification=evidence,
        )
    kept = [v.version.sequence for v in versions.history(later)]
    assert kept == list(range(6 + 2 * versions.HISTORY, 5 + versions.HISTORY, -1))


def test_an_adapter_is_lacking_at_another_version_and_surplus_only_where_something_is_held() -> None:
    model = ModelState(ModelRecord(name="actor", latest=LATEST))
    for name, version in (("b", "1"), ("b", "2"), ("a", "1"), ("e", "1")):
        model.record = versions.with_adapter(model, Adapter(name=name, version=version))
    assert [(each.name, each.version) for each in model.record.adapters] == [("a", "1"), ("b", "2"), ("e", "1")]
    assert model.record.latest == LATEST
    roster = cast(Roster, type("Models", (), {"models": {"actor": model}})())
    held = slot(adapters=[Adapter(name=name, version=version) for name, version in ("a1", "b1", "c1", ("d", ""))])
    assert [each.name for each in versions.lacking(roster, held)] == ["b", "e"]
    assert [each.name for each in versions.surplus(roster, held)] == ["c"]
    silent = Slot(SlotRecord(registration=StageRegistration(slot="a", model="actor")))
    assert versions.lacking(roster, silent) == versions.surplus(roster, silent) == []
    model.record = versions.without_adapter(model, "b")
    assert [each.name for each in model.record.adapters] == ["a", "e"]
