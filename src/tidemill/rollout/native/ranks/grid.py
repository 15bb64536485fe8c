"""How the ranks of one engine share its work: stages of layers (pp), replicas that each serve requests of their own
(dp), and ranks that share each token's heads and widths (tp). A mixture's experts are spread over `ep` of the dp · tp
ranks of a stage, neighbours first: inside a replica where ep is at most tp, over several replicas where it is more.

Ranks are numbered stage by stage, replica by replica. Needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tidemill.errors import either
from tidemill.recipe.ranks import divisors

if TYPE_CHECKING:  # an engine alone needs no recipes
    from tidemill.recipe.config import Rollout


class Place(NamedTuple):
    """One rank's coordinates."""

    pp: int
    dp: int
    tp: int


@dataclass(frozen=True, slots=True)
class Grid:
    tp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 0  # 0: as many as a stage has ranks

    def __post_init__(self) -> None:
        if not self.ep:
            object.__setattr__(self, "ep", self.stage)

    @classmethod
    def of(cls, rollout: Rollout) -> Grid:
        return cls(rollout.tp, rollout.dp, rollout.pp, rollout.ep or 0)

    @property
    def stage(self) -> int:
        """Ranks of one stage."""
        return self.dp * self.tp

    @property
    def ranks(self) -> int:
        return self.pp * self.stage

    @property
    def inside(self) -> int:
        """Parts that the experts are cut into among the ranks of one replica."""
        return min(self.ep, self.tp)

    @property
    def joined(self) -> int:
        """Replicas that share one set of experts."""
        return max(1, self.ep // self.tp)

    @property
    def widths(self) -> int:
        """Parts that each expert's width is cut into."""
        return max(1, self.tp // self.ep)

    def place(self, rank: int) -> Place:
        return Place(rank // self.stage, rank // self.tp % self.dp, rank % self.tp)

    def rank(self, pp: int, dp: int, tp: int) -> int:
        return (pp * self.dp + dp) * self.tp + tp

    def part(self, rank: int) -> int:
        """Which of the `ep` parts of the experts a rank holds."""
        at = self.place(rank)
        return (at.dp % self.joined * self.tp + at.tp) // self.widths

    # Ranks that do something together with `rank`, itself included

    def sharing_tokens(self, rank: int) -> tuple[int, ...]:
        at = self.place(rank)
        return tuple(self.rank(at.pp, at.dp, tp) for tp in range(self.tp))

    def exchanging(self, rank: int) -> tuple[int, ...]:
        """Those that hold the other replicas' experts of this rank's share."""
        at = self.place(rank)
        first = at.dp // self.joined * self.joined
        return tuple(self.rank(at.pp, dp, at.tp) for dp in range(first, first + self.joined))

    def replicas(self, rank: int) -> tuple[int, ...]:
        at = self.place(rank)
        return tuple(self.rank(at.pp, dp, at.tp) for dp in range(self.dp))

    def stages(self, rank: int) -> tuple[int, ...]:
        at = self.place(rank)
        return tuple(self.rank(pp, at.dp, at.tp) for pp in range(self.pp))

    def alike(self, rank: int) -> tuple[int, ...]:
        """One of each replica's ranks in each stage."""
        at = self.place(rank)
        return tuple(self.rank(pp, dp, at.tp) for pp in range(self.pp) for dp in range(self.dp))

    def problem(self) -> str:
        """Say why these sizes do not fit each other; "": they do."""
        if self.ep <= self.tp:
            fits = self.tp % self.ep == 0
        else:
            fits = self.ep % self.tp == 0 and self.dp % (self.ep // self.tp) == 0
        if fits:
            return ""
        would = sorted({*divisors(self.tp), *(self.tp * n for n in divisors(self.dp))})
        what = f"{self.ep} parts of the experts do not lie evenly over dp {self.dp} × tp {self.tp} ranks"
        return f"rollout.ep is {self.ep}: {what}; {either(would)} would do"

    def __str__(self) -> str:
        sizes = {"tp": self.tp, "dp": self.dp, "pp": self.pp, "ep": 1 if self.ep == self.stage else self.ep}
        return " × ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one rank"
