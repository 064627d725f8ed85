"""``rlctl`` whose fake engine answers at once, in one message: ``python -m rlctl.bench.rollout.light stage ...``."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from rlctl.bench.rollout.reply import TOKENS
from rlctl.cli.main import main
from rlctl.testing.fake_engine import FakeEngine
from rlctl.v1.rollout_pb2 import (
    FINISH_TYPE_LENGTH,
    FinishReason,
    GenerateRequest,
    GenerateResponse,
    Sample,
    VersionSpan,
)


async def at_once(self: FakeEngine, request: GenerateRequest) -> AsyncGenerator[GenerateResponse, None]:
    """All tokens."""
    yield GenerateResponse(
        rid=request.rid,
        prompt_tokens=len(request.input_ids.ids),
        samples=[
            Sample(
                output_ids=TOKENS,
                text="t" * len(TOKENS),
                completion_tokens=len(TOKENS),
                versions=[VersionSpan(version=self._version, start=0, end=len(TOKENS))],
                finish_reason=FinishReason(type=FINISH_TYPE_LENGTH),
            )
        ],
    )


if __name__ == "__main__":
    FakeEngine.generate = at_once  # type: ignore[method-assign]
    main()
