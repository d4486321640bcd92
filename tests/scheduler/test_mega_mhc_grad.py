"""The fixed backward graph."""

from __future__ import annotations

import pytest

from fused_mhc.scheduler import (
    EVENT_INVALID_ID,
    FAST_DEPENDENCY_POLL_INTERVAL_US,
    OpType,
    RuntimeConfigC,
    TaskAiCoreType,
    TaskType,
    build_runtime_config,
)
from fused_mhc.scheduler.mega_mhc_grad import (
    DEFAULT_GRAD_TOKEN_TILE,
    INIT_DONE_EVENT,
    NATIVE_GRAD_CUBE_TILE,
    NATIVE_GRAD_VECTOR_TILE,
    MegaMhcGradEventLayout,
    build_event_layout,
    build_mega_mhc_grad_graph,
    make_grad_tiling,
    order_vector_tasks_by_stage,
    resolve_grad_token_tile,
)


def filled(tokens: int, tile: int = 32, vector: int = 40, cube: int = 20) -> RuntimeConfigC:
    graph, topology = build_mega_mhc_grad_graph(tokens, 5120, tile, num_vector_cores=vector)
    config = build_runtime_config(graph, topology, num_cube_cores=cube)
    order_vector_tasks_by_stage(config)
    return config


def test_constants() -> None:
    assert (DEFAULT_GRAD_TOKEN_TILE, NATIVE_GRAD_VECTOR_TILE, NATIVE_GRAD_CUBE_TILE, INIT_DONE_EVENT) == (
        32,
        32,
        64,
        0,
    )


def test_check_values() -> None:
    config = filled(128)
    assert config.task_num == 54
    assert tuple(config.task_index_num[:3]) == (2, 52, 0)
    assert list(config.vector_task_indices[:52]) == [*range(48), *range(50, 54)]
    layout = build_event_layout(4, 2)
    triggers = config.all_event_num_triggers
    assert triggers[layout.init_done] == 40
    assert list(triggers[layout.rms_ready_base : layout.macro_ready_base]) == [1] * 4
    assert list(triggers[layout.macro_ready_base : layout.phi_rms_base]) == [2, 2]
    assert list(triggers[layout.phi_rms_base : layout.final]) == [1, 1]
    assert triggers[layout.final] == 4
    layout = build_event_layout(3, 2)
    assert list(filled(65).all_event_num_triggers[layout.macro_ready_base : layout.phi_rms_base]) == [2, 1]


def test_operators() -> None:
    graph, topology = build_mega_mhc_grad_graph(128, 5120, num_vector_cores=40)
    order = graph.topological_sort()
    assert [(op.name, op.diagnostic_name, op.task_num) for op in order] == [
        ("grad_output_init", "GradOutputInit", 40),
        ("rms_norm_grad", "RmsNormGrad", 4),
        ("mhc_grad_prev_a_and_mapping", "MhcGradPrevAAndMapping", 4),
        ("mhc_grad_phi_rms", "MhcGradPhiRms", 2),
        ("mhc_grad_prev_x_and_post", "MhcGradPrevXAndPost", 4),
    ]
    for op in order:
        assert (op.op_type, op.tiling_position, op.outputs) == (OpType.MHC_PIPELINE, 34, [])
        assert (op.split_spec.split_inputs, op.split_spec.split_output_dims) == (None, [])
        (data,) = op.inputs
        assert (data.name, data.shape, data.param_position) == ("grad_data", [128, 5120], 0)
    assert (topology.seq_size, topology.tp, topology.ep, topology.all_expert_num, topology.top_k) == (
        128,
        1,
        1,
        1,
        1,
    )


@pytest.mark.parametrize(("tokens", "tile"), [(128, 32), (2560, 32), (65, 32), (200, 64), (500, 96), (1, 32)])
def test_every_task(tokens: int, tile: int) -> None:
    config = filled(tokens, tile, vector=6, cube=3)
    tiling = make_grad_tiling(tokens, tile)
    tiles, macros = tiling.tile_count, tiling.macro_count
    layout = build_event_layout(tiles, macros)
    vector, cube, fast = (
        TaskAiCoreType.TASK_AICORE_VECTOR,
        TaskAiCoreType.TASK_AICORE_CUBE,
        FAST_DEPENDENCY_POLL_INTERVAL_US,
    )
    expected = [
        (TaskType.TASK_MHC_GRAD_PREV_A, vector, EVENT_INVALID_ID, layout.init_done, i, 6, 0, 0)
        for i in range(6)
    ]
    expected += [
        (
            TaskType.TASK_RMS_NORM_GRAD,
            vector,
            layout.init_done,
            layout.rms_ready_base + i,
            i,
            tiles,
            tile,
            fast,
        )
        for i in range(tiles)
    ]
    expected += [
        (
            TaskType.TASK_MHC_GRAD_PREV_A_AND_MAPPING,
            vector,
            layout.rms_ready_base + i,
            layout.macro_ready_base + tiling.macro_for_tile(i),
            i,
            tiles,
            tile,
            fast,
        )
        for i in range(tiles)
    ]
    expected += [
        (
            TaskType.TASK_MHC_GRAD_PHI_RMS,
            cube,
            layout.macro_ready_base + i,
            layout.phi_rms_base + i,
            i,
            macros,
            max(tile, 64),
            0,
        )
        for i in range(macros)
    ]
    expected += [
        (
            TaskType.TASK_MHC_GRAD_PREV_X_AND_POST,
            vector,
            layout.phi_rms_base + tiling.macro_for_tile(i),
            layout.final,
            i,
            tiles,
            tile,
            0,
        )
        for i in range(tiles)
    ]
    names = (
        "task_type",
        "task_aicore_type",
        "dependent_event",
        "trigger_event",
        "task_index",
        "task_split_num",
        "task_split_value",
        "extra_value_2",
    )
    assert config.task_num == len(expected)
    got = [tuple(getattr(task, name) for name in names) for task in config.all_tasks[: config.task_num]]
    assert got == expected
    assert [tiling.vector_tiles_in_macro(m) for m in range(macros)] == list(
        config.all_event_num_triggers[layout.macro_ready_base : layout.phi_rms_base]
    )


