"""A Program: the tables of one launch, and everything a runtime or a proof needs beside them."""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from fused_mhc.errors import InputError
from fused_mhc.scheduler.event import EVENT_INVALID_ID
from fused_mhc.scheduler.order import Stages, order_queue
from fused_mhc.scheduler.runtime_config import (
    TASK_DTYPE,
    RuntimeConfigC,
    load_runtime_config,
    queue_array,
    task_array,
    trigger_array,
)
from fused_mhc.scheduler.task import MAX_TASK_NUM, QUEUE_CAPACITY, TaskAiCoreType, TaskType

__all__ = [
    "READ",
    "ROLES",
    "WRITE",
    "AccessTable",
    "AccessWriter",
    "Buffer",
    "EventRange",
    "Program",
    "Reduction",
    "Stage",
    "cut",
]

READ, WRITE = 1, 2
#: ``input`` is filled before the launch; ``output`` must be written whole by tasks; ``scratch`` lives in the
#: launch; ``partial`` is written whole by tasks and read by the epilogue, which writes ``result``.
ROLES = ("input", "output", "scratch", "partial", "result")
_FORMAT, _VERSION = "fused-mhc-program", 1
_ITEM_SIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_ACCESS_COLUMNS = (("task", "<i4"), ("buffer", "<i4"), ("start", "<i8"), ("stop", "<i8"), ("mode", "<i4"))


@dataclass(frozen=True)
class Buffer:
    """A dense row-major array the tasks read or write.

    ``parts > 1`` says that tasks own slices of the last axis. The byte ranges of such a buffer count its
    bytes block by block (a tile of rows, or one leading index, cut into that many slices of ``part_width``),
    so that a slice of a tile is one range; the memory itself stays row-major.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: str
    parts: int = 1

    def __post_init__(self) -> None:
        if self.dtype not in _ITEM_SIZES:
            raise InputError(
                f"buffer {self.name}: expected dtype {', '.join(_ITEM_SIZES)}, got {self.dtype!r}"
            )
        if self.role not in ROLES:
            raise InputError(f"buffer {self.name}: expected role {', '.join(ROLES)}, got {self.role!r}")

    @property
    def item_size(self) -> int:
        """Bytes of one element."""
        return _ITEM_SIZES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole buffer."""
        return math.prod(self.shape) * self.item_size


@dataclass(frozen=True)
class Stage:
    """The tasks of one operator: ``task_count`` of them from ``first_task`` on."""

    name: str
    diagnostic_name: str
    task_type: int
    core_type: int
    first_task: int
    task_count: int


@dataclass(frozen=True)
class EventRange:
    """``count`` events of one purpose from ``base`` on."""

    name: str
    base: int
    count: int


@dataclass(frozen=True)
class Reduction:
    """What the epilogue does after the last event: ``result = sum(partial, axis 0)``, added in index
    order."""

    partial: str
    result: str


@dataclass(frozen=True, eq=False)
class AccessTable:
    """Who touches which bytes: one row for each (task, buffer, byte range); ``mode`` is READ, WRITE or
    both."""

    task: np.ndarray
    buffer: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    mode: np.ndarray

    def __len__(self) -> int:
        return len(self.task)

    @staticmethod
    def of(columns: Iterable[Any]) -> AccessTable:
        """A table from its five columns."""
        return AccessTable(
            *(np.asarray(c, dtype) for c, (_, dtype) in zip(columns, _ACCESS_COLUMNS, strict=True))
        )

    def columns(self) -> list[np.ndarray]:
        """The five columns in order."""
        return [getattr(self, name) for name, _ in _ACCESS_COLUMNS]

    def drop(self, rows: np.ndarray) -> AccessTable:
        """The table without the rows marked."""
        return AccessTable(*(column[~rows] for column in self.columns()))


