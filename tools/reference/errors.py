"""docs/reference/errors.md: every reason, with its meaning for a caller and for a script."""

from __future__ import annotations

from collections.abc import Iterator

from rlctl.cli.app.exit_codes import Exit, of_reason
from rlctl.contract.errors import Reason
from tools.reference.markdown import prose, table

_WIRE = """\
On the wire a refusal is a gRPC status with one `google.rpc.ErrorInfo`: `domain` is `rlctl`, `reason` is the name below,
`metadata` holds `field` (path of the offending request field) and `next_step` where there are any. Inside results it
is an `ErrorDetail`. The SDK raises the exception of `rlctl.contract.errors`; `.reason` is the member of `Reason`.

The failure of an accepted operation is no gRPC status. The state and outcomes of the operation report it, the SDK
raises `OperationFailed`, and the command line exits with the code of the state.
"""


def page() -> Iterator[str]:
    """Yield the wire form of errors, the exit codes, every reason."""
    yield "# Errors\n"
    yield from prose(_WIRE)
    yield "## Exit codes\n"
    yield from table(["code", "meaning"], [[str(int(code)), code.meaning] for code in Exit])
    yield (
        "A change whose answer was lost (the connection broke, or the time was up) exits 4 whatever the reason: it may "
        "have happened. Repeat it with its `--request-id`, which runs it at most once.\n"
    )
    yield "## Reasons\n"
    rows = [
        [
            f"`{reason.name}`",
            f"`{reason.exception.status}`",
            f"`{reason.exception.__name__}`",
            str(int(of_reason(reason))),
            reason.meaning,
            reason.next_step,
        ]
        for reason in Reason
    ]
    yield from table(["reason", "status", "exception", "exit code", "meaning", "next step"], rows)
