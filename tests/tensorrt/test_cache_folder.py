"""Where the user's engines are kept."""

from pathlib import Path

import pytest

from irc.backends.tensorrt.builder.cache import NoCache, default_folder, open_cache


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("IRC_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)


def test_the_folder_of_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert default_folder() == Path("/home/me/.cache/irc/engines")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert default_folder() == Path("/caches/irc/engines")
    monkeypatch.setenv("IRC_CACHE", "engines")
    assert default_folder() == Path("engines")


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whom no password file knows: `~` stays what it is."""
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    cache, warning = open_cache(None)
    assert isinstance(cache, NoCache)
    assert "no home folder" in warning and "set IRC_CACHE to a folder" in warning
