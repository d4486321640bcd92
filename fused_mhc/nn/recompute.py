"""Less memory for a group of sublayers: the streams between them are made again in the backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..errors import InputError
from .hyper_connection import HyperConnection, HyperConnectionState

__all__ = ["RecomputedStreams", "recompute_streams"]


class RecomputedStreams(NamedTuple):
    """Result of `recompute_streams`.

    Attributes:
        x: the streams after the last sublayer ``[..., n, C]``.
        bytes_saved: bytes of streams that the backward no longer keeps between the passes.
    """

    x: Tensor
    bytes_saved: int


class _Update(NamedTuple):
    """All that `HyperConnection.post` needs beside the streams: kept by its own backward anyway."""

    connection: HyperConnection
    h_res: Tensor
    h_post: Tensor
    output: Tensor


class _Group:
    """The first streams and one update for each sublayer; any streams in between follow from them."""

    def __init__(self, first: Tensor) -> None:
        self.first = first.detach()
        self.updates: list[_Update] = []
        self._made: dict[int, Tensor] = {}
        self._current: tuple[int, Tensor] = (0, self.first)

    @property
    def bytes_saved(self) -> int:
        """The streams before every sublayer but the first."""
        return max(0, len(self.updates) - 1) * self.first.nbytes

    def enter(self, x: Tensor) -> None:
        """``x`` are the streams before the next sublayer."""
        self._current = (len(self.updates), x.detach())

    def leave(self, state: HyperConnectionState, connection: HyperConnection, output: Tensor) -> None:
        self.updates.append(_Update(connection, state.h_res.detach(), state.h_post.detach(), output.detach()))

    def finish(self) -> None:
        self._current = (0, self.first)

    def pack(self, t: Tensor) -> Tensor | int:
        """The index of the streams in place of the streams themselves; any other tensor as it is."""
        index, x = self._current
        is_streams = index > 0 and t.shape == x.shape and t.data_ptr() == x.data_ptr() and t.dtype == x.dtype
        return index if is_streams else t

    def unpack(self, kept: Tensor | int) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        # The backward comes from the end: streams past the asked ones have been used.
        self._made = {k: x for k, x in self._made.items() if k <= kept}
        start = max(self._made, default=0)
        x = self._made.get(start, self.first)
        with torch.no_grad():
            for k in range(start, kept):
                update = self.updates[k]
                state = HyperConnectionState(residual=x, h_post=update.h_post, h_res=update.h_res)
                x = self._made[k + 1] = update.connection.post(state, update.output)
        return x


def recompute_streams(
    x: Tensor, sublayers: Sequence[tuple[HyperConnection, Callable[[Tensor], Tensor]]]
) -> RecomputedStreams:
    """Run hyper-connected sublayers in a row and keep only the first streams for the backward.

    Without it every sublayer keeps the streams before it (``n*C`` values a token). With it a group keeps the streams
    before its first sublayer, each branch's output and the small mixes; the streams in between are made again in the
    backward by the residual update alone (the branches do not run again), with the same bits. During the backward
    of the group its streams exist once more, so a model is best cut into groups of a few sublayers.

    Args:
        x: streams ``[..., n, C]``.
        sublayers: pairs of a `HyperConnection` and its branch ``[..., C] -> [..., C]``, in order; at least one. A
            branch must not change its result in place afterwards (autograd would not notice).

    Returns:
        The streams after the last sublayer, and the bytes of streams that are no longer kept.

    Raises:
        InputError: ``sublayers`` is empty; ``x`` does not fit the first of them.

    Works in eager mode (``torch.compile`` does not trace hooks on saved tensors).
    """
    if not sublayers:
        raise InputError("sublayers: expected at least one (connection, branch) pair, got none")
    group = _Group(x)
    for connection, branch in sublayers:
        group.enter(x)
        with saved_tensors_hooks(group.pack, group.unpack):
            layer_input, state = connection.pre(x)
        output = branch(layer_input)
        with saved_tensors_hooks(group.pack, group.unpack):
            x = connection.post(state, output)
        group.leave(state, connection, output)
    group.finish()
    return RecomputedStreams(x, group.bytes_saved)
