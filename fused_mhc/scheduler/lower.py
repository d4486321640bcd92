"""From a graph to a :class:`Program`: the tables, and which task touches which bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from fused_mhc.scheduler import mega_mhc, mega_mhc_grad
from fused_mhc.scheduler.boundary import boundary_buffers, check_sizes, stage_list, task_rows, token_sums
from fused_mhc.scheduler.event import MIN_EVENT_CAPACITY
from fused_mhc.scheduler.graph import ComputeGraph
from fused_mhc.scheduler.program import READ, WRITE, AccessWriter, Buffer, EventRange, Program, Stage
from fused_mhc.scheduler.runtime_config import RuntimeConfigC, build_runtime_config
from fused_mhc.scheduler.split import ceil_div

__all__ = ["Dtypes", "Lowered", "Workers", "lower", "lower_mega_mhc"]


@dataclass(frozen=True)
class Workers:
    """Workers of each role, or ``mixed`` ones that serve both queues."""

    cube: int
    vector: int
    mixed: int | None = None


@dataclass(frozen=True)
class Dtypes:
    """Dtype of the streams, of everything else, and of single buffers by name."""

    stream: str = "bfloat16"
    compute: str = "float32"
    single: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Lowered:
    """What a graph of one kind adds to the boundary.

    Attributes:
        name: of the graph.
        graph, config: the split graph and its filled table.
        events, event_count, event_capacity: names of the events, how many there are, how many there may be.
        geometry: sizes beside those of the boundary.
        extra, symbols: its own buffers and their sizes (see :func:`boundary_buffers`).
        accesses: writes the accesses of its stages.
        parts, sliced: slices of C, and the buffers owned in slices.
    """

    name: str
    graph: ComputeGraph
    config: RuntimeConfigC
    events: tuple[EventRange, ...]
    event_count: int
    event_capacity: int
    geometry: dict[str, int]
    extra: str
    symbols: dict[str, int]
    accesses: Callable[[AccessWriter, dict[str, Stage], dict[str, int], tuple[Buffer, ...]], None]
    parts: int = 1
    sliced: str = ""


def lower(
    lowered: Lowered,
    direction: str,
    sizes: tuple[int, int, int],
    workers: Workers,
    dtypes: Dtypes,
    norm_weight: bool,
) -> Program:
    """A Program from a filled graph; ``sizes`` are T, C and n."""
    tokens, hidden, streams = sizes
    buffers = boundary_buffers(
        direction,
        tokens,
        hidden,
        streams,
        extra=lowered.extra,
        symbols=lowered.symbols,
        stream_dtype=dtypes.stream,
        compute_dtype=dtypes.compute,
        dtypes=dtypes.single,
        has_norm_weight=norm_weight,
        parts=lowered.parts,
        sliced=lowered.sliced,
    )
    geometry = {"token_count": tokens, "hidden_size": hidden, "num_streams": streams, **lowered.geometry}
    stages = stage_list(lowered.graph, lowered.config)
    writer = AccessWriter(buffers)
    lowered.accesses(writer, {stage.name: stage for stage in stages}, geometry, buffers)
    return Program(
        graph=lowered.name,
        direction=direction,
        geometry=geometry,
        table=bytes(lowered.config),
        event_count=lowered.event_count,
        event_capacity=lowered.event_capacity,
        num_cube_workers=workers.cube,
        num_vector_workers=workers.vector,
        mixed_workers=workers.mixed,
        stages=stages,
        events=lowered.events,
        buffers=buffers,
        accesses=writer.table(),
        epilogue=token_sums(buffers),
    )


def lower_mega_mhc(
    direction: str,
    token_count: int,
    hidden_size: int,
    num_streams: int = 4,
    *,
    num_cube_workers: int,
    num_vector_workers: int,
    mixed_workers: int | None = None,
    token_tile: int | None = None,
    stream_dtype: str = "bfloat16",
    compute_dtype: str = "float32",
    dtypes: Mapping[str, str] | None = None,
    has_norm_weight: bool = True,
) -> Program:
    """Lower one of the two fixed graphs.

    Args:
        direction: ``"forward"`` or ``"backward"``.
        token_count: T >= 1 (a call without tokens runs no Program).
        hidden_size: C.
        num_streams: n, 1..8.
        num_cube_workers, num_vector_workers: the counts the graph is built from.
        mixed_workers: launch so many mixed workers instead of the two roles.
        token_tile: None for the default of the graph; grown until the event table holds it.
        stream_dtype, compute_dtype, dtypes: dtypes of the streams, of everything else, and of single buffers.
        has_norm_weight: whether the RMSNorm has a weight.

    Returns:
        The Program; :func:`fused_mhc.scheduler.verify` proves it.

    Raises:
        InputError: a bad size or direction, or a tile that cannot fit.

    Source: the stage table of the two graphs (mega_mhc, mega_mhc_grad).
    """
    check_sizes(
        direction,
        {
            "token_count": token_count,
            "hidden_size": hidden_size,
            "num_streams": num_streams,
            "num_cube_workers": num_cube_workers,
            "num_vector_workers": num_vector_workers,
            "mixed_workers": mixed_workers,
            "token_tile": token_tile,
        },
    )
    build = _forward if direction == "forward" else _backward
    return lower(
        build(token_count, hidden_size, num_cube_workers, num_vector_workers, token_tile),
        direction,
        (token_count, hidden_size, num_streams),
        Workers(num_cube_workers, num_vector_workers, mixed_workers),
        Dtypes(stream_dtype, compute_dtype, dtypes or {}),
        has_norm_weight,
    )


def _forward(
    tokens: int, hidden: int, cube_workers: int, vector_workers: int, token_tile: int | None
) -> Lowered:
    requested = mega_mhc.DEFAULT_TOKEN_TILE if token_tile is None else token_tile
    graph, topology = mega_mhc.build_mega_mhc_graph(tokens, hidden, cube_workers, requested)
    config = build_runtime_config(graph, topology, num_cube_cores=cube_workers)
    tile = graph.get_op("mhc_post").split_value
    count = ceil_div(tokens, tile)
    layout = mega_mhc.build_event_layout(count)
    slots = mega_mhc.resolve_ring_slots(count, tile, cube_workers)
    events = (
        EventRange("post_done", layout.post_done, 1),
        EventRange("norm", layout.norm_base, count),
        EventRange("input_mix", layout.input_mix_base, count),
        EventRange("projection", layout.projection_base, count),
        EventRange("final", layout.final, 1),
    )
    extra = (
        "sum_of_squares T compute scratch | staged slots,tile,K stream scratch | mixed T,C compute scratch"
    )
    geometry = {"token_tile": tile, "ring_slots": slots}
    return Lowered(
        "mega_mhc",
        graph,
        config,
        events,
        layout.event_count,
        MIN_EVENT_CAPACITY,
        geometry,
        extra,
        {"slots": slots, "tile": tile},
        _forward_accesses,
    )


def _forward_accesses(
    writer: AccessWriter, stages: dict[str, Stage], geometry: dict[str, int], buffers: tuple[Buffer, ...]
) -> None:
    """The forward rows of the stage table."""
    tokens, tile, slots = geometry["token_count"], geometry["token_tile"], geometry["ring_slots"]
    rows = {name: task_rows(stage, tile, tokens) for name, stage in stages.items()}
    slot_width = tile * geometry["num_streams"] * geometry["hidden_size"]

    def ring(name: str, mode: int) -> None:
        tasks, start, stop = rows[name]
        base = start // tile % slots * slot_width
        writer.elements(tasks, mode, "staged", base, base + (stop - start) * (slot_width // tile))

    def touch(name: str, reads: str, writes: str, shared: str = "") -> None:
        tasks, start, stop = rows[name]
        writer.rows(tasks, READ, reads, start, stop)
        writer.rows(tasks, WRITE, writes, start, stop)
        writer.whole(tasks, READ, shared)

    touch("mhc_post", "residual previous_output previous_post_mix previous_residual_mix", "new_residual")
    touch("mhc_norm_cast", "new_residual", "sum_of_squares")
    ring("mhc_norm_cast", WRITE)
    touch("mhc_projection", "", "logits", "phi")
    ring("mhc_projection", READ)
    touch("mhc_input_mix", "new_residual previous_pre_mix", "mixed")
    weight = "norm_weight" if writer.has("norm_weight") else ""
    touch("mhc_rms_norm", "mixed", "block_input mixed_rstd", weight)
    touch(
        "mhc_mapping", "logits sum_of_squares", "next_pre_mix next_post_mix next_residual_mix u", "alpha bias"
    )


def _backward(
    tokens: int, hidden: int, cube_workers: int, vector_workers: int, token_tile: int | None
) -> Lowered:
    requested = mega_mhc_grad.DEFAULT_GRAD_TOKEN_TILE if token_tile is None else token_tile
    graph, topology = mega_mhc_grad.build_mega_mhc_grad_graph(
        tokens, hidden, requested, num_vector_cores=vector_workers
    )
    config = build_runtime_config(graph, topology, num_cube_cores=cube_workers)
    mega_mhc_grad.order_vector_tasks_by_stage(config)
    tiling = mega_mhc_grad.make_grad_tiling(tokens, graph.get_op("rms_norm_grad").split_value)
    layout = mega_mhc_grad.build_event_layout(tiling.tile_count, tiling.macro_count)
    events = (
        EventRange("init_done", layout.init_done, 1),
        EventRange("rms_ready", layout.rms_ready_base, tiling.tile_count),
        EventRange("macro_ready", layout.macro_ready_base, tiling.macro_count),
        EventRange("phi_rms", layout.phi_rms_base, tiling.macro_count),
        EventRange("final", layout.final, 1),
    )
    extra = """
    g_mixed T,C compute scratch | g_scaled_logits T,N compute scratch | coefficient T compute scratch
    g_projected T,K compute scratch
    partial_norm_weight tiles,C compute partial | partial_alpha tiles,3 compute partial
    partial_bias tiles,N compute partial | partial_phi macros,N,K compute partial
    """
    geometry = {"token_tile": tiling.token_tile, "macro_tile": tiling.cube_tile}
    symbols = {"tiles": tiling.tile_count, "macros": tiling.macro_count}
    return Lowered(
        "mega_mhc_grad",
        graph,
        config,
        events,
        layout.event_count,
        MIN_EVENT_CAPACITY,
        geometry,
        extra,
        symbols,
        _backward_accesses,
    )


def _backward_accesses(
    writer: AccessWriter, stages: dict[str, Stage], geometry: dict[str, int], buffers: tuple[Buffer, ...]
) -> None:
    """The backward rows of the stage table."""
    tokens = geometry["token_count"]

    def touch(
        name: str, reads: str, writes: str, shared: str = "", partials: str = "", rows: str = "token_tile"
    ) -> None:
        tasks, start, stop = task_rows(stages[name], geometry[rows], tokens)
        writer.rows(tasks, READ, reads, start, stop)
        writer.rows(tasks, WRITE, writes, start, stop)
        writer.whole(tasks, READ, shared)
        index = np.arange(len(tasks))
        writer.rows(tasks, WRITE, partials, index, index + 1)

    init = stages["grad_output_init"]
    workers = np.arange(init.task_count)
    for buffer in buffers:
        if buffer.role == "partial":
            size = buffer.nbytes // buffer.item_size
            first, last = workers * size // len(workers), (workers + 1) * size // len(workers)
            writer.elements(init.first_task + workers, WRITE, buffer.name, first, last)
    has_weight = writer.has("norm_weight")
    touch(
        "rms_norm_grad",
        "g_block_input new_residual previous_pre_mix mixed_rstd",
        "g_mixed",
        "norm_weight" if has_weight else "",
        "partial_norm_weight" if has_weight else "",
    )
    touch(
        "mhc_grad_prev_a_and_mapping",
        "g_mixed new_residual g_next_pre_mix g_next_post_mix g_next_residual_mix logits u "
        "next_pre_mix next_post_mix next_residual_mix",
        "g_previous_pre_mix g_scaled_logits coefficient",
        "alpha bias",
        "partial_alpha partial_bias",
    )
    touch(
        "mhc_grad_phi_rms",
        "g_scaled_logits new_residual",
        "g_projected",
        "phi",
        "partial_phi",
        "macro_tile",
    )
    touch(
        "mhc_grad_prev_x_and_post",
        "g_mixed coefficient g_projected new_residual previous_pre_mix g_new_residual residual previous_output "
        "previous_post_mix previous_residual_mix",
        "g_residual g_previous_output g_previous_post_mix g_previous_residual_mix",
    )
