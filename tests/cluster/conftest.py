"""What the tests on several hosts share."""

from collections.abc import Iterator

import pytest
from hosts import Host, hosts


@pytest.fixture(scope="session")
def two_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    """node0 and node1."""
    with hosts(tmp_path_factory.mktemp("cluster") / "hosts") as made:
        yield made
