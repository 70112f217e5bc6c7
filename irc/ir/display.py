"""How graphs whose `str` is their text are shown in notebooks."""

from html import escape

SHOWN = 200  # lines


class Displayed:
    """Base of such a graph: its repr is one line, behind which a notebook shows the text."""

    def _repr_html_(self) -> str:
        lines = str(self).splitlines()
        if len(lines) > SHOWN:
            lines[SHOWN:] = [f"... {len(lines) - SHOWN} more lines: print() shows all"]
        text = escape("\n".join(lines))
        return (
            f"<details><summary>{escape(repr(self))}</summary>{self._drawing()}"
            f"<pre>{text}</pre></details>"
        )

    def _drawing(self) -> str:
        """What a notebook shows above the text."""
        return ""
