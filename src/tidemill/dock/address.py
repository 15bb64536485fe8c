"""Address: where a dock's ledger listens and the token that opens it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from tidemill.errors import DockError

ADDRESS_FILE = "address.json"


@dataclass(frozen=True, slots=True)
class Address:
    ledger: str  # tcp://host:port
    token: str

    def __repr__(self) -> str:  # a token does not belong in a log
        return f"Address({self.ledger})"

    def save(self, folder: Path) -> None:
        """For processes of the same user on machines that see the folder."""
        scratch = folder / f"{ADDRESS_FILE}.tmp"
        fd = os.open(scratch, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "w") as file:
            json.dump(asdict(self), file)
        os.replace(scratch, folder / ADDRESS_FILE)

    @staticmethod
    def find(folder: str | Path) -> Address:
        for path in (Path(folder), Path(folder) / ADDRESS_FILE, Path(folder) / "dock" / ADDRESS_FILE):
            if path.is_file():
                return Address(**json.loads(path.read_text()))
        raise DockError(f"no dock has left its address in {folder}", f"give a folder with an {ADDRESS_FILE}")
