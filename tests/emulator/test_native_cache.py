"""The emulator's libraries in the cache: a damaged one would kill the process that loads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hopwell import emulator
from hopwell.emulator import native

CONTENT = bytes(range(256)) * 8


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return an empty cache in the home directory, and the list of builds there."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HOPWELL_CACHE_DIR", "~/a cache")
    return []


def build(made: list[Path]) -> Path:
    def make(path: Path) -> None:
        made.append(path)
        path.write_bytes(CONTENT)

    return native.build("library", "key", make)


def test_built_once_at_home(made: list[Path], tmp_path: Path) -> None:
    assert build(made) == build(made) == tmp_path / "a cache" / "emulator" / "library-key.so"
    assert len(made) == 1


@pytest.mark.parametrize("content", [b"", CONTENT[:100], b"\xff" + CONTENT[1:], None])
@pytest.mark.parametrize("ending", ["", ".sha256"])
def test_a_damaged_one_is_built_again(made: list[Path], content: bytes | None, ending: str) -> None:
    path = Path(f"{build(made)}{ending}")
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    assert build(made).read_bytes() == CONTENT
    assert build(made)
    assert len(made) == 2


@pytest.mark.parametrize("ending", ["", ".sha256"])
def test_a_folder_in_the_place_of_one_is_replaced(made: list[Path], ending: str) -> None:
    path = Path(f"{build(made)}{ending}")
    path.unlink()
    (path / "left").mkdir(parents=True)
    assert build(made).read_bytes() == CONTENT
    assert len(made) == 2


def test_one_that_others_can_write_is_refused(made: list[Path]) -> None:
    build(made).chmod(0o666)
    with pytest.raises(PermissionError, match="can be written by others"):
        build(made)


@pytest.mark.parametrize(
    ("name", "value"),
    [("", "sm_91"), ("_SCHEDULE", "Late"), ("_SEED", "x"), ("_WORKERS", "-1"), ("_CHECKS", "race,Proxy")],
)
def test_settings_are_checked(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"HOPWELL_EMULATE{name}", value)
    with pytest.raises(ValueError, match=f"HOPWELL_EMULATE{name} must be "):
        emulator.options()
