"""Lowering and the Program as data."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from fused_mhc.errors import InputError, ScheduleError
from fused_mhc.scheduler import (
    EVENT_INVALID_ID,
    Buffer,
    Program,
    TaskType,
    lower_mega_mhc,
    lower_tiled_mhc,
    verify,
)
from fused_mhc.scheduler.program import READ, WRITE

LOWER = {"fixed": lower_mega_mhc, "tiled": lower_tiled_mhc}


def lowered(
    kind: str, direction: str, tokens: int = 200, hidden: int = 48, streams: int = 3, **kwargs: object
) -> Program:
    values: dict[str, object] = {"num_cube_workers": 2, "num_vector_workers": 4, **kwargs}
    return LOWER[kind](direction, tokens, hidden, streams, **values)  # type: ignore[operator]


each = pytest.mark.parametrize(
    ("kind", "direction"), [(kind, direction) for kind in LOWER for direction in ("forward", "backward")]
)


@each
@pytest.mark.parametrize("tokens", [1, 31, 33, 64, 65, 200, 1500])
@pytest.mark.parametrize("mixed", [None, 1, 5])
def test_every_program_is_proven(kind: str, direction: str, tokens: int, mixed: int | None) -> None:
    program = lowered(kind, direction, tokens, mixed_workers=mixed)
    verify(program)
    assert program.workers == (mixed or 6)
    verify(replace(program, num_cube_workers=1, num_vector_workers=1, mixed_workers=None))


@each
def test_json_round_trip(kind: str, direction: str) -> None:
    program = lowered(kind, direction, mixed_workers=3, dtypes={"phi": "bfloat16"}, has_norm_weight=False)
    again = Program.from_json(program.to_json())
    assert again.digest == program.digest
    assert again.table == program.table
    assert again.buffers == program.buffers
    assert again.stages == program.stages
    assert again.geometry == program.geometry
    assert again.to_json() == program.to_json()
    verify(again)


@each
def test_digest_is_stable_and_tells_programs_apart(kind: str, direction: str) -> None:
    program = lowered(kind, direction)
    digests = {
        program.digest,
        lowered(kind, direction, tokens=201).digest,
        lowered(kind, direction, hidden=64).digest,
        lowered(kind, direction, streams=4).digest,
        lowered(kind, direction, mixed_workers=6).digest,
        lowered(kind, direction, stream_dtype="float32").digest,
        lowered(kind, direction, has_norm_weight=False).digest,
        lowered(kind, direction, num_vector_workers=8).digest,
    }
    assert len(digests) == 8
    code = (
        f"from fused_mhc.scheduler import {LOWER[kind].__name__} as lower;"
        f"print(lower({direction!r}, 200, 48, 3, num_cube_workers=2, num_vector_workers=4).digest)"
    )
    other = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert other.stdout.strip() == program.digest


@each
def test_dtypes_and_weight(kind: str, direction: str) -> None:
    program = lowered(
        kind, direction, stream_dtype="float64", compute_dtype="float64", dtypes={"alpha": "float32"}
    )
    assert program.buffer("residual").dtype == "float64"
    assert program.buffer("alpha").dtype == "float32"
    assert program.buffer("residual").nbytes == 200 * 3 * 48 * 8
    without = lowered(kind, direction, has_norm_weight=False)
    assert not [buffer for buffer in without.buffers if "norm_weight" in buffer.name]
    verify(without)
    with pytest.raises(InputError, match="dtypes: expected names of buffers, got nonsense"):
        lowered(kind, direction, dtypes={"nonsense": "float32"})
    with pytest.raises(InputError, match=r"buffer alpha: expected dtype .*, got 'int8'"):
        lowered(kind, direction, dtypes={"alpha": "int8"})


@each
@pytest.mark.parametrize(
    "bad",
    [
        {"tokens": 0},
        {"tokens": -3},
        {"hidden": 0},
        {"streams": 0},
        {"num_cube_workers": 0},
        {"num_vector_workers": -1},
        {"mixed_workers": 0},
        {"token_tile": 0},
        {"tokens": 2.5},
        {"tokens": True},
    ],
)
def test_refuses_sizes(kind: str, direction: str, bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="must be positive, got"):
        lowered(kind, direction, **bad)  # type: ignore[arg-type]


@each
def test_refuses_streams_and_direction(kind: str, direction: str) -> None:
    with pytest.raises(ValueError, match="num_streams: expected at most 8 in a Program, got 9"):
        lowered(kind, direction, streams=9)
    with pytest.raises(ValueError, match="direction: expected 'forward' or 'backward', got 'sideways'"):
        lowered(kind, "sideways")


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_tiled_refuses_tiles(direction: str) -> None:
    with pytest.raises(ValueError, match="token_tile: expected one of"):
        lowered("tiled", direction, token_tile=12)
    with pytest.raises(ValueError, match="expected a multiple of token_tile"):
        lowered("tiled", direction, token_tile=32, group_rows=40)
    with pytest.raises(ValueError, match="parts must be positive"):
        lowered("tiled", direction, parts=0)
    with pytest.raises(ValueError, match="parts: expected at most 64 slices, got 65"):
        lowered("tiled", direction, parts=65)
    verify(lowered("tiled", direction, 300_000, hidden=4096, parts=64))


def test_fixed_forward_refuses_a_tile_that_cannot_fit() -> None:
    with pytest.raises(ValueError, match="token_tile: expected at most the 128 staging rows of 1 cube cores"):
        lowered("fixed", "forward", 100_000, num_cube_workers=1)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_tiled_tiles_grow_until_the_table_holds_them(direction: str) -> None:
    program = lowered("tiled", direction, 1_000_000, hidden=256)
    verify(program)
    assert program.geometry["token_tile"] > 32


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[:-10], "expected JSON of a Program"),
        (lambda text: "[]", "document of format 'fused-mhc-program'"),
        (lambda text: json.dumps({**json.loads(text), "format": "other"}), "document of format"),
        (lambda text: json.dumps({**json.loads(text), "version": 2}), "expected version 1, got 2"),
        (lambda text: json.dumps({**json.loads(text), "direction": "backward"}), "content of digest"),
        (lambda text: json.dumps({**json.loads(text), "tasks": []}), "tasks: expected 1..25600, got 0"),
        (lambda text: json.dumps({**json.loads(text), "tasks": [[1, 2]]}), "fields of a Program"),
        (
            lambda text: json.dumps({k: v for k, v in json.loads(text).items() if k != "stages"}),
            "KeyError: 'stages'",
        ),
        (lambda text: json.dumps({**json.loads(text), "geometry": []}), "AttributeError"),
        (lambda text: json.dumps({**json.loads(text), "event_count": "many"}), "TypeError"),
        (lambda text: json.dumps({**json.loads(text), "triggers": [0] * 5000}), "fields of a Program"),
    ],
)
def test_bad_json(damage: object, message: str) -> None:
    text = lowered("fixed", "forward").to_json()
    with pytest.raises(InputError, match=message):
        Program.from_json(damage(text))  # type: ignore[operator]


def test_a_program_has_a_whole_table() -> None:
    program = lowered("fixed", "forward")
    for table in (b"", program.table[:-1], program.table + b"\0"):
        with pytest.raises(InputError, match=r"table: expected the [0-9]+ bytes of a table, got"):
            replace(program, table=table)


@pytest.mark.parametrize("window_rows", [1, 64, 100, 128])
@pytest.mark.parametrize("mixed", [None, 1, 5])
def test_window(window_rows: int, mixed: int | None) -> None:
    """Posts of a macro-tile wait for the projection of the one that many rows before."""
    program = lowered("tiled", "forward", tokens=500, mixed_workers=mixed, window_rows=window_rows)
    verify(program)
    window = max(1, window_rows // 64)
    posts = program.tasks[program.tasks["task_type"] == TaskType.TASK_TILE_POST_MIX_NORM]
    projection = next(part.base for part in program.events if part.name == "projection")
    for macro, event in zip(posts["trigger_event"].tolist(), posts["dependent_event"].tolist(), strict=True):
        assert event == (projection + macro - window if macro >= window else EVENT_INVALID_ID)


def test_window_refuses() -> None:
    with pytest.raises(InputError, match="window_rows must be positive, got 0"):
        lowered("tiled", "forward", window_rows=0)
    with pytest.raises(InputError, match="window_rows: expected None for the backward graph, got 64"):
        lowered("tiled", "backward", window_rows=64)


def test_reordered() -> None:
    program = lowered("fixed", "forward", tokens=400, num_vector_workers=2)
    names = ["mhc_post", "mhc_norm_cast", "mhc_input_mix", "mhc_rms_norm", "mhc_mapping"]
    by_stage = program.reordered([[name] for name in names])
    verify(by_stage)
    assert by_stage.digest != program.digest
    assert by_stage.tasks.tobytes() == program.tasks.tobytes()
    order = program.stage_of_task[by_stage.queue(2)]
    assert [program.stages[i].name for i in order[:: program.stages[0].task_count]] == names
    with pytest.raises(InputError, match=r"expected vector stages .*, got 'mhc_projection'"):
        program.reordered([["mhc_projection"]])
    with pytest.raises(InputError, match="wave_rows must be positive, got 0"):
        program.reordered([names], 0)
    with pytest.raises(ScheduleError, match="lost or duplicated"):
        program.reordered([names[:-1]])
    wrong = program.reordered([[name] for name in reversed(names)])
    with pytest.raises(ScheduleError, match="for ever"):
        verify(wrong)


def test_bytes_of_the_fixed_forward_graph() -> None:
    """Every row of the stage table, in units of one stream's C values a token: 14 that leave the cache, 24 in all."""
    program = lowered("fixed", "forward", tokens=256, hidden=4096, streams=4)
    unit = 256 * 4096 * 2
    total = dict.fromkeys(
        ("residual", "new_residual", "staged", "mixed", "block_input", "previous_output"), 0.0
    )
    for name in total:
        mine = program.accesses.buffer == program.buffer_index[name]
        total[name] = float((program.accesses.stop - program.accesses.start)[mine].sum()) / unit
    assert total == {
        "residual": 4,
        "previous_output": 1,
        "new_residual": 4 + 4 + 4,
        "staged": 4 + 4,
        "mixed": 2 * (1 + 1),
        "block_input": 1,
    }


