"""The choice of Java, and the error if none is suitable; most are scripts that print a version."""

from pathlib import Path

import pytest

from psqlmessages.pipeline import java
from psqlmessages.pipeline.java import JavaMissing, java_home, use_java
from psqlmessages.pipeline.private_folder import FolderUnsafe, private_folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


def fake(folder: Path, version: str) -> Path:
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2024-01-16' >&2\n")
    program.chmod(0o755)
    return folder


def on_path(home: Path) -> dict[str, str]:
    return {"PATH": str(home / "bin")}


def test_a_good_java_comes_from_java_home_or_the_path_or_the_wheel(tmp_path: Path, cache: Path):
    old, good = fake(tmp_path / "old", "11.0.22"), fake(tmp_path / "good", "17.0.15")
    newer = fake(tmp_path / "newer", "21")
    assert java_home({**on_path(newer), "JAVA_HOME": str(good)}) == good
    environment = {**on_path(good), "JAVA_HOME": str(old)}
    use_java(environment)
    assert environment == on_path(good)
    for version in ("11.0.22", "1.8.0_412", "16"):
        environment = on_path(fake(tmp_path / version, version))
        use_java(environment)
        assert Path(environment["JAVA_HOME"]).is_relative_to(cache)


def test_without_a_suitable_java_the_error_says_what_to_install(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(java, "_find_bundled", lambda: None)
    home = fake(tmp_path / "old", "11.0.22")
    for environment, said in (
        (on_path(home), f"17 or newer, but {home}/bin/java is 11"),
        ({"JAVA_HOME": str(tmp_path), "PATH": ""}, f"{tmp_path}/bin/java does not run: .*No such"),
        ({"PATH": ""}, r"none was found.*pip install 'psqlmessages\[pipeline\]'"),
    ):
        with pytest.raises(JavaMissing, match=said):
            java_home(environment)


def test_a_folder_that_others_can_write_to_or_a_link_is_refused(tmp_path: Path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(FolderUnsafe, match="other users can write"):
        private_folder(tmp_path / "open")
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(FolderUnsafe, match="is not a folder owned by user"):
        private_folder(tmp_path / "link")
