"""The names that `import rlctl` offers."""

from __future__ import annotations

import pytest

import rlctl


def test_every_public_name_can_be_imported() -> None:

    for name in rlctl.__all__:
        assert getattr(rlctl, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'conect'"):
        _ = rlctl.conect