def cut(start: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut ranges at every border of any of them.

    Returns ``(points, range, piece)``: piece ``k`` is ``points[k]:points[k + 1]``; the other two say, pair
    by pair, which range covers which piece, ranges ascending.
    """
    points = np.unique(np.concatenate([start, stop]))
    first = np.searchsorted(points, start)
    count = np.searchsorted(points, stop) - first
    owner = np.repeat(np.arange(len(start)), count)
    piece = first[owner] + np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
    return points, owner, piece


class AccessWriter:
    """Collects accesses by whole arrays of tasks, in elements or rows of the buffers."""

    def __init__(self, buffers: Iterable[Buffer]) -> None:
        self._buffers = {buffer.name: (index, buffer) for index, buffer in enumerate(buffers)}
        self._chunks: list[tuple[np.ndarray, ...]] = []

    def elements(self, tasks: np.ndarray, mode: int, name: str, start: Any, stop: Any) -> None:
        """Task ``k`` touches elements ``start[k]:stop[k]`` of the flattened buffer; empty ranges are
        dropped."""
        index, buffer = self._buffers[name]
        first = np.broadcast_to(np.asarray(start, np.int64), tasks.shape) * buffer.item_size
        last = np.broadcast_to(np.asarray(stop, np.int64), tasks.shape) * buffer.item_size
        kept = last > first
        count = int(kept.sum())
        self._chunks.append(
            (tasks[kept], np.full(count, index), first[kept], last[kept], np.full(count, mode))
        )

    def rows(self, tasks: np.ndarray, mode: int, names: str, start: Any, stop: Any) -> None:
        """Task ``k`` touches rows ``start[k]:stop[k]`` (first axis) of each named buffer."""
        for name in names.split():
            width = math.prod(self._buffers[name][1].shape[1:])
            self.elements(tasks, mode, name, np.asarray(start) * width, np.asarray(stop) * width)

    def whole(self, tasks: np.ndarray, mode: int, names: str) -> None:
        """Every task touches all of each named buffer."""
        for name in names.split():
            self.elements(tasks, mode, name, 0, math.prod(self._buffers[name][1].shape))

    def slices(
        self,
        tasks: np.ndarray,
        mode: int,
        names: str,
        start: Any,
        stop: Any,
        part: Any,
        width: int,
        columns: int,
        block: tuple[Any, Any] | None = None,
    ) -> None:
        """Task ``k`` touches rows ``start[k]:stop[k]`` of slice ``part[k]``, in block order (see
        :class:`Buffer`).

        The slice is columns ``part*width`` up to ``width`` more, of the ``columns`` that the last axis
        counts; ``block`` gives the first row of the block and the one after its last (default: the rows
        themselves).
        """
        first = np.asarray(part, np.int64) * width
        size = np.minimum(first + width, columns) - first
        start, stop = np.asarray(start, np.int64), np.asarray(stop, np.int64)
        top, bottom = (start, stop) if block is None else block
        for name in names.split():
            row = math.prod(self._buffers[name][1].shape[1:])
            inner = row // columns
            base = top * row + (bottom - top) * inner * first
            self.elements(
                tasks, mode, name, base + (start - top) * inner * size, base + (stop - top) * inner * size
            )

    def has(self, name: str) -> bool:
        """Whether the Program has that buffer."""
        return name in self._buffers

    def table(self) -> AccessTable:
        """Everything collected so far."""
        return AccessTable.of(np.concatenate(columns) for columns in zip(*self._chunks, strict=True))


@dataclass(frozen=True, eq=False)
class Program:
    """One launch as data.

    Attributes:
        graph: which builder made it (``mega_mhc``, ``mega_mhc_grad``, ``tiled``, ``tiled_grad``, or a name
            of yours).
        direction: ``forward`` or ``backward``.
        geometry: the sizes a kernel needs (``token_count``, ``hidden_size``, ``num_streams``,
            ``token_tile``, ...).
        table: ``bytes(config)``, unchanged.
        event_count, event_capacity: events in use, events allowed.
        num_cube_workers, num_vector_workers: workers of each role; the static stride of each queue.
        mixed_workers: M workers that take positions ``w, w + M, ...`` of both queues instead; None for roles.
        stages, events, buffers, accesses: who is who, and which task touches which bytes.
        epilogue: the sums over tiles added after the last event.
    """

    graph: str
    direction: str
    geometry: dict[str, int]
    table: bytes = field(repr=False)
    event_count: int
    event_capacity: int
    num_cube_workers: int
    num_vector_workers: int
    mixed_workers: int | None
    stages: tuple[Stage, ...]
    events: tuple[EventRange, ...]
    buffers: tuple[Buffer, ...]
    accesses: AccessTable = field(repr=False)
    epilogue: tuple[Reduction, ...] = ()

    def __post_init__(self) -> None:
        size = ctypes.sizeof(RuntimeConfigC)
        if len(self.table) != size:
            raise InputError(f"table: expected the {size} bytes of a table, got {len(self.table)}")

    @cached_property
    def config(self) -> RuntimeConfigC:
        """The table as a structure (a copy: changing it does not change the Program)."""
        return RuntimeConfigC.from_buffer_copy(self.table)

    @cached_property
    def tasks(self) -> np.ndarray:
        """The tasks, with the field names of ``TaskDescC``."""
        return task_array(self.config)

    @cached_property
    def triggers(self) -> np.ndarray:
        """Trigger counts of the events in use."""
        return trigger_array(self.config, self.event_count)

    @property
    def task_count(self) -> int:
        """Tasks in the table."""
        return int(self.config.task_num)

    @property
    def workers(self) -> int:
        """Workers one launch starts."""
        return self.mixed_workers or self.num_cube_workers + self.num_vector_workers

    def queue(self, core: TaskAiCoreType) -> np.ndarray:
        """Task ids of the cube or vector queue, in order."""
        return queue_array(self.config, core)

    def queues_of_workers(self) -> list[list[np.ndarray]]:
        """For each worker its queues in the order in which it looks at their heads (cube first)."""
        cube = self.queue(TaskAiCoreType.TASK_AICORE_CUBE)
        vector = self.queue(TaskAiCoreType.TASK_AICORE_VECTOR)
        if self.mixed_workers:
            return [
                [cube[w :: self.mixed_workers], vector[w :: self.mixed_workers]]
                for w in range(self.mixed_workers)
            ]
        return [[cube[w :: self.num_cube_workers]] for w in range(self.num_cube_workers)] + [
            [vector[w :: self.num_vector_workers]] for w in range(self.num_vector_workers)
        ]

    @cached_property
    def stage_of_task(self) -> np.ndarray:
        """Index into ``stages`` of every task."""
        result = np.full(self.task_count, -1, np.int32)
        for index, stage in enumerate(self.stages):
            result[stage.first_task : stage.first_task + stage.task_count] = index
        return result

    @cached_property
    def buffer_index(self) -> dict[str, int]:
        """Index into ``buffers`` by name."""
        return {buffer.name: index for index, buffer in enumerate(self.buffers)}

    def buffer(self, name: str) -> Buffer:
        """The buffer of that name."""
        if name not in self.buffer_index:
            raise InputError(f"name: expected a buffer of this Program, got {name!r}")
        return self.buffers[self.buffer_index[name]]

    def describe_task(self, task: int) -> str:
        """``task 44 (mhc_grad_phi_rms[2], cube)``."""
        if not 0 <= task < self.task_count:
            return f"task {task} (outside the table)"
        row = self.tasks[task]
        index = int(self.stage_of_task[task])
        name = self.stages[index].name if index >= 0 else f"type {row['task_type']}"
        core = int(row["task_aicore_type"])
        role = {1: "cube", 2: "vector"}.get(core, f"core type {core}")
        return f"task {task} ({name}[{int(row['task_index'])}], {role})"

    def describe_event(self, event: int) -> str:
        """``event 41 (rms_ready[0])``."""
        if event == EVENT_INVALID_ID:
            return "no event"
        for part in self.events:
            if part.base <= event < part.base + part.count:
                return f"event {event} ({part.name}[{event - part.base}])"
        return f"event {event}"

    def reordered(self, groups: list[list[str | tuple[str, int]]], wave_rows: int | None = None) -> Program:
        """The same Program with its vector queue ordered by stage names (see :func:`order.order_queue`).

        Raises:
            InputError: a name is not a vector stage of this Program.
            ScheduleError: a stage is missing or named twice.
        """
        types = {
            stage.name: TaskType(stage.task_type)
            for stage in self.stages
            if stage.core_type == TaskAiCoreType.TASK_AICORE_VECTOR
        }

        def resolve(stage: str | tuple[str, int]) -> tuple[TaskType, int]:
            name, lag = stage if isinstance(stage, tuple) else (stage, 0)
            if name not in types:
                raise InputError(f"groups: expected vector stages ({', '.join(types)}), got {name!r}")
            return types[name], lag

        chosen: Stages = [[resolve(stage) for stage in group] for group in groups]
        config = RuntimeConfigC.from_buffer_copy(self.table)
        order_queue(config, TaskAiCoreType.TASK_AICORE_VECTOR, chosen, wave_rows, owner=self.graph)
        return replace(self, table=bytes(config))

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything above, in hexadecimal; equal Programs have equal digests on every machine."""
        value = hashlib.sha256(json.dumps(self._header(), sort_keys=True).encode())
        for array in (*self._arrays().values(), *self.accesses.columns()):
            value.update(np.ascontiguousarray(array).tobytes())
        return value.hexdigest()

    def to_json(self) -> str:
        """The Program as text; :meth:`from_json` reads it back."""
        document = {
            "format": _FORMAT,
            "version": _VERSION,
            "digest": self.digest,
            **self._header(),
            **{name: array.tolist() for name, array in self._arrays().items()},
            "accesses": [column.tolist() for column in self.accesses.columns()],
        }
        return json.dumps(document)

    @staticmethod
    def from_json(text: str) -> Program:
        """The Program that :meth:`to_json` wrote.

        Raises:
            InputError: ``text`` is not such a document, is of another version, or does not match its digest.
        """
        try:
            document = json.loads(text)
        except json.JSONDecodeError as error:
            raise InputError(f"text: expected JSON of a Program, got {error}") from error
        if not isinstance(document, dict) or document.get("format") != _FORMAT:
            raise InputError(f"text: expected a document of format {_FORMAT!r}, got something else")
        if document.get("version") != _VERSION:
            raise InputError(f"text: expected version {_VERSION}, got {document.get('version')!r}")
        try:
            program = _parse(document)
            digest = program.digest
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise InputError(
                f"text: expected the fields of a Program, got {type(error).__name__}: {error}"
            ) from error
        if digest != document.get("digest"):
            raise InputError(
                f"text: expected content of digest {document.get('digest')!r}, got content of digest {digest!r}"
            )
        return program

    def _header(self) -> dict[str, Any]:
        return {
            "graph": self.graph,
            "direction": self.direction,
            "geometry": self.geometry,
            "num_workers": int(self.config.num_workers),
            "event_count": self.event_count,
            "event_capacity": self.event_capacity,
            "num_cube_workers": self.num_cube_workers,
            "num_vector_workers": self.num_vector_workers,
            "mixed_workers": self.mixed_workers,
            "stages": [asdict(stage) for stage in self.stages],
            "events": [asdict(part) for part in self.events],
            "buffers": [{**asdict(buffer), "shape": list(buffer.shape)} for buffer in self.buffers],
            "epilogue": [asdict(step) for step in self.epilogue],
        }

    def _arrays(self) -> dict[str, np.ndarray]:
        return {
            "tasks": self.tasks,
            "triggers": self.triggers,
            "cube_queue": self.queue(TaskAiCoreType.TASK_AICORE_CUBE),
            "vector_queue": self.queue(TaskAiCoreType.TASK_AICORE_VECTOR),
        }


def _parse(document: dict[str, Any]) -> Program:
    """A Program from a parsed document of the right format and version."""
    tasks = np.array([tuple(row) for row in document["tasks"]], TASK_DTYPE)
    if not 0 < len(tasks) <= MAX_TASK_NUM:
        raise InputError(f"tasks: expected 1..{MAX_TASK_NUM}, got {len(tasks)}")
    config = RuntimeConfigC()
    config.task_num = len(tasks)
    config.num_workers = document["num_workers"]
    config.queue_capacity = QUEUE_CAPACITY
    task_array(config)[:] = tasks
    triggers = document["triggers"]
    trigger_array(config, len(triggers))[:] = triggers
    for slot, name in enumerate(("cube", "vector")):
        config.task_index_num[slot] = len(document[f"{name}_queue"])
    for core, name in (
        (TaskAiCoreType.TASK_AICORE_CUBE, "cube"),
        (TaskAiCoreType.TASK_AICORE_VECTOR, "vector"),
    ):
        queue_array(config, core)[:] = document[f"{name}_queue"]
    return Program(
        graph=document["graph"],
        direction=document["direction"],
        geometry={str(key): int(value) for key, value in document["geometry"].items()},
        table=bytes(load_runtime_config(bytes(config))),
        event_count=document["event_count"],
        event_capacity=document["event_capacity"],
        num_cube_workers=document["num_cube_workers"],
        num_vector_workers=document["num_vector_workers"],
        mixed_workers=document["mixed_workers"],
        stages=tuple(Stage(**stage) for stage in document["stages"]),
        events=tuple(EventRange(**part) for part in document["events"]),
        buffers=tuple(
            Buffer(**{**buffer, "shape": tuple(buffer["shape"])}) for buffer in document["buffers"]
        ),
        accesses=AccessTable.of(document["accesses"]),
        epilogue=tuple(Reduction(**step) for step in document["epilogue"]),
    )
