"""The sources of the extra inputs of a chain, and the destinations of its extra outputs."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .op import BasicOperation

# An extra input comes from the caller, by index, or from (basic op, slot) of an earlier op.
Source = int | tuple[int, int]


class _Any:
    """A set that contains everything."""

    def __contains__(self, name: object) -> bool:
        return True


ANY: Container[str] = _Any()


class Routes:
    """Extra tensors, in the order of basic ops and slots. Named channels connect them internally.

    A channel in `before` is an input from the caller. A channel in `after` is an output to the
    caller. The ops are then part of a longer chain, or a single op.
    """

    def __init__(
        self,
        ops: Sequence[BasicOperation],
        before: Container[str] = (),
        after: Container[str] = (),
    ) -> None:
        self.sources: list[list[Source]] = []
        self.num_inputs = 0
        # For each extra input from the caller: the op that reads it, and its channel.
        self.readers: list[int] = []
        self.fed: list[str | None] = []
        # (op, slot) of each extra output to the caller, in order. Then its channel, and whether the
        # user requested it.
        self.outputs: list[tuple[int, int]] = []
        self.given: list[tuple[str | None, bool]] = []
        producers: dict[str, tuple[int, int]] = {}
        joined = False
        for i, op in enumerate(ops):
            sources: list[Source] = []
            for slot in range(op.num_extra_inputs):
                name = op._input_channels.get(slot)
                if name in producers:
                    sources.append(producers[name])
                    joined = True
                elif name is None or name in before:
                    sources.append(self.num_inputs)
                    self.readers.append(i)
                    self.fed.append(name)
                    self.num_inputs += 1
                else:
                    raise ValueError(
                        f"{type(op).__name__}: extra input {slot} reads channel {name!r}, which no "
                        "earlier op writes; set it with set_extra_output_channel"
                    )
            self.sources.append(sources)
            for slot in range(op.num_extra_outputs):
                channel, shown = op._output_channels.get(slot, (None, True))
                if channel is not None:
                    if channel in producers:
                        raise ValueError(
                            f"{type(op).__name__}: channel {channel!r} is already written by "
                            "another op; choose another name"
                        )
                    producers[channel] = (i, slot)
                if shown or channel in after:
                    self.outputs.append((i, slot))
                    self.given.append((channel, shown))
        made = any(op.num_extra_outputs for op in ops)
        # Whether there are no extra tensors.
        self.plain = self.num_inputs == 0 and not made and not joined