def test_stages_stand_together() -> None:
    config = filled(2560)
    types = [config.all_tasks[task].task_type for task in config.vector_task_indices[:280]]
    assert types[:40] == [TaskType.TASK_MHC_GRAD_PREV_A] * 40
    assert types[40:120] == [TaskType.TASK_RMS_NORM_GRAD] * 80
    assert types[120:200] == [TaskType.TASK_MHC_GRAD_PREV_A_AND_MAPPING] * 80
    assert types[200:] == [TaskType.TASK_MHC_GRAD_PREV_X_AND_POST] * 80


@pytest.mark.parametrize("entry", [0, 49])
def test_order_refuses_a_lost_or_doubled_task(entry: int) -> None:
    config = filled(128)
    config.vector_task_indices[entry] = config.vector_task_indices[entry + 1]
    before = bytes(config)
    with pytest.raises(RuntimeError, match="lost or duplicated"):
        order_vector_tasks_by_stage(config)
    assert bytes(config) == before
    config = filled(128)
    config.all_tasks[3].task_type = TaskType.TASK_MHC_POST
    with pytest.raises(RuntimeError, match="lost or duplicated"):
        order_vector_tasks_by_stage(config)


def test_tiling() -> None:
    tiling = make_grad_tiling(200, 32)
    assert (tiling.cube_tile, tiling.tile_count, tiling.macro_count) == (64, 7, 4)
    assert [tiling.macro_for_tile(i) for i in range(7)] == [0, 0, 1, 1, 2, 2, 3]
    assert make_grad_tiling(200, 96).cube_tile == 96
    for tile in (1, 2, 4, 8, 16, 32, 64, 65, 96):
        made = make_grad_tiling(1000, tile)
        counts = [made.vector_tiles_in_macro(m) for m in range(made.macro_count)]
        assert sum(counts) == made.tile_count
        assert min(counts) > 0
    for tile in (3, 24, 48, 63):
        with pytest.raises(ValueError, match="divisor of 64 or at least 64"):
            make_grad_tiling(1000, tile)
    for bad in ((0, 32), (1, -1)):
        with pytest.raises(ValueError, match="must both be positive"):
            make_grad_tiling(*bad)


def test_layout() -> None:
    assert build_event_layout(4, 2) == MegaMhcGradEventLayout(0, 1, 5, 7, 9, 17)
    assert build_event_layout(507, 254).event_count == 1024
    with pytest.raises(ValueError, match="supports only 1024"):
        build_event_layout(508, 254)
    with pytest.raises(ValueError, match="must both be positive"):
        build_event_layout(1, 0)


def test_token_tile_grows() -> None:
    assert resolve_grad_token_tile(128, 33) == 64
    assert resolve_grad_token_tile(20000, 32) == 64
    assert resolve_grad_token_tile(40000, 32) == 128
    for tokens in (1, 16000, 16224, 16225, 17000, 21632, 21633, 33000, 100_000, 10**6, 10**12):
        tile = resolve_grad_token_tile(tokens, 32)
        tiling = make_grad_tiling(tokens, tile)
        build_event_layout(tiling.tile_count, tiling.macro_count)
        if tile > 32:
            smaller = make_grad_tiling(tokens, tile - 32)
            with pytest.raises(ValueError, match="supports only 1024"):
                build_event_layout(smaller.tile_count, smaller.macro_count)
    for bad in ((0, 32), (128, 0), (-5, 32)):
        with pytest.raises(ValueError, match="must both be positive"):
            resolve_grad_token_tile(*bad)


@pytest.mark.parametrize("sizes", [(0, 5120, 40), (128, 0, 40), (128, 5120, 0)])
def test_refuses_sizes(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        build_mega_mhc_grad_graph(sizes[0], sizes[1], num_vector_cores=sizes[2])
