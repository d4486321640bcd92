"""The work of every task type in torch: native's tile functions on the buffers of a Program.

A body reads and writes exactly what the stage table says. An input that is None is absent: gradients nobody
has, and at the first site of a chain (``entry``) the output and mixes of a site before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fused_mhc.ops._native import stream_sum, tree_sum
from fused_mhc.ops.h_aggregate.native import aggregate_dot_tile, aggregate_tile
from fused_mhc.ops.h_post_bda.native import residual_dot_tile, unmix_tile
from fused_mhc.ops.mega_mhc.native import (
    mixes_bwd_tile,
    mixes_tile,
    norm_bwd_tile,
    norm_tile,
    total_grad_tile,
    update_tile,
)
from fused_mhc.ops.proj_rms_compute_h.native import group_sums, rms_scale, spread_alphas
from fused_mhc.scheduler import Program, TaskType

from .buffers import DTYPES

__all__ = ["BODIES", "Settings", "TileState"]


@dataclass(frozen=True)
class Settings:
    """The scalars of one call."""

    hc_eps: float = 1e-6
    norm_eps: float = 1e-6
    num_iters: int = 20


class TileState:
    """Buffers, sizes and shared operands (cast once) of one run."""

    def __init__(self, program: Program, memory: dict[str, Tensor | None], settings: Settings) -> None:
        self.memory, self.settings = memory, settings
        self.tasks = program.tasks
        geometry = program.geometry
        self.geometry = geometry
        self.n, self.width = geometry["num_streams"], geometry["hidden_size"]
        self.count, self.tile = geometry["token_count"], geometry["token_tile"]
        self.dtype = DTYPES[program.buffer("u").dtype]
        self.phi, self.bias = self["phi"].to(self.dtype), self["bias"].to(self.dtype)
        self.alpha = spread_alphas(self["alpha"].split(1), self.n, self.dtype)
        weight = memory.get("norm_weight")
        self.norm_weight = None if weight is None else weight.to(self.dtype)
        self.partials = [buffer.name for buffer in program.buffers if buffer.role == "partial"]

    def __getitem__(self, name: str) -> Tensor:
        """A buffer that must be there."""
        tensor = self.memory[name]
        assert tensor is not None, f"{name} is absent"
        return tensor

    def get(self, name: str, rows: slice) -> Tensor | None:
        """Rows of a buffer in the compute dtype, or None where it is absent."""
        tensor = self.memory.get(name)
        return None if tensor is None else tensor[rows].to(self.dtype)

    def put(self, name: str, rows: slice, value: Tensor) -> None:
        """Write rows of an output, unless nobody wants it; rounds to its dtype."""
        tensor = self.memory.get(name)
        if tensor is not None:
            tensor[rows] = value.view(tensor[rows].shape)

    def wants(self, *names: str) -> bool:
        """Whether somebody wants one of these outputs."""
        return any(self.memory.get(name) is not None for name in names)

    def rows(self, task: np.void) -> slice:
        """Tokens of a task."""
        index = int(task["task_index"]) // max(int(task["extra_value_1"]), 1)
        size = int(task["task_split_value"])
        return slice(index * size, min((index + 1) * size, self.count))

    def one_hot(self) -> Tensor:
        """The pre-mix of the first site."""
        pre = torch.zeros(1, self.n, dtype=self.dtype)
        pre[0, 0] = 1.0
        return pre

    def update(self, rows: slice, columns: slice = slice(None)) -> Tensor:
        """New residual of some rows and columns, rounded."""
        residual = self["residual"][rows][..., columns]
        mixing = self.get("previous_residual_mix", rows)
        if mixing is None:
            return residual
        post, output = self.get("previous_post_mix", rows), self["previous_output"][rows][..., columns]
        assert post is not None
        return update_tile(mixing, residual, post, output).to(residual.dtype)

    def collapse(self, new: Tensor, rows: slice) -> Tensor:
        """Mixed: the streams with the pre-mix of the site before."""
        pre = self.get("previous_pre_mix", rows)
        return new[:, 0].to(self.dtype) if pre is None else aggregate_tile(new, pre)


def _post(state: TileState, task: np.void) -> None:
    rows = state.rows(task)
    state.put("new_residual", rows, state.update(rows))


def _slot(state: TileState, rows: slice) -> Tensor:
    """This tile's rows of the staging ring."""
    slot = rows.start // state.tile % state.geometry["ring_slots"]
    return state["staged"][slot, : rows.stop - rows.start]


