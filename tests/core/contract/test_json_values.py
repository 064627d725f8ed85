"""Numbers and flags that come as text."""

from __future__ import annotations

from typing import Any

import pytest

from rlctl.contract.json_values import of_kind


@pytest.mark.parametrize(
    ("value", "kind", "meant"),
    [
        ("29500", int, 29500),
        (" 7 ", int, 7),
        ("-1", int, -1),
        (5.0, int, 5),
        ("0.5", float, 0.5),
        (1, float, 1.0),
        ("true", bool, True),
        ("False", bool, False),
        ("on", bool, True),
        ("0", bool, False),
        (1, bool, True),
        (0.0, bool, False),
    ],
)
def test_a_text_that_means_a_value_is_the_value(value: Any, kind: type, meant: Any) -> None:
    got = of_kind(value, kind)
    assert (got, type(got)) == (meant, kind)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("x", int),
        ("1.5", int),
        ("1_0", int),
        ("٣", int),
        ("9" * 30, int),
        ("9" * 5000, int),
        (1e300, int),
        (True, int),
        (False, float),
        ("nan", float),
        ("inf", float),
        ("maybe", bool),
        (2, bool),
        (None, bool),
        ([1], int),
        ("1", str),
        (1, str),
    ],
)
def test_what_means_no_value_of_the_kind_stays_as_it_is(value: Any, kind: type) -> None:
    assert of_kind(value, kind) is value
