"""The persistent megakernel: workers that walk the queues of a Program's table, wait for events, run tasks by opcode.

What a worker does follows from ``bytes(config)`` alone. An event is a counter of int32 that starts at zero: a worker
reads it with acquire, by one thread, and hands the value to the others, so that all of them take the same way; a task's
end is a barrier of the worker and an addition with release.
"""

from __future__ import annotations

import ctypes
from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from fused_mhc.ops._triton_common import INTERPRETING
from fused_mhc.ops.proj_rms_compute_h._triton_tiles import part
from fused_mhc.profiler import COMPUTE, RECORD_WORDS, TRIGGER, WAIT
from fused_mhc.scheduler import RuntimeConfigC, TaskDescC

from ._megakernel_bwd import add_partials
from ._megakernel_switch import backward_task, forward_task

__all__ = ["ABORT", "CLOCK", "SPARE_COUNTERS", "WATCH_FIELDS", "megakernel", "prepare_kernel"]

#: Counters after those of the events: workers have to leave; the interpreter's clock, which counts its readings.
ABORT, CLOCK = tl.constexpr(8), tl.constexpr(9)
SPARE_COUNTERS = 16
#: What a launch that is given up leaves, in words of 32 bits; the first is 1 once the others are there. The task is -1
#: where the epilogue waited.
WATCH_FIELDS = ("given_up", "launch", "worker", "task", "event", "expected", "seen")
#: Polls after which a waiting worker looks whether another one has given the launch up.
_LOOK_AROUND = tl.constexpr(64)


