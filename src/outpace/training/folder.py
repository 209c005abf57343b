"""A folder of training data as it lies on the disk: ``meta.json``, and shards ``answers-00000.parquet``, ...

``meta.json`` is written first and says whose answers these are; a shard is whole or not there. The rows of all shards,
in order, are the data: how they are cut into shards means nothing.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from outpace.common.files import StrPath, replacing, write_json
from outpace.common.units import format_bytes
from outpace.errors import DataError
from outpace.training import packages

with packages():
    import pyarrow as pa
    import pyarrow.parquet as pq

FORMAT = 1
META = "meta.json"
SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("source", pa.string()),
        ("sample", pa.int32()),
        ("temperature", pa.float32()),
        ("seed", pa.int64()),
        ("prompt_length", pa.int32()),
        ("tokens", pa.list_(pa.int32())),
        ("finish", pa.string()),
    ]
)


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"answers-{number:05d}.parquet"


def states_path(folder: Path, number: int) -> Path:
    return folder / f"states-{number:05d}.bin"


def read_meta(folder: StrPath) -> dict[str, Any]:
    """Raises DataError that names the file and the remedy."""
    path = Path(folder) / META
    if not path.is_file():
        raise DataError(f"{folder} is no folder of training data (it has no {META}): make one with outpace train data")
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}): make the data again, or restore the file") from error
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        version = meta.get("format") if isinstance(meta, dict) else None
        raise DataError(f"{path} has format {version}, and this version reads {FORMAT}: make the data again")
    for name, kind in (("model", str), ("target", dict), ("options", dict), ("load", dict), ("counts", dict)):
        if not isinstance(meta.get(name), kind):
            raise DataError(f"{path} has no {name}: make the data again, or restore the file")
    return meta


def write_meta(folder: Path, meta: Mapping[str, Any]) -> None:
    write_json(folder / META, meta)


def shards(folder: Path) -> list[Path]:
    """The shards there are, in order. Raises DataError when one is missing between others."""
    found = sorted(folder.glob("answers-*.parquet"))
    for number, path in enumerate(found):
        if path != shard_path(folder, number):
            raise DataError(
                f"{shard_path(folder, number)} is missing, though {found[-1].name} is there: restore it, or remove the "
                "later ones to have their answers made again"
            )
    return found


def read_shard(path: Path, fingerprint: str | None) -> pa.Table:
    """A shard, checked: its pages' checksums, columns, and whose answers it has. Raises DataError that names it."""
    try:
        table = pq.read_table(path, page_checksum_verification=True)
    except (OSError, pa.ArrowException) as error:
        reason = str(error).strip().splitlines()[0]
        raise DataError(
            f"{path} is damaged or no shard ({reason}): remove it and all later ones, and run what made the data again"
        ) from error
    if not table.schema.equals(SCHEMA):
        raise DataError(f"{path} has other columns than a shard of answers: remove it, or make the data again")
    owner = (table.schema.metadata or {}).get(b"target", b"").decode()
    if owner != (fingerprint or ""):
        raise DataError(
            f"{path} has answers of the target {owner or 'without files'}, its folder those of "
            f"{fingerprint or 'one without files'}: move it away"
        )
    return table


def write_shard(path: Path, columns: Mapping[str, list[Any]], fingerprint: str | None) -> None:
    """Whole or not at all. Equal rows make equal bytes. Raises OSError."""
    schema = SCHEMA.with_metadata({"target": fingerprint or ""})
    table = pa.table(dict(columns), schema=schema)
    with replacing(path) as file:
        pq.write_table(table, file, compression="zstd", write_page_checksum=True)


def free_space(path: Path) -> int:
    """Bytes that are free on the disk where ``path`` lies, or will."""
    there = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    return shutil.disk_usage(there).free


@contextmanager
def writing(path: Path, kept: str) -> Iterator[None]:
    """Turn a disk that cannot be written, mostly since it is full, into a DataError. ``kept``: what is safe."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{path} cannot be written ({error.strerror or error}; {format_bytes(free_space(path))} are free there): "
            f"{kept}; make room and run the same command again, and it goes on"
        ) from error
