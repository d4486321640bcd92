"""The fixed forward graph."""

from __future__ import annotations

import pytest

from fused_mhc.scheduler import (
    EVENT_INVALID_ID,
    RuntimeConfigC,
    TaskAiCoreType,
    TaskType,
    build_runtime_config,
)
from fused_mhc.scheduler.mega_mhc import (
    DEFAULT_TOKEN_TILE,
    NORM_EVENT_BASE,
    POST_DONE_EVENT,
    MegaMhcEventLayout,
    build_event_layout,
    build_mega_mhc_graph,
    resolve_token_tile,
)

NAMES = ["mhc_post", "mhc_norm_cast", "mhc_projection", "mhc_input_mix", "mhc_mapping", "mhc_rms_norm"]


def filled(tokens: int, tile: int = 32, cores: int = 20) -> RuntimeConfigC:
    graph, topology = build_mega_mhc_graph(tokens, 5120, cores, token_tile=tile)
    return build_runtime_config(graph, topology, num_cube_cores=cores)


def test_layout() -> None:
    assert (DEFAULT_TOKEN_TILE, POST_DONE_EVENT, NORM_EVENT_BASE) == (32, 0, 1)
    assert build_event_layout(5) == MegaMhcEventLayout(0, 1, 6, 11, 16, 17)
    assert build_event_layout(340).event_count == 1022
    with pytest.raises(ValueError, match="supports only 1024"):
        build_event_layout(341)
    with pytest.raises(ValueError, match="must be positive"):
        build_event_layout(0)


def test_operators_and_order() -> None:
    graph, topology = build_mega_mhc_graph(1000, 5120, 20)
    assert [op.name for op in graph.topological_sort()] == NAMES
    assert [successor.name for successor in graph.get_op("mhc_norm_cast").successors] == [
        "mhc_projection",
        "mhc_input_mix",
    ]
    assert {op.task_num for op in graph.topological_sort()} == {32}
    assert (topology.tp, topology.ep, topology.seq_size, topology.all_expert_num, topology.top_k) == (
        1,
        1,
        1000,
        1,
        1,
    )


@pytest.mark.parametrize(
    ("tokens", "tile", "cores"), [(4096, 128, 20), (2560, 32, 20), (100, 32, 2), (1, 32, 1)]
)
def test_every_task(tokens: int, tile: int, cores: int) -> None:
    config = filled(tokens, tile, cores)
    tiles = -(-tokens // tile)
    layout = build_event_layout(tiles)
    slots = min(tiles, 4 * cores * 32 // tile)
    assert config.task_num == 6 * tiles
    assert list(config.task_index_num) == [tiles, 5 * tiles, 0, 0]
    assert list(config.cube_task_indices[:tiles]) == list(range(2 * tiles, 3 * tiles))
    vector, cube = TaskAiCoreType.TASK_AICORE_VECTOR, TaskAiCoreType.TASK_AICORE_CUBE
    for i in range(tiles):
        free = layout.post_done if i < slots else layout.projection_base + i - slots
        expected = [
            (TaskType.TASK_MHC_POST, vector, EVENT_INVALID_ID, layout.post_done),
            (TaskType.TASK_MHC_NORM_CAST, vector, free, layout.norm_base + i),
            (TaskType.TASK_MHC_PROJECTION, cube, layout.norm_base + i, layout.projection_base + i),
            (TaskType.TASK_MHC_INPUT_MIX, vector, layout.norm_base + i, layout.input_mix_base + i),
            (TaskType.TASK_MHC_MAPPING, vector, layout.projection_base + i, layout.final),
            (TaskType.TASK_RMS_NORM, vector, layout.input_mix_base + i, layout.final),
        ]
        for stage, values in enumerate(expected):
            task = config.all_tasks[stage * tiles + i]
            assert (task.task_type, task.task_aicore_type, task.dependent_event, task.trigger_event) == values
            assert (task.task_index, task.task_split_num, task.task_split_value) == (i, tiles, tile)
    triggers = list(config.all_event_num_triggers[: layout.event_count])
    assert triggers == [tiles] + [1] * (3 * tiles) + [2 * tiles]

    waves = list(range(tiles))
    for first in range(0, tiles, 2 * cores):
        wave = range(first, min(first + 2 * cores, tiles))
        waves += [stage * tiles + i for stage in (1, 3, 5) for i in wave]
    waves += range(4 * tiles, 5 * tiles)
    assert list(config.vector_task_indices[: 5 * tiles]) == waves


def test_token_tile() -> None:
    assert resolve_token_tile(65536, 128, 20) == 224
    assert resolve_token_tile(1, 1, 1) == 32
    assert resolve_token_tile(1024, 33, 20) == 64
    with pytest.raises(ValueError, match="at most the 128 staging rows of 1 cube cores, got 160"):
        resolve_token_tile(100, 129, 1)
    for bad in ((0, 32, 20), (1, 0, 20), (1, 32, 0)):
        with pytest.raises(ValueError, match="must all be positive"):
            resolve_token_tile(*bad)


@pytest.mark.parametrize("sizes", [(0, 5120, 20), (128, -1, 20), (128, 5120, 0)])
def test_refuses_sizes(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        build_mega_mhc_graph(*sizes)


def test_building_twice_gives_the_same_table() -> None:
    graph, topology = build_mega_mhc_graph(500, 64, 2)
    first = bytes(build_runtime_config(graph, topology, num_cube_cores=2))
    assert bytes(build_runtime_config(graph, topology, num_cube_cores=2)) == first