def _word(structure: Any, field: str) -> Any:
    """Where a field of the table stands, in words of 32 bits."""
    return tl.constexpr(getattr(structure, field).offset // 4)


_TRIGGER_COUNTS = _word(RuntimeConfigC, "all_event_num_triggers")
_TASKS = _word(RuntimeConfigC, "all_tasks")
_QUEUE_LENGTHS = _word(RuntimeConfigC, "task_index_num")
_CUBE_QUEUE = _word(RuntimeConfigC, "cube_task_indices")
_VECTOR_QUEUE = _word(RuntimeConfigC, "vector_task_indices")
_TASK_WORDS = tl.constexpr(ctypes.sizeof(TaskDescC) // 4)
_TYPE = _word(TaskDescC, "task_type")
_CORE = _word(TaskDescC, "task_aicore_type")
_DEPENDS = _word(TaskDescC, "dependent_event")
_TRIGGERS = _word(TaskDescC, "trigger_event")
_INDEX = _word(TaskDescC, "task_index")
_SPLIT_NUM = _word(TaskDescC, "task_split_num")
_SPLIT_VALUE = _word(TaskDescC, "task_split_value")
_PART = _word(TaskDescC, "extra_value_0")
_PARTS = _word(TaskDescC, "extra_value_1")

_WAIT, _COMPUTE, _TRIGGER = tl.constexpr(WAIT), tl.constexpr(COMPUTE), tl.constexpr(TRIGGER)
_RECORD_WORDS = tl.constexpr(RECORD_WORDS)


@triton.jit(do_not_specialize=["width", "counters"])
def prepare_kernel(
    phi_ptr,
    parts_ptr,
    counter_ptr,
    width: tl.int64,
    counters: tl.int32,
    ROWS: tl.constexpr,
    N: tl.constexpr,
    STEP: tl.constexpr,
    W_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The bf16 parts of phi ``[N, width]`` in zero-padded rows, ``[W_PARTS, ROWS, width up to a multiple of STEP]``;
    and zeros in the counters of the launch that follows on this stream."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    padded = (width + STEP - 1) // STEP * STEP
    row, column = at // padded, at % padded
    phi = tl.load(phi_ptr + row * width + column, mask=(row < N) & (column < width), other=0.0)
    for index in tl.static_range(W_PARTS):
        tl.store(parts_ptr + index * ROWS * padded + at, part(phi, index), mask=row < ROWS)
    tl.store(counter_ptr + at, tl.zeros((BLOCK,), tl.int32), mask=at < counters)


@triton.jit
def clock(ticks_ptr):
    """Nanoseconds; in the interpreter, which has no clock, readings so far."""
    if INTERPRETING:
        return tl.atomic_add(ticks_ptr, 1).to(tl.int64)
    else:
        return globaltimer()


@triton.jit
def write_record(record_ptr, made, capacity, worker, start, end, core, task, stage, kind: tl.constexpr):
    """Keep one record if there is room; returns how many were made."""
    if made < capacity:
        at = record_ptr + (worker.to(tl.int64) * capacity + made) * _RECORD_WORDS
        tl.store(at, start)
        tl.store(at + 1, end)
        tl.store(at + 2, worker.to(tl.int64) | (core.to(tl.int64) << 32))
        tl.store(at + 3, task.to(tl.int64) | (stage.to(tl.int64) << 32))
        tl.store(at + 4, tl.full((), kind, tl.int64))
    return made + 1


@triton.jit
def head(table_ptr, queue: tl.constexpr, position, length):
    """``(task, its event, that event's trigger count)`` at a position of a queue: -1 past its end, and no event is -1
    with a count of 0."""
    task = tl.full((), -1, tl.int32)
    event = tl.full((), -1, tl.int32)
    needed = tl.full((), 0, tl.int32)
    if position < length:
        task = tl.load(table_ptr + queue + position)
        event = tl.load(table_ptr + _TASKS + task * _TASK_WORDS + _DEPENDS)
        if event >= 0:
            needed = tl.load(table_ptr + _TRIGGER_COUNTS + event)
    return task, event, needed


@triton.jit
def triggers_seen(counter_ptr, event):
    """How often an event has been triggered (no event: 0). What its producers wrote may be read afterwards."""
    seen = tl.full((), 0, tl.int32)
    if event >= 0:
        seen = tl.atomic_add(counter_ptr + event, 0, sem="acquire", scope="gpu")
    return seen


@triton.jit
def keep_waiting(
    counter_ptr, claimed_ptr, watch_ptr, events, budget, launch, polls, worker, task, event, needed, seen
):
    """After a poll in vain: 1 to go on, 0 to leave. Who is out of budget tells the others and, as the first on this
    device, the host."""
    going = tl.full((), 1, tl.int32)
    if polls >= budget:
        tl.atomic_add(counter_ptr + events + ABORT, 1, sem="release", scope="gpu")
        if tl.atomic_cas(claimed_ptr, 0, 1) == 0:
            tl.store(watch_ptr + 1, launch)
            tl.store(watch_ptr + 2, worker)
            tl.store(watch_ptr + 3, task)
            tl.store(watch_ptr + 4, event)
            tl.store(watch_ptr + 5, needed)
            tl.store(watch_ptr + 6, seen)
            tl.store(watch_ptr, 1)
        going = tl.full((), 0, tl.int32)
    elif polls % _LOOK_AROUND == 0:
        if tl.atomic_add(counter_ptr + events + ABORT, 0, sem="acquire", scope="gpu") != 0:
            going = tl.full((), 0, tl.int32)
    return going


@triton.jit(
    do_not_specialize=[
        "count",
        "stride",
        "stream_stride",
        "tiles",
        "chunks",
        "slots",
        "cube_workers",
        "vector_workers",
        "mixed",
        "events",
        "final",
        "budget",
        "launch",
        "capacity",
        "norm_eps",
        "hc_eps",
    ]
)
def megakernel(
    b,
    table_ptr,
    phi_ptr,
    counter_ptr,
    claimed_ptr,
    watch_ptr,
    record_ptr,
    tally_ptr,
    stage_ptr,
    count: tl.int64,
    stride: tl.int64,
    stream_stride: tl.int64,
    tiles: tl.int64,
    chunks: tl.int64,
    slots: tl.int32,
    cube_workers: tl.int32,
    vector_workers: tl.int32,
    mixed: tl.int32,
    events: tl.int32,
    final: tl.int32,
    budget: tl.int32,
    launch: tl.int32,
    capacity: tl.int32,
    norm_eps: tl.float32,
    hc_eps: tl.float32,
    FORWARD: tl.constexpr,
    TILED: tl.constexpr,
    n: tl.constexpr,
    C: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    CUBE_ROWS: tl.constexpr,
    CUBE_WIDTH: tl.constexpr,
    MAPPING_ROWS: tl.constexpr,
    STEP: tl.constexpr,
    RATIO: tl.constexpr,
    PARTS: tl.constexpr,
    PART_WIDTH: tl.constexpr,
    PHI_WIDTH: tl.constexpr,
    ITERATIONS: tl.constexpr,
    SEGMENT: tl.constexpr,
    G_PARTS: tl.constexpr,
    X_PARTS: tl.constexpr,
    W_PARTS: tl.constexpr,
    ORDER: tl.constexpr,
    ALIGN: tl.constexpr,
    STATE: tl.constexpr,
    ENTRY: tl.constexpr,
    EPILOGUE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One worker. ``tiles``, ``chunks``: rows of the partial sums; ``mixed``: workers serve both queues; ``events``:
    event counters; ``final``: the event that the EPILOGUE waits for; ``budget``: polls in vain before a launch is given
    up; ``record_ptr`` (with room for ``capacity`` records of a worker, ``tally_ptr`` and ``stage_ptr``): None when
    nobody records."""
    worker = tl.program_id(0)
    ticks_ptr = counter_ptr + events + CLOCK
    residual_stride = stride * ALIGN
    residual_stream_stride = stream_stride * ALIGN
    cube_length = tl.load(table_ptr + _QUEUE_LENGTHS)
    vector_length = tl.load(table_ptr + _QUEUE_LENGTHS + 1)
    serves_cube = (mixed != 0) | (worker < cube_workers)
    serves_vector = (mixed != 0) | (worker >= cube_workers)
    cube_at = tl.where(serves_cube, worker, cube_length)
    vector_at = tl.where(mixed != 0, worker, worker - cube_workers)
    vector_at = tl.where(serves_vector, vector_at, vector_length)
    workers = tl.num_programs(0)
    cube_step = tl.where(mixed != 0, workers, cube_workers)
    vector_step = tl.where(mixed != 0, workers, vector_workers)
    going = tl.full((), 1, tl.int32)
    made = tl.full((), 0, tl.int32)
    idle_since = tl.full((), 0, tl.int64)
    if record_ptr is not None:
        idle_since = clock(ticks_ptr)

    while (going == 1) & ((cube_at < cube_length) | (vector_at < vector_length)):
        cube_task, cube_event, cube_needed = head(table_ptr, _CUBE_QUEUE, cube_at, cube_length)
        vector_task, vector_event, vector_needed = head(table_ptr, _VECTOR_QUEUE, vector_at, vector_length)
        task = tl.full((), -1, tl.int32)
        polls = tl.full((), 0, tl.int32)
        while (going == 1) & (task < 0):
            cube_seen = triggers_seen(counter_ptr, cube_event)
            vector_seen = tl.full((), 0, tl.int32)
            if (cube_task >= 0) & (cube_seen >= cube_needed):
                task = cube_task
            else:
                vector_seen = triggers_seen(counter_ptr, vector_event)
                if (vector_task >= 0) & (vector_seen >= vector_needed):
                    task = vector_task
            if task < 0:
                polls += 1
                # Of two heads the one with the lower event is nearer to what holds both up: events have the order of
                # the stages.
                names_cube = (vector_task < 0) | ((cube_task >= 0) & (cube_event < vector_event))
                going = keep_waiting(
                    counter_ptr,
                    claimed_ptr,
                    watch_ptr,
                    events,
                    budget,
                    launch,
                    polls,
                    worker,
                    tl.where(names_cube, cube_task, vector_task),
                    tl.where(names_cube, cube_event, vector_event),
                    tl.where(names_cube, cube_needed, vector_needed),
                    tl.where(names_cube, cube_seen, vector_seen),
                )
        if going == 1:
            desc = table_ptr + _TASKS + task * _TASK_WORDS
            op = tl.load(desc + _TYPE)
            core = tl.load(desc + _CORE)
            task_index = tl.load(desc + _INDEX).to(tl.int64)
            size = tl.load(desc + _SPLIT_VALUE).to(tl.int64)
            part_index = tl.load(desc + _PART).to(tl.int64)
            tile = task_index // tl.maximum(tl.load(desc + _PARTS), 1)
            start = tile * size
            stop = tl.minimum(start + size, count)
            began = idle_since
            if record_ptr is not None:
                began = clock(ticks_ptr)
            if FORWARD:
                forward_task(
                    op,
                    tile,
                    part_index,
                    start,
                    stop,
                    size,
                    b,
                    phi_ptr,
                    count,
                    residual_stride,
                    residual_stream_stride,
                    slots,
                    norm_eps,
                    hc_eps,
                    TILED,
                    n,
                    C,
                    COLUMNS,
                    ROWS,
                    WIDTH,
                    CUBE_ROWS,
                    MAPPING_ROWS,
                    STEP,
                    RATIO,
                    PARTS,
                    PART_WIDTH,
                    ITERATIONS,
                    X_PARTS,
                    W_PARTS,
                    ORDER,
                    ALIGN,
                    ENTRY,
                )
            else:
                backward_task(
                    op,
                    tile,
                    part_index,
                    start,
                    stop,
                    task_index,
                    tl.load(desc + _SPLIT_NUM),
                    b,
                    phi_ptr,
                    count,
                    residual_stride,
                    residual_stream_stride,
                    tiles,
                    chunks,
                    hc_eps,
                    TILED,
                    n,
                    C,
                    COLUMNS,
                    ROWS,
                    WIDTH,
                    CUBE_ROWS,
                    CUBE_WIDTH,
                    MAPPING_ROWS,
                    STEP,
                    PARTS,
                    PART_WIDTH,
                    PHI_WIDTH,
                    ITERATIONS,
                    SEGMENT,
                    G_PARTS,
                    X_PARTS,
                    W_PARTS,
                    STATE,
                    ENTRY,
                    BLOCK,
                )
            tl.debug_barrier()  # all threads have written before one says so
            ended = idle_since
            if record_ptr is not None:
                ended = clock(ticks_ptr)
            tl.atomic_add(counter_ptr + tl.load(desc + _TRIGGERS), 1, sem="release", scope="gpu")
            if record_ptr is not None:
                after = clock(ticks_ptr)
                stage = tl.load(stage_ptr + task)
                if tl.load(desc + _DEPENDS) >= 0:
                    made = write_record(
                        record_ptr, made, capacity, worker, idle_since, began, core, task, stage, _WAIT
                    )
                made = write_record(
                    record_ptr, made, capacity, worker, began, ended, core, task, stage, _COMPUTE
                )
                made = write_record(
                    record_ptr, made, capacity, worker, ended, after, core, task, stage, _TRIGGER
                )
                idle_since = after
            if task == cube_task:
                cube_at += cube_step
            else:
                vector_at += vector_step

    if EPILOGUE:
        needed = tl.load(table_ptr + _TRIGGER_COUNTS + final)
        seen = triggers_seen(counter_ptr, final)
        polls = tl.full((), 0, tl.int32)
        while (going == 1) & (seen < needed):
            polls += 1
            nothing = tl.full((), -1, tl.int32)
            going = keep_waiting(
                counter_ptr,
                claimed_ptr,
                watch_ptr,
                events,
                budget,
                launch,
                polls,
                worker,
                nothing,
                final,
                needed,
                seen,
            )
            seen = triggers_seen(counter_ptr, final)
        if going == 1:
            add_partials(b, worker, workers, tiles, chunks, n, C, BLOCK)
    if record_ptr is not None:
        tl.store(tally_ptr + worker, made)
