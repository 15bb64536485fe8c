"""Generated cases of real work whose answers can be checked; nothing in them is about a real person or company."""

from __future__ import annotations

from tidemill.data.domains.finance import finance
from tidemill.data.domains.health import health
from tidemill.data.domains.industry import industry
from tidemill.data.domains.records import records
from tidemill.data.domains.replies import replies
from tidemill.data.domains.service import service
from tidemill.data.generators import Generator

GENERATORS: dict[str, Generator] = {
    "finance": finance,
    "health": health,
    "industry": industry,
    "records": records,
    "replies": replies,
    "service": service,
}
