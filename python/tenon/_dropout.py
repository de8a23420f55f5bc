"""Dropout with a counter-based random stream, and L2 normalisation of rows."""

from __future__ import annotations

import os
from collections.abc import Callable
from ctypes import byref
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ._array import F32, Array, array, dtype_named, foldable, line, matrix, place, rows_of
from ._device import Host, common, place_of, result
from ._lib import DropoutArgs, DropoutBackwardArgs, lib


@dataclass
class Random:
    """The state of the random stream. It alone determines which elements a call drops.

    A training call increments `offset` by one. The backward call takes a copy of the state from
    before the forward call. A shard or a tile of a larger tensor sets its position (`row0`, `col0`)
    and the width of the whole tensor (`columns`). It then draws the same numbers as the whole
    tensor would. Without a seed, the operating system provides one.
    """

    seed: int = field(default_factory=lambda: int.from_bytes(os.urandom(8), "little"))
    offset: int = 0
    row0: int = 0
    col0: int = 0
    columns: int = 0  # 0: the width of the tensor of the call

    def __post_init__(self) -> None:
        for name in ("seed", "offset", "row0", "col0", "columns"):
            value = getattr(self, name)
            if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
                raise TypeError(f"Random: {name} is a {type(value).__name__}; it is a whole number")
            if not 0 <= value < 2**64:
                raise ValueError(f"Random: {name} = {value}; it must lie in [0, 2^64)")

    def copy(self) -> Random:
        """A copy of the state, for the backward call or a replay."""
        return replace(self)

    def _numbers(self, cols: int) -> tuple[int, ...]:
        columns = self.columns or self.col0 + cols
        return self.seed, self.offset, self.row0, self.col0, columns


class DropoutGradients(NamedTuple):
    """The results of a backward call. Gradients that were not requested are None."""

    dx: Array
    dbias: Array | None = None
    dresidual: Array | None = None


def bias_dropout_add(
    x: Any,
    bias: Any = None,
    residual: Any = None,
    p: float = 0.0,
    *,
    random: Random | None = None,
    training: bool = True,
    dtype: Any = None,
    precision: str = "native",
    rounding: str = "once",
) -> Array:
    """residual + dropout(x + bias): keeps an element with probability 1-p and divides it by 1-p.

    No mask is stored. `bias_dropout_add_backward` draws the same bits from a copy of `random` made
    before this call. If `training` is False, nothing is dropped.

    >>> random = tenon.Random(seed=1234)
    >>> before = random.copy()
    >>> y = tenon.bias_dropout_add(x, bias, residual, 0.1, random=random)
    >>> dx, dbias, _ = tenon.bias_dropout_add_backward(dy, 0.1, random=before, dbias=True)
    """
    op = "bias_dropout_add"
    given = foldable(array(op, "x", x))
    args = DropoutArgs(p=p, training=int(training))
    owners: dict[str, Any] = {"x": given}  # keeps the memory alive until the call ends
    place(args, x=matrix(given))
    if bias is not None:
        row = line(op, "bias", bias)
        owners["bias"] = row.owner
        place(args, bias=row.c)
    if residual is not None:
        other = foldable(array(op, "residual", residual))
        _same_shape(op, "residual", other.shape, "x", given.shape)
        owners["residual"] = other
        place(args, residual=matrix(other))
    where = common(op, owners.items())
    y = where.empty(given.shape, given.dtype if dtype is None else dtype_named(op, dtype))
    place(args, y=matrix(y))
    numbers = _state(op, random, training, given.shape, where)
    if numbers is not None:
        args.random = numbers
    where.run(lib.tenon_bias_dropout_add, (precision, rounding), byref(args))
    if random is not None and numbers is not None:
        random.offset = (random.offset + 1) % 2**64
    return result(y)


