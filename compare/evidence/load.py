"""How much of a machine other processes may use: cores that they keep busy."""

QUIET_CORES = 0.15


def quiet_load(cores: int) -> float:
    """Return the largest load in a turn that counts: a large machine always does something."""
    return max(QUIET_CORES, 0.05 * cores)


def least_load(cores: int) -> float:
    """Return the load that is worth a warning before a measurement: a mail program that wakes up
    now and then keeps fewer cores busy, a compiler more."""
    return max(0.2, 0.05 * cores)


def most_load(cores: int) -> float:
    """Return the largest load during a run that leaves its figures beyond doubt."""
    return 0.1 * cores
