"""FP8 scales as parameters of CUDA kernels, which are 8-byte integers.

A division by the scale is a multiplication by its inverse and a correction (see
`kvpool.kernels.cuda_convert.divide`). To be right for every scale, it is done with a divisor in
[1, 2): the power of two that this leaves out is multiplied first, which is exact, or beyond the
reach of any code.
"""

from functools import lru_cache

import numpy as np

# Below this, float32 is subnormal, and the power of two that belongs to it is infinite.
SMALLEST_SCALE = float(np.finfo(np.float32).smallest_normal)


@lru_cache(maxsize=4096)
def scale_bits(scale: float) -> int:
    """Return the parameter of `gather_fp8` for a scale: the bits of the float32.

    >>> hex(scale_bits(1.0))
    '0x3f800000'
    """
    return int(np.float32(scale).view(np.uint32))


@lru_cache(maxsize=4096)
def divisor_words(scale: float) -> tuple[int, int]:
    """Return the two parameters of `scatter_fp8` for a scale: the divisor and the power of two.

    Parameters
    ----------
    scale : float
        Positive and finite, rounded to float32 here.

    Returns
    -------
    divisor : int
        The bits of the divisor in [1, 2), those of its inverse above them.
    power : int
        The bits of the float32 that ``scale / divisor`` is the inverse of.

    Raises
    ------
    ValueError
        If float32 cannot hold the scale as a normal number.

    Examples
    --------
    >>> [hex(word) for word in divisor_words(4.0)]  # 1, 1 and 1/4
    ['0x3f8000003f800000', '0x3e800000']
    """
    rounded = np.float32(scale)
    if not (np.isfinite(rounded) and rounded >= SMALLEST_SCALE):
        raise ValueError(f"an FP8 scale must be in {SMALLEST_SCALE} .. 3.4e38, got {scale}")
    mantissa, exponent = np.frexp(rounded)
    divisor = np.float32(mantissa * 2)
    inverse = np.float32(1) / divisor
    power = np.ldexp(np.float32(1), 1 - int(exponent))
    words = int(inverse.view(np.uint32)) << 32 | int(divisor.view(np.uint32))
    return words, int(np.float32(power).view(np.uint32))
