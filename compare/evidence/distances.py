"""How far apart two tensors are, in ulps and relatively: see compare/parity.py."""

from dataclasses import dataclass

import numpy as np

INTEGERS = {2: np.int16, 4: np.int32, 8: np.int64}  # as wide as a float of so many bytes


@dataclass(frozen=True)
class Element:
    """One element of a tensor, in both runs."""

    index: tuple[int, ...]
    a: float
    b: float


@dataclass(frozen=True)
class Distance:
    """How far apart two tensors are."""

    bit_equal: bool
    ulps: int | None  # largest; None: no number can say (see `problem`)
    relative: float | None
    problem: str | None = None  # what no number can say: NaN on one side only, another shape
    same_tensor: bool = True  # False: of another shape or type, or missing in one run
    most_ulps: Element | None = None
    most_absolute: Element | None = None
    magnitude_a: float = 0.0  # largest finite absolute value
    magnitude_b: float = 0.0

    @property
    def equal(self) -> bool:
        return self.ulps == 0

    def within(self, max_ulps: int, relative: float) -> bool:
        if self.ulps is None or self.relative is None:
            return False
        return self.ulps <= max_ulps or self.relative <= relative


def ulp_distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return element by element how many representable numbers apart two arrays are: uint64.

    The bits of a float, read as an integer with a sign, are in the order of the numbers once the
    negative ones are mirrored, and neighbours differ by 1 (B. Dawson, "Comparing Floating Point
    Numbers, 2012 Edition"). Of integers it is the plain difference.
    """

    def ordered(values: np.ndarray) -> np.ndarray:
        if values.dtype.kind != "f":
            return values.astype(np.int64)
        kind = INTEGERS[values.dtype.itemsize]
        bits = values.view(kind).astype(np.int64)
        return np.where(bits < 0, np.iinfo(kind).min - bits, bits)

    x, y = ordered(a), ordered(b)
    # Two's complement: right even where the signed difference of two float64 would overflow.
    return np.maximum(x, y).view(np.uint64) - np.minimum(x, y).view(np.uint64)


def measure(a: np.ndarray, b: np.ndarray) -> Distance:
    """Return how far apart two tensors of the same step are. The relative distance is normwise, in
    the maximum norm (N. Higham, "Accuracy and Stability of Numerical Algorithms", section 6)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        problem = f"{a.dtype}{list(a.shape)} against {b.dtype}{list(b.shape)}"
        return Distance(False, None, None, problem, same_tensor=False)
    shape = a.shape
    a, b = np.ascontiguousarray(a).reshape(-1), np.ascontiguousarray(b).reshape(-1)
    if np.array_equal(a.view(np.uint8), b.view(np.uint8)):
        return Distance(True, 0, 0.0)

    def element(index: int) -> Element:
        where = tuple(int(i) for i in np.unravel_index(index, shape))
        return Element(where, float(a[index]), float(b[index]))

    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    finite = np.isfinite(wide_a) & np.isfinite(wide_b)
    alike = (wide_a == wide_b) | (np.isnan(wide_a) & np.isnan(wide_b))
    magnitude_a, magnitude_b = (
        float(np.abs(values[np.isfinite(values)]).max(initial=0.0)) for values in (wide_a, wide_b)
    )
    odd = np.flatnonzero(~finite & ~alike)
    if odd.size:
        worst = element(int(odd[0]))
        problem = f"{worst.a:.6g} against {worst.b:.6g} in {odd.size} of {a.size} elements"
        return Distance(
            bit_equal=False,
            ulps=None,
            relative=None,
            problem=problem,
            most_ulps=worst,
            most_absolute=worst,
            magnitude_a=magnitude_a,
            magnitude_b=magnitude_b,
        )
    ulps = np.where(finite, ulp_distances(a, b), 0)
    absolute = np.zeros(a.size)
    np.subtract(wide_a, wide_b, out=absolute, where=finite)
    np.abs(absolute, out=absolute)
    farthest, widest = int(ulps.argmax()), int(absolute.argmax())
    scale = max(magnitude_a, magnitude_b)
    return Distance(
        bit_equal=False,
        ulps=int(ulps[farthest]),
        relative=float(absolute[widest] / scale) if scale else 0.0,
        most_ulps=element(farthest),
        most_absolute=element(widest),
        magnitude_a=magnitude_a,
        magnitude_b=magnitude_b,
    )
