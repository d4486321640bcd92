"""The CPU executor: a Program run by threads that wait for events, in friendly and in hostile orders."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fused_mhc import profiler
from fused_mhc.errors import InputError, ScheduleError
from fused_mhc.ops._native import exact_matmul
from fused_mhc.scheduler import EVENT_INVALID_ID, Program, check_queues, verify

from .buffers import allocate, reduce_partials
from .launches import note_launch
from .tiles import BODIES, Settings, TileState

__all__ = ["CpuExecutor"]

Order = Literal["in_order", "random", "adversarial"]
_ORDERS = ("in_order", "random", "adversarial")


class CpuExecutor:
    """Runs a Program on CPU tensors with native's tile functions.

    Results are the same bits for every order and number of threads: tasks write what only they write,
    partial sums are kept for each tile, and the epilogue adds them in tile order.

    Args:
        program: what to run.
        order: ``"in_order"``: each worker walks its queue, as a device does. ``"random"``: any task whose
            event has fired, drawn by ``seed``. ``"adversarial"``: of those always the one that comes last in
            the table.
        seed: for ``"random"``; with one thread it fixes the order.
        threads: workers. In order: 1 is a mixed worker; more are split into the roles as the Program's
            workers are, or are mixed as they are; default 2. Otherwise default 1.
        timeout: seconds without any progress after which the run is given up.
        check: prove the Program first; False is for tests that need a broken one.

    Raises:
        InputError: an argument is not as above.
        ScheduleError: the Program is wrong, or deadlocks with that number of threads.
    """

    def __init__(
        self,
        program: Program,
        order: Order = "in_order",
        seed: int = 0,
        threads: int | None = None,
        *,
        timeout: float = 60.0,
        check: bool = True,
    ) -> None:
        if order not in _ORDERS:
            raise InputError(f"order: expected one of {', '.join(_ORDERS)}, got {order!r}")
        if threads is not None and threads <= 0:
            raise InputError(f"threads: expected 1 or more, got {threads}")
        if not timeout > 0:
            raise InputError(f"timeout: expected more than 0 seconds, got {timeout}")
        if threads is None:
            threads = 2 if order == "in_order" else 1
        self.program, self.order, self.seed, self.timeout = program, order, seed, timeout
        self.launched = _with_workers(program, threads)
        if check:
            verify(program)
            check_queues(self.launched)

    @property
    def workers(self) -> int:
        """Threads a run starts."""
        return self.launched.workers

    def run(
        self,
        inputs: Mapping[str, Tensor | None],
        *,
        settings: Settings | None = None,
        wanted: Collection[str] | None = None,
    ) -> dict[str, Tensor]:
        """Run the Program once.

        Args:
            inputs: its input buffers by name, in their shapes and dtypes (any strides); None or left out:
                absent.
            settings: scalars of the call.
            wanted: outputs and results to make; None for all.

        Returns:
            Outputs and results by name.

        Raises:
            InputError: an input is not what the Program says.
            ScheduleError: no progress for ``timeout`` seconds, or for ever; names worker, task and event.
        """
        device = torch.device("cpu")
        memory = allocate(self.program, inputs, wanted, device)
        session = profiler.current()
        # Switches of the whole process: set here once, so that the threads' own settings find them as they
        # leave them.
        with torch.no_grad(), exact_matmul():
            state = TileState(self.program, memory, settings or Settings())
            run = _Run(self, state, None if session is None else session.capacity)
            run.start()
            reduce_partials(self.program, memory)
        note_launch(self.program, "cpu", self.workers)
        if session is not None:
            session.add(run.launch(session.step_number))
        made = ("output", "result")
        return {
            buffer.name: tensor
            for buffer in self.program.buffers
            if buffer.role in made and (tensor := memory[buffer.name]) is not None
        }


def _with_workers(program: Program, threads: int) -> Program:
    """The Program launched with that many workers: mixed, or in the roles of the original."""
    if threads == 1 or program.mixed_workers:
        return replace(program, mixed_workers=threads)
    both = program.num_cube_workers + program.num_vector_workers
    cube = min(max(1, threads * program.num_cube_workers // both), threads - 1)
    return replace(program, num_cube_workers=cube, num_vector_workers=threads - cube)


class _Run:
    """One run: counters, and what each worker may do next. All of it is guarded by one condition."""

    def __init__(self, executor: CpuExecutor, state: TileState, capacity: int | None) -> None:
        self.program, self.executor, self.state = executor.launched, executor, state
        tasks = self.program.tasks
        self.depends, self.triggers = tasks["dependent_event"].tolist(), tasks["trigger_event"].tolist()
        self.remaining = self.program.triggers.tolist()
        self.types = tasks["task_type"].tolist()
        self.left = self.program.task_count
        self.done = bytearray(self.left)
        self.running: dict[int, int] = {}
        self.waiting: dict[int, int] = {}
        self.progress = time.monotonic()
        self.failure: BaseException | None = None
        self.changed = threading.Condition()
        workers = executor.workers
        self.alive = workers
        self.pick: Callable[[int], int | None]
        if executor.order == "in_order":
            self.queues = [
                [queue.tolist() for queue in worker] for worker in self.program.queues_of_workers()
            ]
            self.heads = [[0] * len(worker) for worker in self.queues]
            self.pick = self._pick_in_order
        else:
            self.pool = [t for t, event in enumerate(self.depends) if event == EVENT_INVALID_ID]
            self.waiters: dict[int, list[int]] = {}
            for task, event in enumerate(self.depends):
                if event != EVENT_INVALID_ID:
                    self.waiters.setdefault(event, []).append(task)
            self.random = random.Random(executor.seed)
            self.pick = self._pick_from_pool
        self.inner_threads = torch.get_num_threads()
        self.capacity = capacity
        self.records: list[list[tuple[int, ...]]] = [[] for _ in range(workers)]
        self.dropped = 0

    def start(self) -> None:
        """Run everything, or raise what went wrong."""
        threads = [
            threading.Thread(target=self._work, args=(worker,), daemon=True, name=f"fused-mhc-{worker}")
            for worker in range(self.executor.workers)
        ]
        for thread in threads:
            thread.start()
        with self.changed:
            while self.alive and self.failure is None:
                waited = time.monotonic() - self.progress
                if waited >= self.executor.timeout:
                    self.failure = ScheduleError(
                        f"no progress for {self.executor.timeout:g} s: {self._describe_stuck()}"
                    )
                    self.changed.notify_all()
                    break
                self.changed.wait(self.executor.timeout - waited)
            failure = self.failure
        if failure is not None:
            raise failure
        for thread in threads:
            thread.join()

    def _work(self, worker: int) -> None:
        try:
            # A new thread starts with another number of inner threads, and products change bits with it.
            torch.set_num_threads(self.inner_threads)
            with torch.no_grad():
                self._walk(worker)
        except Exception as error:  # noqa: BLE001 - handed to the caller's thread, which raises it
            with self.changed:
                self.failure = self.failure or error
        finally:
            with self.changed:
                self.alive -= 1
                self.changed.notify_all()

    def _walk(self, worker: int) -> None:
        recording = self.capacity is not None
        idle_since = time.perf_counter_ns() if recording else 0
        while True:
            with self.changed:
                task = self._await(worker)
                if task is None:
                    return
                self.running[worker] = task
            begin = time.perf_counter_ns() if recording else 0
            BODIES[self.types[task]](self.state, self.state.tasks[task])
            end = time.perf_counter_ns() if recording else 0
            with self.changed:
                del self.running[worker]
                self._trigger(task)
            if recording:
                after = time.perf_counter_ns()
                self._record(worker, task, (idle_since, begin), (begin, end), (end, after))
                idle_since = after

    def _await(self, worker: int) -> int | None:
        """The next task of a worker, or None when it has none left (or the run failed)."""
        while self.failure is None:
            task = self.pick(worker)
            if task is not None:
                self.waiting.pop(worker, None)
                return task
            if worker not in self.waiting:
                return None
            if not self.running and len(self.waiting) == self.alive:
                self.failure = ScheduleError(f"every worker waits: {self._describe_stuck()}")
                self.changed.notify_all()
                return None
            self.changed.wait()
        return None

    def _pick_in_order(self, worker: int) -> int | None:
        """The first head whose event has fired, the cube queue's before the vector queue's."""
        self.waiting.pop(worker, None)
        for slot, queue in enumerate(self.queues[worker]):
            at = self.heads[worker][slot]
            if at == len(queue):
                continue
            task = queue[at]
            event = self.depends[task]
            if event == EVENT_INVALID_ID or self.remaining[event] <= 0:
                self.heads[worker][slot] += 1
                return int(task)
            self.waiting.setdefault(worker, task)
        return None

    def _pick_from_pool(self, worker: int) -> int | None:
        """A ready task, drawn or the last of the table."""
        self.waiting.pop(worker, None)
        if self.pool:
            last = self.executor.order == "adversarial"
            index = self.pool.index(max(self.pool)) if last else self.random.randrange(len(self.pool))
            self.pool[index], self.pool[-1] = self.pool[-1], self.pool[index]
            return self.pool.pop()
        if self.left > len(self.running):
            self.waiting[worker] = -1
        return None

    def _trigger(self, task: int) -> None:
        event = self.triggers[task]
        self.remaining[event] -= 1
        self.left -= 1
        self.done[task] = 1
        self.progress = time.monotonic()
        if self.remaining[event] == 0:
            if self.executor.order != "in_order":
                self.pool += self.waiters.get(event, ())
            self.waiting.clear()  # each of them looks again, now or when it wakes
            self.changed.notify_all()
        elif self.left == 0:
            self.changed.notify_all()

    def _describe_stuck(self) -> str:
        """Who computes or waits, for which event, and how far its counter came."""
        if self.running:
            worker, task = min(self.running.items())
            return f"worker {worker} computes {self.program.describe_task(task)}"
        open_tasks = [task for task, ran in enumerate(self.done) if not ran]
        waiting = {task: worker for worker, task in self.waiting.items() if task >= 0}
        task = min(waiting, default=open_tasks[0])
        for _ in range(self.program.event_count):  # back to the event that holds up the others
            event = self.depends[task]
            behind = [t for t in open_tasks if self.triggers[t] == event]
            if not behind or event == EVENT_INVALID_ID or self.remaining[event] <= 0:
                break
            task = behind[0]
        event = self.depends[task]
        who = f"worker {waiting[task]}: " if task in waiting else ""
        if event == EVENT_INVALID_ID or self.remaining[event] <= 0:
            return f"{who}{self.program.describe_task(task)} could run but stands behind a task that waits for it"
        total = int(self.program.triggers[event])
        return (
            f"{who}{self.program.describe_task(task)} waits for {self.program.describe_event(event)}, "
            f"which has {total - self.remaining[event]} of {total} triggers"
        )

    def _record(self, worker: int, task: int, *spans: tuple[int, int]) -> None:
        """Keep wait, compute and trigger of one task, or count them as dropped."""
        core, stage = int(self.state.tasks["task_aicore_type"][task]), int(self.program.stage_of_task[task])
        mine, waits = self.records[worker], self.depends[task] != EVENT_INVALID_ID
        for kind, (begin, end) in enumerate(spans):
            if kind == profiler.WAIT and not waits:
                continue
            if self.capacity is not None and len(mine) < self.capacity:
                mine.append((begin, end, worker, core, task, stage, kind))
            else:
                with self.changed:
                    self.dropped += 1

    def launch(self, step: int) -> profiler.Launch:
        """The records of this run."""
        rows = [row for worker in self.records for row in worker]
        return profiler.make_launch(
            self.program,
            np.array(rows, profiler.RECORD_DTYPE),
            executor="cpu",
            kernel_name=f"fused_mhc::{self.program.graph}",
            dropped=self.dropped,
            step=step,
        )
