"""A file is replaced as a whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from outpace.common.files import replacing, write_bytes, write_json


def test_a_block_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_bytes(path, b"before")

    def interrupted() -> None:
        with replacing(path) as file:
            file.write(b"after")
            file.flush()
            assert path.read_bytes() == b"before"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert path.read_bytes() == b"before"
    write_json(path, {"\u00e9": 1})
    assert path.read_text(encoding="utf-8") == '{\n "\u00e9": 1\n}\n'
    assert list(tmp_path.iterdir()) == [path]


def test_permissions_are_kept_and_new_files_have_those_asked_for(tmp_path: Path) -> None:
    path, private = tmp_path / "a", tmp_path / "b"
    write_bytes(path, b"")
    write_bytes(private, b"", mode=0o600)
    assert [p.stat().st_mode & 0o777 for p in (path, private)] == [0o644, 0o600]
    path.chmod(0o640)
    write_bytes(path, b"x")
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        write_bytes(tmp_path / "none" / "a", b"")
