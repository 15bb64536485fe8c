"""No sample is lost between two looks at a reward that is just finishing."""

from concurrent.futures import Future

from tidemill.flow.stages.rewarding import RewardWorker
from tidemill.flow.tally import Tally


class JustFinishing(Future):
    """Done from the second look on: it finished in between."""

    looks = 0

    def done(self) -> bool:
        self.looks += 1
        return self.looks > 1


class Empty:
    def take(self, *args, **kwargs) -> None:
        return None


def test_a_reward_that_finishes_between_two_looks_is_committed() -> None:
    worker = RewardWorker(Empty(), None, str, Tally(), print)
    committed = []
    worker._commit = lambda *scored: committed.append(scored)
    worker.scoring = [("lease", [], JustFinishing())]
    while worker.waits:
        worker.poll()
    assert len(committed) == 1