@each
def test_rows_of_a_task_follow_its_tile(kind: str, direction: str) -> None:
    """A read or write of whole rows lies inside the rows that its task's index and tile give."""
    program = lowered(kind, direction, tokens=200)
    index = program.buffer_index["u"]
    width = program.buffer("u").item_size
    seen = np.zeros(200, bool)
    for row in np.flatnonzero(program.accesses.buffer == index):
        task = program.tasks[program.accesses.task[row]]
        first = int(task["task_index"]) * int(task["task_split_value"])
        assert program.accesses.start[row] == first * width
        assert program.accesses.stop[row] == min(first + int(task["task_split_value"]), 200) * width
        assert program.accesses.mode[row] == (WRITE if direction == "forward" else READ)
        seen[first : first + int(task["task_split_value"])] = True
    assert seen.all()


def test_buffer_refuses() -> None:
    with pytest.raises(InputError, match="expected role input, output"):
        Buffer("x", (1,), "float32", "other")
    with pytest.raises(InputError, match="name: expected a buffer of this Program, got 'x'"):
        lowered("fixed", "forward").buffer("x")


def _best(run: object, repeats: int = 5) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()  # type: ignore[operator]
        times.append(time.perf_counter() - start)
    return min(times)


@pytest.mark.parametrize("kind", LOWER)
def test_building_takes_less_than_50_ms(kind: str) -> None:
    def run() -> None:
        lowered(kind, "backward", 8192, 5120, 4, num_cube_workers=44, num_vector_workers=88)

    assert _best(run) < 0.050


def test_largest_table_is_built_and_verified_in_a_second(make_program: object) -> None:
    """25,600 tasks: four stages of 6,400 tiles; a task reads what its group of 8 tiles wrote one stage before."""
    groups, members, stages, size = 800, 8, 4, 4096
    tiles = groups * members

    def run() -> None:
        task = np.arange(stages * tiles)
        stage, tile = task // tiles, task % tiles
        group = tile // members
        later = stage > 0
        own = (stage * tiles + tile) * size
        read = ((stage - 1) * tiles + group * members) * size
        rows = [
            np.stack([task, np.zeros_like(task), own, own + size, np.full_like(task, WRITE)], axis=1),
            np.stack(
                [task, np.zeros_like(task), read, read + members * size, np.full_like(task, READ)], axis=1
            )[later],
        ]
        program = make_program(  # type: ignore[operator]
            np.where(later, (stage - 1) * groups + group, 0xFFFFFFFF),
            stage * groups + group,
            np.concatenate(rows),
            [Buffer("data", (stages * tiles, size // 4), "float32", "scratch")],
            workers=132,
        )
        assert program.task_count == 25_600
        verify(program)

    assert _best(run, 3) < 1.0
