"""Tables of Delta Lake with columns under other names and with deletion vectors, written action by action."""

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq

_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_TYPES = {pa.string(): "string", pa.float64(): "double", pa.int64(): "long", pa.date32(): "date"}
_FEATURES = ["deletionVectors", "columnMapping"]


class MappedTable:
    """A table whose columns are `col-0`, `col-1`, ... in its files, which lie where their names say nothing."""

    def __init__(self, path: Path, schema: pa.Schema, partitions: Sequence[str] = ()) -> None:
        self.path, self.schema, self.partitions = path, schema, partitions
        self.version = 0
        (path / "_delta_log").mkdir(parents=True)
        protocol = {"minReaderVersion": 3, "minWriterVersion": 7}
        protocol |= {"readerFeatures": _FEATURES, "writerFeatures": _FEATURES}
        self._commit({"protocol": protocol}, self._metadata())

    def append(self, name: str, rows: pa.Table, partition: Mapping[str, str | None] | None = None) -> None:
        """Add a file; columns that the rows lack are null in the table."""
        file = self.path / "files" / name
        file.parent.mkdir(exist_ok=True)
        pq.write_table(rows.rename_columns([self._stored(column) for column in rows.column_names]), file)
        values = {self._stored(column): value for column, value in (partition or {}).items()}
        self._commit({"add": self._add(name, values, len(rows))})

    def delete(self, name: str, rows: Sequence[int], partition: Mapping[str, str | None] | None = None) -> None:
        """Mark rows of a file as deleted, by their numbers."""
        values = {self._stored(column): value for column, value in (partition or {}).items()}
        file = self.path / "files" / name
        add = self._add(name, values, pq.read_metadata(file).num_rows) | {"deletionVector": _deletion_vector(rows)}
        remove = {"path": add["path"], "dataChange": True, "deletionTimestamp": 1}
        self._commit({"remove": remove}, {"add": add})

    def add_column(self, field: pa.Field) -> None:
        """Let the table have one more column, which earlier files lack."""
        self.schema = self.schema.append(field)
        self._commit(self._metadata())

    def _metadata(self) -> dict[str, Any]:
        fields = [
            {
                "name": field.name,
                "type": _TYPES[field.type],
                "nullable": True,
                "metadata": {"delta.columnMapping.id": i + 1, "delta.columnMapping.physicalName": f"col-{i}"},
            }
            for i, field in enumerate(self.schema)
        ]
        mode = {"delta.columnMapping.mode": "name", "delta.columnMapping.maxColumnId": str(len(fields))}
        return {
            "metaData": {
                "id": "table",
                "format": {"provider": "parquet", "options": {}},
                "schemaString": json.dumps({"type": "struct", "fields": fields}),
                "partitionColumns": list(self.partitions),
                "configuration": mode | {"delta.enableDeletionVectors": "true"},
                "createdTime": 1,
            }
        }

    def _stored(self, column: str) -> str:
        return f"col-{self.schema.get_field_index(column)}"

    def _add(self, name: str, values: Mapping[str, str | None], rows: int) -> dict[str, Any]:
        path = f"files/{name}"
        return {
            "path": quote(path),
            "partitionValues": dict(values),
            "size": (self.path / path).stat().st_size,
            "modificationTime": 1,
            "dataChange": True,
            "stats": json.dumps({"numRecords": rows}),
        }

    def _commit(self, *actions: Mapping[str, Any]) -> None:
        log = self.path / "_delta_log"
        number = len([*log.glob("*.json")])
        (log / f"{number:020}.json").write_text("\n".join(map(json.dumps, actions)))
        self.version = number


def _deletion_vector(rows: Sequence[int]) -> dict[str, Any]:
    """The rows as a roaring bitmap of one array of 16-bit numbers, in the log itself, in Z85."""
    of_array = struct.pack("<HH", 0, len(rows) - 1) + struct.pack("<I", 16) + struct.pack(f"<{len(rows)}H", *rows)
    bitmap = struct.pack("<II", 12346, 1) + of_array
    data = struct.pack("<IQI", 1681511377, 1, 0) + bitmap
    return {"storageType": "i", "pathOrInlineDv": _z85(data), "sizeInBytes": len(data), "cardinality": len(rows)}


def _z85(data: bytes) -> str:
    data += bytes(-len(data) % 4)
    numbers = [int.from_bytes(data[i : i + 4], "big") for i in range(0, len(data), 4)]
    return "".join(_DIGITS[number // 85**power % 85] for number in numbers for power in range(4, -1, -1))
