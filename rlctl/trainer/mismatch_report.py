"""Names the rank with a wrong part of a tensor, after the sources have digested the same parts. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlctl.v1.common_pb2 import ErrorDetail
from rlctl.v1.results_pb2 import Operation, RankResult, StageResult
from rlctl.v1.trainer_pb2 import Sent
from rlctl.v1.verbs_pb2 import TensorPart


def parts_in_question(operation: Operation) -> list[TensorPart]:
    """Return the parts of wrong tensors that the ranks' answers neither confirm nor blame; each once."""
    parts = {
        _key(part): part for result in operation.stage_results for part in map(_open_part, result.rank_results) if part
    }
    return list(parts.values())


def blame_ranks(operation: Operation, digests: Mapping[str, str], answers: Sequence[Sent]) -> None:
    """Name the ranks with differing parts in the results, by the sources' digests of the same parts.

    ``digests`` are the hex digests of the sent tensors, by name. Tensors that changed at the sources since then prove
    nothing and are ignored.
    """
    present_digests = {tensor.name: tensor.sha256 for answer in answers for tensor in answer.digests}
    expected = {
        _key(part): part.digest
        for answer in answers
        for part in answer.parts
        if present_digests.get(part.name) == digests.get(part.name)
    }
    for result in operation.stage_results:
        ranks = []
        name = ""
        for rank in result.rank_results:
            part = _open_part(rank)
            if part is not None and _key(part) in expected:
                part.differs = part.digest != expected[_key(part)]
                if part.differs:
                    name = part.name
                    ranks.append(str(rank.coordinates.rank))
        if ranks:
            note = f"; it is the part of rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)} that differs"
            for error in _errors_about(operation, result, name):
                error.message += note
            result.error.metadata["ranks"] = ",".join(ranks)


def _errors_about(operation: Operation, result: StageResult, tensor: str) -> list[ErrorDetail]:
    """Return the stage's own error and, if that names this tensor at this stage too, the operation's error."""
    is_named = tensor in operation.error.message and result.slot in operation.error.message
    return [result.error, operation.error] if is_named else [result.error]


def _open_part(rank: RankResult) -> TensorPart | None:
    if rank.WhichOneof("data") != "check" or not rank.check.difference.HasField("part"):
        return None
    part = rank.check.difference.part
    return None if part.HasField("differs") else part


def _key(part: TensorPart) -> tuple[str, int, int, int]:
    return part.name, part.dim, part.start, part.length
