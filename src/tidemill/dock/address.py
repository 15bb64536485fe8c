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
    local: str = ""  # the ledger's socket file, for processes of its machine

    def __repr__(self) -> str:  # tokens must not appear in logs
        return f"Address({self.ledger})"

    def save(self, folder: Path) -> None:
        """Write the address for processes of the same user on machines that see the folder."""
        scratch = folder / f"{ADDRESS_FILE}.tmp"
        fd = os.open(scratch, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(self.to_json())
        os.replace(scratch, folder / ADDRESS_FILE)

    def to_json(self) -> str:
        """Return everything that another process needs to connect. It grants access: send it only over private
        channels."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Address:
        return Address(**json.loads(text))

    @staticmethod
    def find(folder: str | Path) -> Address:
        """Read an address from the output of `to_json`, from the file that a dock leaves, or from a folder with such
        a file."""
        if isinstance(folder, str) and folder.lstrip().startswith("{"):
            return Address.from_json(folder)
        for path in (Path(folder), Path(folder) / ADDRESS_FILE, Path(folder) / "dock" / ADDRESS_FILE):
            if path.is_file():
                return Address.from_json(path.read_text())
        raise DockError(
            f"no dock has left its address ({ADDRESS_FILE}) in {folder}",
            "give the folder of a run on workers (cluster.executor=processes or ray) while it goes on",
        )
