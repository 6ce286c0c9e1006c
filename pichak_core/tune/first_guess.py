"""What a ramp on one device foretells for an identical one: where its own ramp begins.

A guess only chooses the first size to run. What is kept ran on the device itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

#: What bounds the rows by bytes: only then does another budget mean another number of rows.
_BY_BYTES = frozenset({"memory", "headroom", "paging", "prediction"})


@dataclass(frozen=True)
class FirstGuess:
    """The line through the peaks of a ramp `where`, and the `rows` that fitted there.

    `limited_by` is `RampResult.limited_by`. `base_bytes` and `bytes_per_row` are None where that
    ramp's peaks did not tell a line.
    """

    rows: int
    limited_by: str
    base_bytes: float | None = None
    bytes_per_row: float | None = None
    where: str = ""

    @classmethod
    def from_ramp(cls, record: Mapping[str, Any] | None, where: str) -> FirstGuess | None:
        """From `RampResult.as_dict()` as a node sent it; None where that holds no guess."""
        if not isinstance(record, Mapping):
            return None
        try:
            return cls.from_dict(
                {
                    "rows": record.get("micro_batch_max"),
                    "limited_by": record.get("limited_by"),
                    "base_bytes": record.get("base_bytes"),
                    "bytes_per_row": record.get("bytes_per_row"),
                    "where": where,
                }
            )
        except ValueError:
            return None

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> FirstGuess:
        """The inverse of `as_dict`; `ValueError` says what is wrong."""
        unknown = sorted(
            set(record) - {"rows", "limited_by", "base_bytes", "bytes_per_row", "where"}
        )
        if unknown:
            raise ValueError(f"a first guess has no field {unknown[0]!r}")
        rows = record.get("rows")
        if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
            raise ValueError(f"a first guess is a whole number of rows from 1, not {rows!r}")
        return cls(
            rows,
            str(record.get("limited_by") or ""),
            _bytes(record.get("base_bytes")),
            _bytes(record.get("bytes_per_row")),
            str(record.get("where") or "")[:200],
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)

    def rows_for(self, budget_bytes: int) -> int:
        """The rows to begin with on a device where a peak may be `budget_bytes`."""
        if self.base_bytes is None or not self.bytes_per_row:
            return self.rows
        fitting = max(1, int((budget_bytes - self.base_bytes) // self.bytes_per_row))
        return fitting if self.limited_by in _BY_BYTES else min(fitting, self.rows)


def _bytes(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"a first guess's bytes are {value!r}, not a number")
    return float(value) if value > 0 else None
