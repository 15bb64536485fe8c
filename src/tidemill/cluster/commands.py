"""Commands: everything the driver asks of a worker, as typed protocols that mypy checks on both sides.
`request(WorkerCommands.begin, 8, None)` is a call that can be sent: a channel needs to know no command, and the answer
has the method's own type. In one process it is a plain call."""

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
    from tidemill.reshard.layouts.layout import Layout

P = ParamSpec("P")
R = TypeVar("R")


class HostCommands(Protocol):
    """Answered at once, whatever the worker is doing."""

    def where(self) -> tuple[str, str]:
        """Return the node that it is on, and the address by which others reach it."""
        ...

    def build(self, task: Assignment) -> WorkerReady:
        """Make this process a worker."""
        ...

    def watch(self, seen: int, wait_s: float) -> WorkerReport:
        """Report as soon as something the driver waits for has happened since `seen`, at the latest after `wait_s`."""
        ...

    def stacks(self) -> str: ...

    def look(self) -> str:
        """Return its stacks, seen from outside: it may not be able to answer itself."""
        ...

    def leave(self, ledger: str) -> None:
        """The dock is about to end: end calls to it at once, instead of waiting for it to come back."""
        ...

    def interrupt(self) -> None:
        """End the feeding or the evaluation under way, which then raises `Stopped`: the user wants to stop."""
        ...

    def receive(self, version: int) -> MoveReport:
        """Write a version of the weights aside, while the one before it is served."""
        ...


class WorkerCommands(Protocol):
    """Carried out one after another, in the order in which they were sent, between two pieces of work."""

    def work_on(self, stages: tuple[str, ...]) -> None:
        """Work only on these stages from now on."""
        ...

    def begin(self, first_group: int, tag: str | None) -> None:
        """Begin a new step in every stage."""
        ...

    def share_among(self, rollouts: int) -> None:
        """Set the number of rollout workers that share the work."""
        ...

    def leave_step(self) -> bool:
        """Stop working on the step, unless a gradient would be lost; return whether it has stopped."""
        ...

    def open_step(self, step: int, start: dict[str, Any] | None) -> OpenedStep:
        """Put the rows of a step, and of steps that may begin with it, into the dock. `start`: the data position to
        begin from, for a dock that may lack earlier rows."""
        ...

    def feed_again(self) -> None:
        """Put those rows again whose bytes were lost with a warehouse."""
        ...

    def feed_state(self) -> dict[str, Any]: ...

    def connect(self, dock: DockPlace) -> None:
        """Connect to a new dock, and forget everything held from the old one."""
        ...

    def measure(self) -> tuple[Counted, list[tuple[bool, int]]]:
        """Return what was counted, and for samples that could be shown whether their rewards worked, and their ids."""
        ...

    def write_samples(self, step: int, ids: list[int], file: Path) -> str:
        """Write samples for people to look at; return the first error of a reward among them, or ""."""
        ...

    def write_notes(self, step: int, shown: list[int], run: Path) -> None:
        """Write what the learner made of samples, token by token; of those `shown` when it learns from them."""
        ...

    def evaluate(self, size: int, samples: int, shown: int) -> Evaluation:
        """Evaluate; the result holds the text of the first `shown` answers."""
        ...

    def after_step(self, step: int, measured: dict[str, float]) -> float | None:
        """Update the reference and its coefficient; return the coefficient where it changes."""
        ...

    def hold_kl(self, coef: float) -> None: ...

    def adjust(self, changes: dict[str, float]) -> None:
        """Change some settings, by their keys, from now on."""
        ...

    def save(
        self, folder: Path, step: int, state: dict[str, Any], best: bool, metric: float | None, wait: bool
    ) -> None:
        """Write a checkpoint; with `wait`, return when it is on disk."""
        ...

    def settle(self) -> None:
        """Return when everything that is being written is on disk."""
        ...

    def restore(self, path: Path) -> dict[str, Any]: ...

    def keep_definition(self, run: Path) -> None: ...

    def save_model(self, folder: Path) -> None: ...

    def open_store(self, purpose: str) -> StoreAddress:
        """Open a store for ranks, or for the members of a link, until another is opened for the same purpose."""
        ...

    def join_world(self, where: StoreAddress) -> None: ...

    def join_engine(self, where: StoreAddress) -> None: ...

    def lay_out_experts(self) -> bool:
        """Choose anew where an engine's experts lie; whether any of them moves with the next version."""
        ...

    def describe(self, rank: int, mates: tuple[int, ...]) -> tuple[Layout, Layout]:
        """Return the layouts of what is sent and of what is received, for this rank of a link; `mates`: ranks of its
        engine."""
        ...

    def link(self, link: WeightLink, rank: int) -> None: ...

    def unlink(self) -> None: ...

    def move(self, version: int) -> MoveReport:
        """Send a version of the weights, receive one in place, or both."""
        ...

    def take_up(self, version: int) -> int:
        """Serve the version that was received, from the next token on. Return the bytes that were copied for it where
        none were received: by an engine beside the learner, with weights of its own."""
        ...

    def version(self) -> int: ...

    def count_parameters(self) -> int: ...


@dataclass(frozen=True, slots=True)
class OpenedStep:
    """What the driver needs to know about a step whose rows were put into the dock."""

    first_group: int
    tag: str | None
    starts: dict[int, dict[str, Any]]  # data position before each step that is under way
    state: dict[str, Any]  # data position now
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
        """Run it on the worker that received it. Only commands of the protocols can be requested."""
        if self.name not in DIRECT and self.name not in ORDERED:
            raise ValueError(f"there is no command {self.name!r}")
        answer: R = getattr(host, self.name)(*self.args)
        return answer


def request(command: Callable[Concatenate[Any, P], R], *args: P.args, **_: P.kwargs) -> Request[R]:
    return Request(command.__name__, args)


def _named(protocol: type) -> frozenset[str]:
    return frozenset(name for name in vars(protocol) if not name.startswith("_"))


DIRECT, ORDERED = _named(HostCommands), _named(WorkerCommands)
