"""Chooses the executor that a recipe asks for: what starts its workers, and where. The driver is the same for all."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from tidemill import owned
from tidemill.cluster.driver import placement
from tidemill.cluster.driver.driver import Driver
from tidemill.cluster.start.handle import Starter
from tidemill.cluster.wiring import wire
from tidemill.graph import Graph
from tidemill.observe.run_folder import RunFolder
from tidemill.recipe.config import Config

if TYPE_CHECKING:
    from tidemill.cluster.start.forkserver import Forks


def start(
    config: Config, model_path: Path | None, folder: RunFolder, note: Callable[[str], None] = lambda text: None
) -> Driver:
    """Start a run's workers. `model_path`: a finished warm start. `note` receives what the user should know
    meanwhile."""
    ranks = max(config.cluster.learners, config.learn.parallel.ranks)  # of a learner that is cut
    config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"learners": ranks})})
    with ThreadPoolExecutor(
        1
    ) as beside:  # the table of stages imports torch, the starter joins a cluster: both take seconds
        table = beside.submit(_graph, config)
        starter = make_starter(config, folder, lambda: len(wire(config, table.result()).posts))
    try:
        graph, nodes = table.result(), starter.nodes()
        wiring = wire(config, graph, placement.accelerator_of(config, nodes))
        if not starter.is_here:
            placement.check(wiring, nodes, config.cluster)
        starter.reserve(wiring)
    except BaseException:
        starter.close()
        raise
    driver = Driver(config, model_path, folder, note, starter, wiring, graph)
    try:
        driver.start()
    except BaseException:
        driver.close()
        raise
    return driver


def _graph(config: Config) -> Graph:
    from tidemill.algorithms.shared.registry import graph_of

    return graph_of(config)


def fork_server() -> Forks:
    """Make this run's own, not started yet."""
    from tidemill.cluster.start.forkserver import Forks

    return Forks(owned.make() / "forks")


def make_starter(config: Config, folder: RunFolder, posts: Callable[[], int]) -> Starter:
    """Make the starter. `posts`: how many workers there will be, once the table of stages is known."""
    cluster = config.cluster
    if cluster.executor == "local":
        from tidemill.cluster.start.local import LocalStarter

        return LocalStarter()
    forks = fork_server()
    if cluster.executor == "processes" or cluster.address == "local":
        forks.start()  # first of all, because its imports take longest
    try:
        if cluster.executor == "processes":
            from tidemill.cluster.start.processes import ProcessStarter

            return ProcessStarter(forks)
        from tidemill.cluster.start.ray import RayStarter

        return RayStarter(cluster, folder.config.name, forks, posts)
    except BaseException:
        forks.close()
        raise
