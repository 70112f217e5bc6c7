"""The layers' Rope has the attributes of the operation, with the same defaults."""

from __future__ import annotations

from dataclasses import fields

from irc.frontends.layers import Rope as Settings
from irc.ops import Rope


def test_every_attribute_is_a_field() -> None:
    ours = {field.name: field.default for field in fields(Settings)}
    assert ours.keys() == Rope.attribute_types.keys() - {"head_dim"}
    assert ours.items() <= Rope.attribute_defaults.items()