def _norm_cast(state: TileState, task: np.void) -> None:
    rows = state.rows(task)
    new = state["new_residual"][rows].flatten(1)
    values = new.to(state.dtype)
    state.put("sum_of_squares", rows, tree_sum(values * values))
    _slot(state, rows).copy_(new)


def _projection(state: TileState, task: np.void) -> None:
    rows = state.rows(task)
    state.put("logits", rows, _slot(state, rows).to(state.dtype) @ state.phi.T)


def _input_mix(state: TileState, task: np.void) -> None:
    rows = state.rows(task)
    state.put("mixed", rows, state.collapse(state["new_residual"][rows], rows))


def _rms_norm(state: TileState, task: np.void) -> None:
    rows = state.rows(task)
    _norm(state, rows, state["mixed"][rows])


def _norm(state: TileState, rows: slice, mixed: Tensor) -> None:
    block_input, rstd = norm_tile(mixed, state.norm_weight, state.settings.norm_eps)
    state.put("block_input", rows, block_input)
    state.put("mixed_rstd", rows, rstd)


def _mapping(state: TileState, task: np.void) -> None:
    rows = state.rows(task)
    _predict(state, rows, state["logits"][rows])


def _predict(state: TileState, rows: slice, logits: Tensor) -> None:
    settings = state.settings
    mean_square = state["sum_of_squares"][rows].unsqueeze(1) / (state.n * state.width)
    u, _ = rms_scale(mean_square, settings.norm_eps, "inside")
    mixes = mixes_tile(logits, u, state.alpha, state.bias, state.n, settings.hc_eps, settings.num_iters)
    state.put("u", rows, u)
    for name, value in zip(("pre", "post", "residual"), mixes, strict=True):
        state.put(f"next_{name}_mix", rows, value)


