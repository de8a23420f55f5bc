"""Calls on sharded arrays: each device computes its part, then sums and maxima are joined.

A call names the axes of its operands and results. The mesh decides how it runs:
- no mesh, or one device: the plain call;
- manual axes (inside shard_map): the plain call, with results that vary as the operands do;
- explicit axes: a shard_map with the specs of the operands;
- automatic axes (jit): custom_partitioning, because only XLA knows the shardings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

Names = tuple[str, ...]
Axes = Mapping[str, Names]  # split axis -> mesh axes that split it


class Split(NamedTuple):
    """How the arrays of a call may be split: a name for each of their axes.

    Operand `main` decides the split. Axes named in `whole` are never split. A result that lacks a
    split axis is the "sum" or the "max" over the devices that split it, or equal on all devices
    ("").
    """

    operands: tuple[Names, ...]
    results: tuple[Names, ...]
    joins: tuple[str, ...]
    main: int
    whole: Names = ()


class Call(Protocol):
    """A function of arrays. Hashable, so that it is compiled once."""

    @property
    def folds(self) -> bool:
        """Whether a batch of calls is one call with one more leading axis."""

    def split(self, *arrays: Any) -> Split | None:
        """How the call may be split. None: it needs whole arrays."""

    def run(self, *arrays: Any, partial: bool = False) -> tuple[Any, ...]:
        """The results. With `partial`, sums are f32, to be added to those of other devices."""


def varying(*arrays: Any) -> frozenset[str]:
    """The manual mesh axes over which any of the arrays varies."""
    return frozenset().union(*(jax.typeof(a).manual_axis_type.varying for a in arrays))


def vary(array: Any, axes: frozenset[str]) -> Any:
    """The array, typed as varying also over `axes`."""
    missing = axes - varying(array) if axes else axes
    return jax.lax.pcast(array, tuple(sorted(missing)), to="varying") if missing else array


def largest(amax: jax.Array, axes: Sequence[str]) -> jax.Array:
    """The maximum over mesh axes, of the bits: NaN is the largest."""
    bits = jax.lax.bitcast_convert_type(amax, jnp.int32)
    return jax.lax.bitcast_convert_type(jax.lax.pmax(bits, tuple(axes)), jnp.float32)


def is_traced(arrays: Sequence[Any]) -> bool:
    """Whether any of the arrays is a tracer."""
    return any(isinstance(a, jax.core.Tracer) for a in arrays)


def _is_shared(array: Any) -> bool:
    return isinstance(array, jax.Array) and len(array.sharding.device_set) > 1


def place(call: Call, *arrays: Any) -> tuple[Any, ...]:
    """call.run(*arrays), on each device for its part if possible."""
    if not is_traced(arrays) and not any(map(_is_shared, arrays)):
        return call.run(*arrays)
    split = call.split(*arrays)
    if split is None or any(0 in a.shape for a in arrays):
        return call.run(*arrays)
    if not is_traced(arrays):
        return _compiled(call, *arrays)
    typed = jax.typeof(arrays[split.main]).sharding
    if any(typed.spec):
        return _explicit(call, split, typed, arrays)
    if AxisType.Manual in typed.mesh.axis_types:
        return call.run(*arrays)
    return _automatic(call, split)(*arrays)


_compiled = jax.jit(place, static_argnums=0)


def _axes(split: Split, names: Names, spec: PartitionSpec) -> dict[str, Names]:
    found = {}
    for name, over in zip(names, spec, strict=False):
        over = (over,) if isinstance(over, str) else over
        if over and name not in split.whole:
            found[name] = tuple(over)
    return found


def _spec(names: Names, axes: Axes) -> PartitionSpec:
    return PartitionSpec(*(axes.get(name) for name in names))


def _part(call: Call, split: Split, axes: Axes) -> Callable[..., tuple[Any, ...]]:
    """The call on the part of one device, with the common results joined."""
    over = [[a for n, of in axes.items() if n not in names for a in of] for names in split.results]

    def run(*arrays: Any) -> tuple[Any, ...]:
        adds = any(how == "sum" and o for how, o in zip(split.joins, over, strict=True))
        results = list(call.run(*arrays, partial=adds))
        for i, (how, o) in enumerate(zip(split.joins, over, strict=True)):
            if how == "sum" and adds:
                total = jax.lax.psum(results[i], tuple(o)) if o else results[i]
                results[i] = total.astype(arrays[split.main].dtype)
            elif how == "max" and o:
                results[i] = largest(results[i], o)
        return tuple(results)

    return run


def _explicit(
    call: Call, split: Split, typed: NamedSharding, arrays: Sequence[Any]
) -> tuple[Any, ...]:
    like = split.operands[split.main]
    axes = _axes(split, like, typed.spec)
    operands, out = (
        tuple(_spec(names, axes) for names in side) for side in (split.operands, split.results)
    )
    parts = _part(call, split, axes)
    if axes:
        parts = jax.shard_map(
            parts,
            mesh=typed.mesh,
            in_specs=operands,
            out_specs=out,
            axis_names={a for over in axes.values() for a in over},
            check_vma=False,
        )
    results = parts(
        *(
            jax.sharding.reshard(a, NamedSharding(typed.mesh, s))
            for a, s in zip(arrays, operands, strict=True)
        )
    )
    # Results also vary over manual axes outside this mesh. A gradient has its operand's type.
    outer = varying(*arrays)
    results = tuple(vary(r, outer) for r in results)
    return tuple(
        jax.sharding.reshard(r, typed) if names == like else r
        for r, names in zip(results, split.results, strict=True)
    )


def _automatic(call: Call, split: Split) -> Callable[..., tuple[Any, ...]]:
    divided = custom_partitioning(lambda *arrays: call.run(*arrays))

    def partition(mesh: Mesh, operands: Any, results: Any) -> Any:
        axes: Axes = {}
        if mesh.empty:  # shardings without names: nothing is split
            devices = operands[0].sharding.device_set
            mesh = Mesh(np.array(sorted(devices, key=lambda d: d.id)), ("devices",))
        else:
            chosen = [(split.operands[split.main], operands[split.main])]
            chosen += zip(split.results, results, strict=True)
            for names, shaped in chosen:
                axes = axes or _even(_axes(split, names, shaped.sharding.spec), mesh, names, shaped)
        shardings = [
            tuple(NamedSharding(mesh, _spec(names, axes)) for names in side)
            for side in (split.results, split.operands)
        ]
        return mesh, _part(call, split, axes), *shardings

    rule = [", ".join(map(" ".join, side)) for side in (split.operands, split.results)]
    divided.def_partition(
        partition,
        sharding_rule=" -> ".join(rule),
        need_replication_factors=split.whole,
    )
    batched = jax.custom_batching.custom_vmap(lambda *arrays: divided(*arrays))

    @batched.def_vmap
    def batch(size: int, mapped: Sequence[bool], *arrays: Any) -> Any:
        if call.folds:
            whole = [
                a if m else jnp.broadcast_to(a, (size, *a.shape))
                for a, m in zip(arrays, mapped, strict=True)
            ]
            results = place(call, *whole)
        else:

            def one(elements: Sequence[Any]) -> tuple[Any, ...]:
                rest = iter(elements)
                return place(
                    call, *(next(rest) if m else a for a, m in zip(arrays, mapped, strict=True))
                )

            given = [a for a, m in zip(arrays, mapped, strict=True) if m]
            results = jax.lax.map(one, given)
        return results, (True,) * len(results)

    return batched


def _even(axes: Axes, mesh: Mesh, names: Names, shaped: Any) -> Axes:
    """The `axes` that divide evenly. XLA pads other parts, and padding must not be summed."""
    return {
        name: over
        for name, over in axes.items()
        if shaped.shape[names.index(name)] % int(np.prod([mesh.shape[a] for a in over])) == 0
    }
