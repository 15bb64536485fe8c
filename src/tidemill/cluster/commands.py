"""Commands: all that the driver asks of a worker, as typed protocols that mypy checks on both sides.

`request(WorkerCommands.begin, 8, None)` is a call that can travel: whoever carries it needs to know no command, and
what it answers has the method's own type. In one process it is a plain call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from tidemill.cluster.report import MoveReport, StoreAddress, WorkerReady, WorkerReport

if TYPE_CHECKING:
    from tidemill.cluster.assignment import Assignment, DockPlace, WeightLink
    from tidemill.flow.records import Evaluation
    from tidemill.flow.tally import Counted
    from tidemill.reshard.layout import Layout

P = ParamSpec("P")
R = TypeVar("R")


class HostCommands(Protocol):
    """Answered at once, whatever the worker is at."""

    def where(self) -> tuple[str, str]:
        """The node that it is on, and the address that others reach it by."""
        ...

    def build(self, task: Assignment) -> WorkerReady:
        """Make this process a worker."""
        ...

    def watch(self, seen: int, wait_s: float) -> WorkerReport:
        """As soon as something the driver waits for has happened since `seen`, at the latest after `wait_s`."""
        ...

    def stacks(self) -> str: ...

    def look(self) -> str:
        """Its stacks, seen from outside: it may not be able to answer itself."""
        ...

    def leave(self, ledger: str) -> None:
        """The dock is about to end: what is under way there ends at once, instead of waiting for it to come back."""
        ...

    def receive(self, version: int) -> MoveReport:
        """Write a version of the weights aside, while the one before it is served."""
        ...


class WorkerCommands(Protocol):
    """Carried out one after the other, in the order in which they were sent, between two pieces of work."""

    def work_on(self, stages: tuple[str, ...]) -> None:
        """Only these are worked on from now on."""
        ...

    def begin(self, first_group: int, tag: str | None) -> None:
        """A new step for every stage."""
        ...

    def share_among(self, rollouts: int) -> None:
        """So many workers roll out now."""
        ...

    def leave_step(self) -> bool:
        """Stop working on the step, unless a gradient would be wasted; whether it has stopped."""
        ...

    def open_step(self, step: int, start: dict[str, Any] | None) -> OpenedStep:
        """Put the rows of a step, and of those that may begin with it, into the dock. `start`: where the feed is to
        stand first, for a dock that may lack what was put before."""
        ...

    def feed_again(self) -> None:
        """Put rows again whose bytes were lost with a warehouse."""
        ...

    def feed_state(self) -> dict[str, Any]: ...

    def connect(self, dock: DockPlace) -> None:
        """To a new dock: whatever was held of the old one is forgotten."""
        ...

    def measure(self) -> tuple[Counted, list[tuple[bool, int]]]:
        """What was counted, and of the samples that could be shown whether their rewards worked, and their ids."""
        ...

    def write_samples(self, step: int, ids: list[int], file: Path) -> str:
        """Gives the first error of a reward among them, or ""."""
        ...

    def evaluate(self, size: int, samples: int, shown: int) -> Evaluation:
        """With the first `shown` answers in words."""
        ...

    def after_step(self, step: int, measured: dict[str, float]) -> float | None:
        """Move the reference and its weight; gives the weight where it changes."""
        ...

    def hold_kl(self, coef: float) -> None: ...

    def adjust(self, changes: dict[str, float]) -> None:
        """Hold other values of some settings, by their keys, from now on."""
        ...

    def save(
        self, folder: Path, step: int, state: dict[str, Any], best: bool, metric: float | None, wait: bool
    ) -> None:
        """Write a checkpoint; with `wait`, come back when it is on disk."""
        ...

    def settle(self) -> None:
        """Come back when all that is being written is on disk."""
        ...

    def restore(self, path: Path) -> dict[str, Any]: ...

    def keep_definition(self, run: Path) -> None: ...

    def save_model(self, folder: Path) -> None: ...

    def open_store(self, purpose: str) -> StoreAddress:
        """Where ranks, or the members of a link, meet: until another is opened for the same purpose."""
        ...

    def join_world(self, where: StoreAddress) -> None: ...

    def join_engine(self, where: StoreAddress) -> None: ...

    def describe(self, rank: int, mates: tuple[int, ...]) -> tuple[Layout, Layout]:
        """How what is sent and what is received lies, for this place in a link; `mates`: those of its engine."""
        ...

    def link(self, link: WeightLink, rank: int) -> None: ...

    def unlink(self) -> None: ...

    def move(self, version: int) -> MoveReport:
        """Send a version of the weights, receive it in place, or both."""
        ...

    def take_up(self, version: int) -> None:
        """Serve the version that has come, from the next token on."""
        ...

    def version(self) -> int: ...

    def count_parameters(self) -> int: ...


@dataclass(frozen=True, slots=True)
class OpenedStep:
    """What the driver must know of a step whose rows were put into the dock."""

    first_group: int
    tag: str | None
    starts: dict[int, dict[str, Any]]  # where the feed stood before each step that is under way
    state: dict[str, Any]  # where it stands
    bad_rows: int


@dataclass(frozen=True, slots=True)
class Request(Generic[R]):
    """One command with its arguments."""

    name: str
    args: tuple[Any, ...]

    @property
    def is_direct(self) -> bool:
        return self.name in DIRECT

    def run(self, host: HostCommands | WorkerCommands) -> R:
        """On the worker that it was sent to. Only what the protocols name can be asked for."""
        if self.name not in DIRECT and self.name not in ORDERED:
            raise ValueError(f"there is no command {self.name!r}")
        answer: R = getattr(host, self.name)(*self.args)
        return answer


def request(command: Callable[Concatenate[Any, P], R], *args: P.args, **_: P.kwargs) -> Request[R]:
    return Request(command.__name__, args)


def _named(protocol: type) -> frozenset[str]:
    return frozenset(name for name in vars(protocol) if not name.startswith("_"))


DIRECT, ORDERED = _named(HostCommands), _named(WorkerCommands)
