"""Where the extra inputs of a chain come from, and where its extra outputs go."""

from __future__ import annotations

from collections.abc import Sequence

from .op import BasicOperation

# An extra input comes from the caller, by number, or from (basic op, slot) of an earlier one.
Source = int | tuple[int, int]


class Routes:
    """Extra tensors, in the order of basic ops and slots; named channels join them inside."""

    def __init__(self, ops: Sequence[BasicOperation]) -> None:
        self.sources: list[list[Source]] = []
        self.num_inputs = 0
        # The op that reads each extra input of the caller.
        self.readers: list[int] = []
        # (op, slot) of the extra outputs the caller sees, in order.
        self.outputs: list[tuple[int, int]] = []
        producers: dict[str, tuple[int, int]] = {}
        used: set[str] = set()
        for i, op in enumerate(ops):
            sources: list[Source] = []
            for slot in range(op.num_extra_inputs):
                name = op._input_channels.get(slot)
                if name is None:
                    sources.append(self.num_inputs)
                    self.readers.append(i)
                    self.num_inputs += 1
                elif name in producers:
                    sources.append(producers[name])
                    used.add(name)
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
                if shown:
                    self.outputs.append((i, slot))
        for op in ops:
            for channel, shown in op._output_channels.values():
                if not shown and channel not in used:
                    raise ValueError(
                        f"{type(op).__name__}: channel {channel!r} is hidden from the caller and "
                        "read by no op; drop output_to_caller=False or the channel"
                    )
        self.plain = self.num_inputs == 0 and not self.outputs and not used
