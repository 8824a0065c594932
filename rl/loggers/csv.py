"""CSV: `<run>/metrics.csv`, a row for each log call and a column for each metric."""

from __future__ import annotations

import csv
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from rl.loggers import RunInfo

log = logging.getLogger(__name__)


@dataclass
class CSVLogger:
    """First column `env_steps`; a metric seen for the first time adds a column, empty in earlier rows."""

    filename: str
    _path: Path | None = field(default=None, init=False, repr=False)
    _file: TextIO | None = field(default=None, init=False, repr=False)
    _columns: list[str] = field(default_factory=list, init=False, repr=False)
    _rows: int = field(default=0, init=False, repr=False)

    def check(self) -> None:
        """Always works: it needs no package."""

    def open(self, run: RunInfo, state: dict[str, Any] | None) -> None:
        """Start the file, or continue behind the rows `state` counts (no state: those to `run.env_steps`)."""
        self._path = run.path / self.filename
        self._columns, self._rows = ["env_steps"], 0
        if run.env_steps and self._path.exists():
            with self._path.open(newline="") as file:
                reader = csv.reader(file)
                self._columns = next(reader, self._columns)
                if state is not None:
                    kept = list(islice(reader, state["rows"]))
                else:
                    whole = (row for row in reader if len(row) == len(self._columns))  # a kill tears the last
                    kept = [row for row in whole if int(row[0]) <= run.env_steps]
            if state is not None and len(kept) < state["rows"]:
                log.warning("%s: has %d rows, expected %d; going on", self._path, len(kept), state["rows"])
            self._rewrite(kept)
            self._rows = len(kept)
        else:
            self._rewrite([])

    def log(self, env_steps: int, metrics: dict[str, float]) -> None:
        """Append a row; the file is rewritten when a metric is new, which happens a few times a run."""
        assert self._file is not None, "log() outside open() and close()"
        new = [name for name in metrics if name not in self._columns]
        if new:
            assert self._path is not None
            self._file.close()
            self._columns += new
            with self._path.open(newline="") as file:
                self._rewrite(islice(csv.reader(file), 1, None))
        row = [repr(float(metrics[name])) if name in metrics else "" for name in self._columns[1:]]
        self._file.write(f"{env_steps},{','.join(row)}\n")
        self._rows += 1

    def video(self, env_steps: int, path: Path) -> None:
        """A table holds no video."""

    def flush(self) -> None:
        """Hand the rows to the operating system."""
        if self._file is not None:
            self._file.flush()

    def state_dict(self) -> dict[str, Any]:
        """`rows`: the number of rows, all of them on disk."""
        self.flush()
        return {"rows": self._rows}

    def close(self, status: str) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _rewrite(self, rows: Iterable[list[str]]) -> None:
        """Replace the file atomically by the header and `rows`, filled to its width; go on behind them."""
        assert self._path is not None
        temporary = self._path.with_name(self._path.name + ".tmp")
        with temporary.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(self._columns)
            writer.writerows(row + [""] * (len(self._columns) - len(row)) for row in rows)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._path)
        self._file = self._path.open("a", newline="")
