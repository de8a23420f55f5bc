"""Bounds of tests that compare products of FP8 codes with the float64 products of their numbers."""

import torch


def sum_error(size, terms, dtype=torch.float32):
    """The error that the sum of a product may have. `size` is the sum of the `terms` |a*b|.

    The CPU adds in fp32. Hopper's tensor cores add 32 products of FP8 codes to a running sum, and
    cut each of them about 14 bits below the largest. Each sum of 128 terms is added in fp32. The
    largest error that was measured is 6.2e-4 of `size`, with products of one sign, which all lose
    in one direction. If `terms` is not a multiple of 16, the codes are decoded first, in chains of
    a 16-bit `dtype` to bf16, which rounds each operand by 2^-9.
    """
    if size.is_cpu:
        return size * terms * 2.0**-24
    return size * (2.0**-8 if terms % 16 and dtype != torch.float32 else 2.0**-10)
