"""Files of a user: run once, by whatever name; no registrations after a failure."""

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import irc
from irc.backends.tensorrt.lowering.table import CHOICES
from irc.backends.tensorrt.plugins import SPECS, files_of, load
from irc.driver.sources import find_source
from irc.errors import Error
from irc.extensions import user_files
from irc.frontends.script import load_script
from irc.ir.declare import REGISTRY
from irc.pipeline import PASSES, load_file
from irc.source import shown_path
from tests.user_code import EXAMPLE, restored_registries


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with restored_registries():
        yield


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return Path(shutil.copy(EXAMPLE, tmp_path / "mine.py"))


def test_every_path_of_a_file_is_one_module(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_file(file) == ["soft_cap", "SoftCap"]
    monkeypatch.chdir(file.parent)
    link = file.with_name("link.py")
    link.symlink_to(file)
    assert load(["mine.py", str(link), f"../{file.parent.name}/mine.py"]) == ["SoftCap"] * 3
    (found,) = user_files.files()
    assert found.path == file.resolve() and found.registered["operation"] == ("soft_cap",)
    assert load_script("mine.py").main.returned[0].producer.__class__ is REGISTRY["soft_cap"]
    assert files_of(["example::SoftCap", "IrcCollective"]) == [str(file.resolve())]


def test_other_processes_need_the_file_of_a_plugin() -> None:
    load_script(str(EXAMPLE))
    with pytest.raises(Error, match=r"no file registers the plugin example::SoftCap.*--plugin"):
        files_of(["example::SoftCap"])


def test_a_file_that_fails_registers_nothing_and_can_be_fixed(file: Path) -> None:
    whole = file.read_text()
    file.write_text(whole + "\n\n1 / 0\n")
    line = whole.count("\n") + 3
    known = [*REGISTRY], [*SPECS], [*CHOICES.users]
    for way in (load_file, lambda path: load([path])):
        with pytest.raises(Error, match=rf"mine\.py:{line}: ZeroDivisionError"):
            way(file)
        assert ([*REGISTRY], [*SPECS], [*CHOICES.users]) == known
    file.write_text(whole)
    assert load([file]) == ["SoftCap"] and "soft_cap" in REGISTRY


def test_registrations_of_irc_while_a_file_runs_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries: dict[str, str] = {}
    registry = user_files._Registry(entries, lambda name: {name})  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setitem(user_files._REGISTRIES, "toy", registry)  # pyright: ignore[reportPrivateUsage]
    path = tmp_path / "toys.py"
    text = (
        "from irc.extensions import user_files\nentries = user_files._REGISTRIES['toy'].entries\n"
    )
    text += "entries.update(late='irc.ops.late', own=__name__)\n"
    path.write_text(text + "1 / 0\n")
    with pytest.raises(Error, match=r"toys\.py:4: ZeroDivisionError"):
        user_files.run(path, ("toy",), "has no toys")
    assert entries == {"late": "irc.ops.late"}
    path.write_text(text)
    assert user_files.run(path, ("toy",), "has no toys").registered["toy"] == ("own",)


def test_a_file_without_plugins_that_is_loaded_already_stays(tmp_path: Path) -> None:
    path = tmp_path / "op.py"
    path.write_text(
        "import irc\n@irc.operation('user_files_op')\nclass Mine(irc.Op):\n"
        "    x: irc.Operand\n    def infer(self):\n        return self.x.type\n"
    )
    assert load_file(path) == ["user_files_op"]
    with pytest.raises(Error, match=r"op\.py registers no plugin; call register"):
        load([path])
    assert "user_files_op" in REGISTRY and load_file(path) == ["user_files_op"]


def test_threads_that_load_one_file_run_it_once(file: Path) -> None:
    file.write_text("import time\ntime.sleep(0.05)\n" + file.read_text())
    found: list[object] = []

    def one() -> None:
        try:
            found.append(load([file]))
        except Exception as error:
            found.append(error)

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [["SoftCap"]] * 4


PASS = """
import irc
from irc.pipeline import Pass, register
@register("user-files-pass")
class Mine(Pass):
    def run(self, module, context):
        return module
"""
FUNCTION = "def build(): return irc.trace(lambda x: -x, {'x': irc.Spec('f32', (2,))})\n"


def test_a_script_that_registers_something_is_run_again(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(PASS + FUNCTION)
    for _ in range(2):
        find_source(path)
        assert "user-files-pass" in PASSES, "what is compiled needs it"
    path.write_text(PASS.replace("user-files-pass", "user-files-new") + FUNCTION)
    find_source(path)
    assert "user-files-new" in PASSES and "user-files-pass" not in PASSES
    assert load_file(path) == ["user-files-new"] == load_file(path)
    known = PASSES["user-files-new"]
    find_source(path)
    assert PASSES["user-files-new"] is known, "a loaded file is not run again"


def test_an_imported_file_that_registers_something_is_run_again(tmp_path: Path) -> None:
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        (folder / "sibling_pass.py").write_text(PASS.replace("-pass", f"-{folder.name}"))
        (folder / "model.py").write_text("import irc, sibling_pass\n" + FUNCTION)
    for name in ("a", "a", "b", "b"):
        find_source(tmp_path / name / "model.py")
        assert f"user-files-{name}" in PASSES


def test_a_script_that_is_run_again_calls_its_own_operation(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    text = (
        "import irc\nfrom irc.frontends import functional as F\n"
        "@irc.operation('user_files_op')\nclass Mine(irc.Op):\n"
        "    x: irc.Operand\n    def infer(self):\n        return self.x.type\n"
        "    def evaluate(self, x):\n        return x * 2\n"
    ) + FUNCTION.replace("-x", "F.user_files_op(x)")
    for factor in (2, 3):
        path.write_text(text.replace("* 2", f"* {factor}"))
        found = irc.evaluate(load_script(str(path)), {"x": np.ones(2, np.float32)})
        assert next(iter(found.values())).tolist() == [factor] * 2


def test_a_file_that_is_interrupted_can_be_loaded(tmp_path: Path) -> None:
    path = tmp_path / "slow.py"
    path.write_text(PASS + "raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        load_file(path)
    assert "user-files-pass" not in PASSES
    path.write_text(PASS)
    assert load_file(path) == ["user-files-pass"]


@pytest.mark.parametrize(
    ("folder", "fail"),
    [
        (Path(json.__file__).parents[2], lambda: json.loads("[")),
        (Path(np.__file__).parents[3], lambda: np.linalg.inv(np.zeros((2, 3)))),
    ],
)
def test_a_library_below_the_folder_of_a_script_is_not_blamed(
    folder: Path, fail: Callable[[], object]
) -> None:
    with pytest.raises(Error) as caught, user_files.blamed(folder / "script.py"):
        fail()
    assert str(caught.value).startswith(f"{shown_path(str(folder / 'script.py'))}:1: ")
