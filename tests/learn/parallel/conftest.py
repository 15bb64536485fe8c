import pytest

from tests.learn.parallel.crew import Crew


@pytest.fixture(scope="package")
def crew():
    ranks = Crew(8)
    yield ranks
    ranks.close()
