"""The text that every kernel starts with."""

from pathlib import Path

PRELUDE = Path(__file__).with_name("prelude.cuh").read_text(encoding="utf-8")