def _clear(state: TileState, task: np.void) -> None:
    worker, workers = int(task["task_index"]), int(task["task_split_num"])
    for name in state.partials:
        partial = state.memory[name]
        if partial is not None:
            size = partial.numel()
            partial.view(-1)[worker * size // workers : (worker + 1) * size // workers] = 0.0


def _rms_norm_grad(state: TileState, task: np.void) -> None:
    rows = state.rows(task)
    grad = state.get("g_block_input", rows)
    if grad is None:
        return
    mixed = state.collapse(state["new_residual"][rows], rows)
    rstd = state["mixed_rstd"][rows].unsqueeze(1)
    g_mixed, normed = norm_bwd_tile(grad, mixed, rstd, state.norm_weight)
    state.put("g_mixed", rows, g_mixed)
    if state.wants("partial_norm_weight"):
        state["partial_norm_weight"][int(task["task_index"])] = tree_sum(grad * normed, 0)


def _g_mixed(state: TileState, rows: slice) -> Tensor | None:
    return None if state.memory["g_block_input"] is None else state["g_mixed"][rows]


def _prev_a_and_mapping(state: TileState, task: np.void) -> None:
    rows = state.rows(task)
    if state.wants("g_previous_pre_mix"):
        g_mixed, new = _g_mixed(state, rows), state["new_residual"][rows]
        value = new.new_zeros(len(new), state.n) if g_mixed is None else aggregate_dot_tile(g_mixed, new)
        state.put("g_previous_pre_mix", rows, value)
    _mapping_grad(state, task)


def _mapping_grad(state: TileState, task: np.void) -> None:
    rows, index = state.rows(task), int(task["task_index"])
    settings = state.settings
    mixes = mixes_bwd_tile(
        [state.get(f"g_next_{name}_mix", rows) for name in ("pre", "post", "residual")],
        state["logits"][rows],
        state["u"][rows].unsqueeze(1),
        state.alpha,
        state.bias,
        state.n,
        state.n * state.width,
        settings.hc_eps,
        settings.num_iters,
    )
    state.put("g_scaled_logits", rows, mixes.scaled)
    state.put("coefficient", rows, mixes.coefficient)
    if state.wants("partial_alpha"):
        state["partial_alpha"][index] = torch.cat(group_sums(tree_sum(mixes.alpha_terms, 0), state.n))
    if state.wants("partial_bias"):
        state["partial_bias"][index] = tree_sum(mixes.bias_terms, 0)


_STREAM_GRADIENTS = (
    "g_residual",
    "g_previous_output",
    "g_previous_post_mix",
    "g_previous_residual_mix",
)


def _phi_rms(state: TileState, task: np.void) -> None:
    rows = state.rows(task)
    scaled = state["g_scaled_logits"][rows]
    if state.wants(*_STREAM_GRADIENTS):
        state.put("g_projected", rows, scaled @ state.phi)
    if state.wants("partial_phi"):
        new = state["new_residual"][rows].flatten(1).to(state.dtype)
        state["partial_phi"][int(task["task_index"])] = scaled.T @ new


def _prev_x_and_post(state: TileState, task: np.void) -> None:
    if not state.wants(*_STREAM_GRADIENTS):
        return
    rows = state.rows(task)
    pre = state.get("previous_pre_mix", rows)
    total = total_grad_tile(
        state.get("g_new_residual", rows),
        state.one_hot() if pre is None else pre,
        _g_mixed(state, rows),
        state["g_projected"][rows],
        state["coefficient"][rows].unsqueeze(1),
        state["new_residual"][rows].to(state.dtype),
    )
    mixing = state.get("previous_residual_mix", rows)
    if mixing is None:  # the first site: its streams are copies of one tensor, the "output" here
        state.put("g_previous_output", rows, stream_sum(total, 1))
        return
    post = state.get("previous_post_mix", rows)
    assert post is not None
    if state.wants("g_residual"):
        state.put("g_residual", rows, unmix_tile(mixing, total))
    if state.wants("g_previous_output"):
        state.put("g_previous_output", rows, stream_sum(post.unsqueeze(-1) * total, 1))
    if state.wants("g_previous_post_mix"):
        state.put("g_previous_post_mix", rows, tree_sum(total * state["previous_output"][rows].unsqueeze(1)))
    if state.wants("g_previous_residual_mix"):
        state.put("g_previous_residual_mix", rows, residual_dot_tile(state["residual"][rows], total))


def _columns(task: np.void, width: int, columns: int) -> tuple[int, slice]:
    """Part number and columns of a task that has a slice."""
    part = int(task["extra_value_0"])
    return part, slice(part * width, min((part + 1) * width, columns))


def _tile_post_mix_norm(state: TileState, task: np.void) -> None:
    rows = state.rows(task)
    new = state.update(rows)
    state.put("new_residual", rows, new)
    values = new.flatten(1).to(state.dtype)
    state.put("sum_of_squares", rows, tree_sum(values * values))
    _norm(state, rows, state.collapse(new, rows))


def _tile_projection(state: TileState, task: np.void) -> None:
    rows = state.rows(task)
    part, columns = _columns(task, state.geometry["part_width"], state.n * state.width)
    new = state["new_residual"][rows].flatten(1)[:, columns].to(state.dtype)
    state["logits_partial"][part, rows] = new @ state.phi[:, columns].T


def _tile_mapping(state: TileState, task: np.void) -> None:
    rows = state.rows(task)
    logits = stream_sum(state["logits_partial"][:, rows], 0)
    state.put("logits", rows, logits)
    _predict(state, rows, logits)


def _tile_norm_grad(state: TileState, task: np.void) -> None:
    rows = state.rows(task)
    part, columns = _columns(task, state.geometry["part_width"], state.width)
    grad = state.get("g_block_input", rows)
    tile = int(task["task_index"]) // state.geometry["parts"]
    if grad is None:
        if state.wants("partial_norm_weight"):
            state["partial_norm_weight"][tile, columns] = 0.0
        return
    grad = grad[:, columns]
    new = state.update(rows, columns)
    mixed = state.collapse(new, rows)
    g_normed = grad if state.norm_weight is None else grad * state.norm_weight[columns]
    state["norm_dots"][part, rows] = torch.cat(
        [
            tree_sum(g_normed * mixed).unsqueeze(1),
            aggregate_dot_tile(g_normed, new),
            aggregate_dot_tile(mixed, new),
        ],
        1,
    )
    if state.wants("partial_norm_weight"):
        normed = mixed * state["mixed_rstd"][rows].unsqueeze(1)
        state["partial_norm_weight"][tile, columns] = tree_sum(grad * normed, 0)


def _tile_post_grad(state: TileState, task: np.void) -> None:
    if not state.wants(*_STREAM_GRADIENTS):
        return
    rows = state.rows(task)
    part, columns = _columns(task, state.geometry["part_width"], state.width)
    new = state.update(rows, columns)
    pre, mixing, post = (state.get(f"previous_{name}_mix", rows) for name in ("pre", "residual", "post"))
    assert pre is not None
    assert mixing is not None
    assert post is not None
    grad, g_mixed = state.get("g_block_input", rows), None
    if grad is not None:
        grad = grad[:, columns]
        rstd = state["mixed_rstd"][rows].unsqueeze(1)
        total_dot = stream_sum(state["norm_dots"][:, rows, :1], 0)
        normed = state.collapse(new, rows) * rstd
        g_normed = grad if state.norm_weight is None else grad * state.norm_weight[columns]
        g_mixed = rstd * (g_normed - normed * (total_dot * rstd / state.width))
    phi = state.phi.view(-1, state.n, state.width)[:, :, columns].flatten(1)
    g_new = state.get("g_new_residual", rows)
    total = total_grad_tile(
        None if g_new is None else g_new[..., columns],
        pre,
        g_mixed,
        state["g_scaled_logits"][rows] @ phi,
        state["coefficient"][rows].unsqueeze(1),
        new.to(state.dtype),
    )
    residual, output = state["residual"][rows][..., columns], state["previous_output"][rows][..., columns]
    for name, value in (
        ("g_residual", unmix_tile(mixing, total)),
        ("g_previous_output", stream_sum(post.unsqueeze(-1) * total, 1)),
    ):
        if state.wants(name):
            state[name][rows][..., columns] = value.to(state[name].dtype)
    state["post_dots"][part, rows] = torch.cat(
        [tree_sum(total * output.unsqueeze(1)), residual_dot_tile(residual, total).flatten(1)], 1
    )


def _tile_phi_grad(state: TileState, task: np.void) -> None:
    if not state.wants("partial_phi"):
        return
    rows = state.rows(task)
    _, columns = _columns(task, state.geometry["phi_width"], state.width)
    new = state.update(rows, columns).to(state.dtype)
    chunk = int(task["task_index"]) // state.geometry["phi_parts"]
    target = state["partial_phi"][chunk].view(-1, state.n, state.width)[:, :, columns]
    target.copy_((state["g_scaled_logits"][rows].T @ new.flatten(1)).view(target.shape))


def _tile_mix_grad(state: TileState, task: np.void) -> None:
    rows, n = state.rows(task), state.n
    if state.wants("g_previous_pre_mix"):
        if state.memory["g_block_input"] is None:
            state["g_previous_pre_mix"][rows] = 0.0
        else:
            dots = stream_sum(state["norm_dots"][:, rows], 0)
            rstd = state["mixed_rstd"][rows].unsqueeze(1)
            shrink = rstd * rstd * dots[:, :1] / state.width
            value = rstd * (dots[:, 1 : n + 1] - shrink * dots[:, n + 1 :])
            state.put("g_previous_pre_mix", rows, value)
    if state.wants("g_previous_post_mix", "g_previous_residual_mix"):
        dots = stream_sum(state["post_dots"][:, rows], 0)
        state.put("g_previous_post_mix", rows, dots[:, :n])
        state.put("g_previous_residual_mix", rows, dots[:, n:])


Body = Callable[[TileState, np.void], None]

#: Task type -> its work.
BODIES: dict[int, Body] = {
    TaskType.TASK_MHC_POST: _post,
    TaskType.TASK_MHC_NORM_CAST: _norm_cast,
    TaskType.TASK_MHC_PROJECTION: _projection,
    TaskType.TASK_MHC_INPUT_MIX: _input_mix,
    TaskType.TASK_RMS_NORM: _rms_norm,
    TaskType.TASK_MHC_MAPPING: _mapping,
    TaskType.TASK_MHC_GRAD_PREV_A: _clear,
    TaskType.TASK_RMS_NORM_GRAD: _rms_norm_grad,
    TaskType.TASK_MHC_GRAD_PREV_A_AND_MAPPING: _prev_a_and_mapping,
    TaskType.TASK_MHC_GRAD_PHI_RMS: _phi_rms,
    TaskType.TASK_MHC_GRAD_PREV_X_AND_POST: _prev_x_and_post,
    TaskType.TASK_TILE_POST_MIX_NORM: _tile_post_mix_norm,
    TaskType.TASK_TILE_PROJECTION: _tile_projection,
    TaskType.TASK_TILE_MAPPING: _tile_mapping,
    TaskType.TASK_TILE_NORM_GRAD: _tile_norm_grad,
    TaskType.TASK_TILE_MAPPING_GRAD: _mapping_grad,
    TaskType.TASK_TILE_POST_GRAD: _tile_post_grad,
    TaskType.TASK_TILE_MIX_GRAD: _tile_mix_grad,
    TaskType.TASK_TILE_PHI_GRAD: _tile_phi_grad,
}
