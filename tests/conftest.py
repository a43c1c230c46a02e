"""What holds for all tests."""

import signal


def pytest_configure() -> None:
    """Make a test run end in order by SIGTERM (a time limit, a cancelled job) as by Ctrl-C:
    launched processes and network namespaces go with it. And let what the tests start be
    interrupted though they were themselves started in the background, where SIGINT is ignored."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
