"""The boundary every Program works on: the buffers that go in and come out, and who owns which rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fused_mhc.errors import InputError
from fused_mhc.scheduler.graph import ComputeGraph
from fused_mhc.scheduler.program import Buffer, Reduction, Stage
from fused_mhc.scheduler.runtime_config import RuntimeConfigC, task_array

__all__ = ["MAX_STREAMS", "boundary_buffers", "check_sizes", "stage_list", "task_rows", "token_sums"]

#: Streams a Program may have.
MAX_STREAMS = 8

# name, shape, "stream" (dtype of the residual) or "compute", role; shapes in the symbols of
# `boundary_buffers`.
_FORWARD = """
previous_output T,C stream input | residual T,n,C stream input | previous_pre_mix T,n compute input
previous_post_mix T,n compute input | previous_residual_mix T,n,n compute input | phi N,K compute input
alpha 3 compute input | bias N compute input | norm_weight C compute input
new_residual T,n,C stream output | next_pre_mix T,n compute output | next_post_mix T,n compute output
next_residual_mix T,n,n compute output | block_input T,C stream output | logits T,N compute output
u T compute output | mixed_rstd T compute output
"""
_BACKWARD = """
g_block_input T,C stream input | g_new_residual T,n,C stream input | g_next_pre_mix T,n compute input
g_next_post_mix T,n compute input | g_next_residual_mix T,n,n compute input
previous_output T,C stream input | residual T,n,C stream input | previous_pre_mix T,n compute input
previous_post_mix T,n compute input | previous_residual_mix T,n,n compute input | phi N,K compute input
alpha 3 compute input | bias N compute input | norm_weight C compute input
new_residual T,n,C stream input | logits T,N compute input | u T compute input | mixed_rstd T compute input
next_pre_mix T,n compute input | next_post_mix T,n compute input | next_residual_mix T,n,n compute input
g_previous_output T,C stream output | g_residual T,n,C stream output | g_previous_pre_mix T,n compute output
g_previous_post_mix T,n compute output | g_previous_residual_mix T,n,n compute output
g_phi N,K compute result | g_alpha 3 compute result | g_bias N compute result | g_norm_weight C compute result
"""


def check_sizes(direction: str, sizes: Mapping[str, int | None]) -> None:
    """Refuse a direction that does not exist, a size that is not a positive integer (None: not given), or
    too many streams."""
    if direction not in ("forward", "backward"):
        raise InputError(f"direction: expected 'forward' or 'backward', got {direction!r}")
    for name, value in sizes.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value <= 0):
            raise InputError(f"{name} must be positive, got {value!r}")
    streams = sizes.get("num_streams")
    if streams is not None and streams > MAX_STREAMS:
        raise InputError(f"num_streams: expected at most {MAX_STREAMS} in a Program, got {streams}")


def boundary_buffers(
    direction: str,
    token_count: int,
    hidden_size: int,
    num_streams: int,
    *,
    extra: str = "",
    symbols: Mapping[str, int] | None = None,
    stream_dtype: str = "bfloat16",
    compute_dtype: str = "float32",
    dtypes: Mapping[str, str] | None = None,
    has_norm_weight: bool = True,
    parts: int = 1,
    sliced: str = "",
) -> tuple[Buffer, ...]:
    """What goes in and comes out of one boundary, plus the ``extra`` buffers of a graph.

    The buffers named in ``sliced`` are owned in ``parts`` slices of C.

    ``T`` tokens, ``C`` hidden size, ``n`` streams, ``K = n*C``, ``N = n*n + 2*n``, and ``symbols``.
    ``dtypes`` names the dtype of single buffers where it is neither the streams' nor the compute dtype.
    """
    sizes = {
        "T": token_count,
        "C": hidden_size,
        "n": num_streams,
        "K": num_streams * hidden_size,
        "N": num_streams * num_streams + 2 * num_streams,
        "2n+1": 2 * num_streams + 1,
        "n+nn": num_streams + num_streams * num_streams,
        **(symbols or {}),
    }
    kinds = {"stream": stream_dtype, "compute": compute_dtype}
    buffers = []
    text = (_FORWARD if direction == "forward" else _BACKWARD) + extra
    for entry in text.replace("\n", "|").split("|"):
        if not entry.strip():
            continue
        name, shape, kind, role = entry.split()
        if "norm_weight" in name and not has_norm_weight:
            continue
        shape_tuple = tuple(sizes[symbol] if symbol in sizes else int(symbol) for symbol in shape.split(","))
        dtype = (dtypes or {}).get(name, kinds[kind])
        buffers.append(Buffer(name, shape_tuple, dtype, role, parts if name in sliced.split() else 1))
    unknown = set(dtypes or {}) - {buffer.name for buffer in buffers}
    if unknown:
        raise InputError(f"dtypes: expected names of buffers, got {', '.join(sorted(unknown))}")
    return tuple(buffers)


def stage_list(graph: ComputeGraph, config: RuntimeConfigC) -> tuple[Stage, ...]:
    """The stages of a filled graph, in the order of its tasks."""
    tasks = task_array(config)
    stages, first = [], 0
    for op in graph.topological_sort():
        head = tasks[first]
        stages.append(
            Stage(
                op.name,
                op.diagnostic_name or op.name,
                int(head["task_type"]),
                int(head["task_aicore_type"]),
                first,
                op.task_num,
            )
        )
        first += op.task_num
    return tuple(stages)


def task_rows(
    stage: Stage, rows: int, token_count: int, parts: int = 1
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Task ids of a stage, and the first token and the token after the last of each (``parts`` tasks a
    tile)."""
    index = np.arange(stage.task_count)
    start = index // parts * rows
    return stage.first_task + index, start, np.minimum(start + rows, token_count)


def token_sums(buffers: Sequence[Buffer]) -> tuple[Reduction, ...]:
    """The sums over tiles the epilogue adds: ``partial_x`` gives ``g_x``."""
    return tuple(
        Reduction(buffer.name, buffer.name.replace("partial_", "g_", 1))
        for buffer in buffers
        if buffer.role == "partial"
    )