def bias_dropout_add_backward(
    grad: Any,
    p: float = 0.0,
    *,
    random: Random | None = None,
    training: bool = True,
    dbias: bool = False,
    dresidual: bool = False,
    dtype: Any = None,
    precision: str = "native",
    rounding: str = "once",
) -> DropoutGradients:
    """dx = grad/(1-p) for kept elements, else 0. dbias: column sums of dx. dresidual = grad.

    `random` is a copy of the state from before the forward call. It is not changed.
    """
    op = "bias_dropout_add backward"
    g = foldable(array(op, "grad", grad))
    out = g.dtype if dtype is None else dtype_named(op, dtype)
    where = place_of(g)
    dx = where.empty(g.shape, out)
    sums = where.empty((rows_of(g.shape)[1],), out) if dbias else None
    passed = where.empty(g.shape, out) if dresidual else None
    args = DropoutBackwardArgs(p=p, training=int(training))
    place(args, grad=matrix(g), dx=matrix(dx))
    if sums is not None:
        place(args, dbias=matrix(sums, 1, sums.size))
    if passed is not None:
        place(args, dresidual=matrix(passed))
    numbers = _state(op, random, training, g.shape, where)
    if numbers is not None:
        args.random = numbers
    where.run(lib.tenon_bias_dropout_add_backward, (precision, rounding), byref(args))
    return DropoutGradients(result(dx), result(sums), result(passed))


def _state(
    op: str, random: Random | None, training: bool, shape: tuple[int, ...], where: Host
) -> Any:
    if not training:
        return None
    if not isinstance(random, Random):
        what = "missing" if random is None else f"a {type(random).__name__}"
        raise TypeError(
            f"{op}: random is {what}; training needs a state, random=tenon.Random(seed), and "
            "evaluation training=False"
        )
    return where.numbers(random._numbers(rows_of(shape)[1]))


def _same_shape(op: str, name: str, found: object, like: str, wanted: object) -> None:
    if found != wanted:
        raise ValueError(f"{op}: {name} has the shape {found}; it must be {wanted}, that of {like}")


def dropout(
    x: Any, p: float, *, random: Random | None = None, training: bool = True, dtype: Any = None
) -> Array:
    """x/(1-p) for kept elements, 0 for dropped ones. p is the probability of dropping."""
    return bias_dropout_add(x, p=p, random=random, training=training, dtype=dtype)


def dropout_backward(
    grad: Any, p: float, *, random: Random | None = None, training: bool = True, dtype: Any = None
) -> Array:
    """grad/(1-p) for kept elements, else 0. `random`: a copy from before the forward call."""
    return bias_dropout_add_backward(grad, p, random=random, training=training, dtype=dtype).dx


def get_bias_dropout_add(training: bool) -> Callable[..., Array]:
    """`bias_dropout_add` with a fixed value of `training`."""
    return partial(bias_dropout_add, training=training)


class Normalized(NamedTuple):
    """Normalised rows, and r = rsqrt(sum x² + eps) of each row."""

    y: Array
    r: Array


def l2_normalization_forward(
    x: Any, eps: float = 1e-6, *, dtype: Any = None, precision: str = "native"
) -> Normalized:
    """y = x*r with r = rsqrt(sum x² + eps) per row. r is float32 with shape [..., 1]."""
    op = "l2_normalization"
    given = foldable(array(op, "x", x))
    where = place_of(given)
    y = where.empty(given.shape, given.dtype if dtype is None else dtype_named(op, dtype))
    r = where.empty((*given.shape[:-1], 1) if given.ndim else (), F32)
    views = (matrix(given), matrix(y), matrix(r, r.size, 1))
    where.run(lib.tenon_l2_normalization, (precision, "once"), *views, eps)
    return Normalized(result(y), result(r))


def l2_normalization(
    x: Any, eps: float = 1e-6, *, dtype: Any = None, precision: str = "native"
) -> Array:
    """x*rsqrt(sum x² + eps), per row."""
    return l2_normalization_forward(x, eps, dtype=dtype, precision=precision).y


def l2_normalization_backward(
    grad: Any,
    x: Any,
    r: Any = None,
    eps: float = 1e-6,
    *,
    dtype: Any = None,
    precision: str = "native",
) -> Array:
    """dx = r*(grad - x*r²*sum(x*grad)). r is from l2_normalization_forward, or recomputed."""
    op = "l2_normalization backward"
    g, given = foldable(array(op, "grad", grad)), foldable(array(op, "x", x))
    _same_shape(op, "grad", g.shape, "x", given.shape)
    if r is None:
        r = l2_normalization_forward(result(given), eps, precision=precision).r
    rows = line(op, "r", r, column=True)
    where = common(op, (("x", given), ("grad", g), ("r", rows.owner)))
    dx = where.empty(given.shape, given.dtype if dtype is None else dtype_named(op, dtype))
    views = (matrix(g), matrix(given), rows.c, matrix(dx))
    where.run(lib.tenon_l2_normalization_backward, (precision, "once"), *views)
    return result(dx)  # type: ignore[no-any-return]
