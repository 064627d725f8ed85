"""``rlctl`` with a fake engine that answers at once: ``python -m tools.benchmark.rollout.light stage ...``."""

from __future__ import annotations

from collections.abc import AsyncGenerator

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
from tools.benchmark.rollout.reply import TOKENS


async def at_once(self: FakeEngine, request: GenerateRequest) -> AsyncGenerator[GenerateResponse, None]:
    """Yield all tokens in one message, or each token alone if ``min_new_tokens`` asks for all tokens."""
    step = 1 if request.sampling_params.min_new_tokens == len(TOKENS) else len(TOKENS)
    for end in range(step, len(TOKENS) + 1, step):
        sample = Sample(
            output_ids=TOKENS[end - step : end],
            text="t" * step,
            completion_tokens=end,
            versions=[VersionSpan(version=self._version, start=end - step, end=end)],
        )
        if end == len(TOKENS):
            sample.finish_reason.CopyFrom(FinishReason(type=FINISH_TYPE_LENGTH))
        yield GenerateResponse(rid=request.rid, prompt_tokens=len(request.input_ids.ids), samples=[sample])


if __name__ == "__main__":
    FakeEngine.generate = at_once  # type: ignore[method-assign]
    main()
