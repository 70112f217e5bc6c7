"""Checks of modules: their results against those of another module, or a command of the user."""

from __future__ import annotations

import shlex
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

import numpy as np

from ..errors import Error
from ..ir.core import Module
from ..pipeline import Pipeline
from ..pipeline.instruments import CheckNumerics
from ..pipeline.instruments.numerics import Array, Run
from ..text.printer import print_module

Check: TypeAlias = Callable[[Module], str]  # what is wrong with a module, "" if nothing is


class Numerics:
    """Compares the results of modules with those of `module`, for random inputs of small sizes, and
    of models of texts for whole prompts too. `inputs` replace both; see CheckNumerics."""

    def __init__(
        self,
        module: Module,
        inputs: Mapping[str, Array] | None = None,
        tolerance: float | None = None,
        seed: int = 0,
    ) -> None:
        from ..backends.reference import evaluate

        ids = [arg for arg in module.main.args if arg.name == "input_ids" and arg.type.ndim == 2]
        kinds = [CheckNumerics, _Prompts] if ids and inputs is None else [CheckNumerics]
        self.cases = [kind(evaluate, None, inputs, tolerance, seed) for kind in kinds]
        for case in self.cases:
            case.start(module, Pipeline())

    def __call__(self, module: Module, run: Run | None = None) -> str:
        """The first result that differs when `run`, or the reference backend, runs a module; that
        it cannot be run is a difference too."""
        for case in self.cases:
            case.fit(module)
            try:
                difference = case.difference(module, run)
            except Error as error:
                difference = str(error)
            if difference:
                return difference
        return ""

    def on(self, backend: str) -> Check:
        """The same for what another backend computes."""
        from ..driver import compile

        def check(module: Module) -> str:
            with tempfile.TemporaryDirectory(prefix="irc-") as folder:
                built = compile(module, Path(folder) / "a", backend=backend, pipeline="").program
                return self(module, lambda inputs: {**built.run(inputs)})

        return check


class _Prompts(CheckNumerics):
    """Random tokens with the positions, masks and caches that they imply."""

    def draw(self, module: Module, sizes: Mapping[str, int]) -> Mapping[str, Array]:
        from ..backends.base import ports_of
        from ..generation.inputs import cache_range, complete, vocabulary
        from ..generation.random_inputs import table_rows

        random, ports = super().draw(module, sizes), ports_of(module.main)
        rows = vocabulary(ports) or table_rows(module).get("input_ids", 2)
        shape = random["input_ids"].shape
        ids = np.random.default_rng(self.seed).integers(0, rows, shape)
        try:
            return complete(ports, {"input_ids": ids}, cache_range(ports, module.dims))
        except Error:  # it takes other inputs too
            return random


class Command:
    """A shell command about a module, in which {} is the quoted path of a file with its text.

    As a check it exits with 0 for a good module, as for `git bisect run`. `runs` counts its runs.
    """

    def __init__(self, command: str) -> None:
        if "{}" not in command:
            raise Error(f"the command {command!r} has no {{}}, the file of the module")
        self.command, self.runs = command, 0

    def run(self, text: str) -> tuple[int, str, str]:
        """The exit status, the output with {} for the path, and its last line; an Error where the
        command cannot be run the first time."""
        with tempfile.TemporaryDirectory(prefix="irc-") as folder:
            path, words, silent = Path(folder) / "module.irc", self.command, subprocess.DEVNULL
            path.write_text(text, encoding="utf-8")
            for name in ('"{}"', "'{}'", "{}"):
                words = words.replace(name, shlex.quote(str(path)))
            done = subprocess.run(words, shell=True, stdin=silent, capture_output=True, check=False)
        self.runs += 1
        output = (done.stdout + done.stderr).decode(errors="replace").replace(str(path), "{}")
        if self.runs == 1 and done.returncode in (126, 127):  # of the shell
            raise Error(f"the command {self.command!r} cannot be run: {output.strip()}")
        return done.returncode, output, "".join(output.strip().splitlines()[-1:])

    def __call__(self, module: Module) -> str:
        """What is wrong with a module."""
        status, _, said = self.run(print_module(module, locs=True))
        return f"the command exits with {status}{said and f': {said}'}" if status else ""
