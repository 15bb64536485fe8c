"""What workers send to the driver: answers, reports, failures. Plain records, so that any channel can carry them."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field
from typing import Any

from tidemill import errors
from tidemill.errors import TidemillError
from tidemill.flow.records import Activity

UNORDERED = -1


class Numbers:
    """Numbers the commands to one process."""

    def __init__(self) -> None:
        self._next = 0

    def next(self, is_direct: bool) -> int:
        if is_direct:
            return UNORDERED
        self._next += 1
        return self._next - 1


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """The address of a store of ranks, and its key. The key grants access: send it only over private channels."""

    address: str
    key: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception in a form that can be sent to another process."""

    kind: str  # the exception's class
    message: str
    remedy: str = ""
    trace: str = ""
    is_users: bool = False  # something the user must fix: a retry would fail again

    @staticmethod
    def of(error: BaseException) -> Failure:
        # Another worker or another interpreter was lost: what is started anew may work.
        passing = errors.DockError | errors.ReshardError | errors.CollectiveError | errors.InterpreterError
        users = isinstance(error, TidemillError) and not isinstance(error, passing)
        message = error.message if isinstance(error, TidemillError) else f"{type(error).__name__}: {error}"
        remedy = error.remedy if isinstance(error, TidemillError) else ""
        trace = "".join(traceback.format_exception(error))
        return Failure(type(error).__name__, message, remedy, trace, users)

    def raised(self, who: str) -> TidemillError:
        """Rebuild the error here, with the worker's name in it."""
        kind = getattr(errors, self.kind, TidemillError)
        kind = kind if isinstance(kind, type) and issubclass(kind, TidemillError) else TidemillError
        made: TidemillError = TidemillError.__new__(kind)
        TidemillError.__init__(made, f"{who}: {self.message}", self.remedy)
        return made


@dataclass(frozen=True, slots=True)
class Answer:
    value: Any = None
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """A worker's state."""

    name: str
    serial: int  # grows when something happened that the driver waits for
    doing: str  # stage or command under way; "" when idle
    since_s: float  # seconds it has been doing that
    moves: int  # pieces of work done so far
    leases: int = 0
    done_group: int = -1  # a learner: the first group of the step that is learned and ended
    version: int = -1  # of the weights that it learns or serves
    operation: str = ""  # what it waits in, with other ranks
    operation_s: float = 0.0
    failure: Failure | None = None
    first_token_s: float | None = None  # seconds since the epoch when the first token was made
    evaluating: Activity | None = None  # the evaluation under way: answers made or scored, and of how many
    compiling: str = ""  # what it is compiling
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A worker's answer once it is built."""

    pid: int
    host: str
    parameters: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class MoveReport:
    """What one worker did to bring a version of the weights over."""

    nbytes: int  # received, or copied within one process
    checked: int  # blocks whose checksums were compared
    seconds: float
