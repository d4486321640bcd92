"""The GPU executor: a Program as one launch of the persistent Triton megakernel."""

from __future__ import annotations

import ctypes
import functools
import itertools
import threading
import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from fused_mhc import profiler
from fused_mhc.device import device_info
from fused_mhc.errors import BackendError, InputError, ScheduleError
from fused_mhc.ops._strides import alignment
from fused_mhc.ops._triton_common import INTERPRETING
from fused_mhc.ops.proj_rms_compute_h.config import ORDER, PARTS, SLICE, columns, g_parts
from fused_mhc.ops.sinkhorn.config import heuristic as sinkhorn_heuristic
from fused_mhc.scheduler import Program, check_queues, verify

from ._megakernel_tiles import Buffers
from ._megakernel_triton import SPARE_COUNTERS, WATCH_FIELDS, megakernel, prepare_kernel
from .buffers import DTYPES, allocate
from .launches import note_launch
from .tiles import Settings

__all__ = ["DEFAULT_BUDGET", "GpuExecutor", "check_launches", "resident_blocks"]

#: Polls in vain after which a launch is given up: ten seconds or more. Polls, not time: a device that is shared counts
#: none while another process has it.
DEFAULT_BUDGET = 1 << 24
#: Elements that a worker clears or adds up at once.
_BLOCK = 1024
_NUM_WARPS = 8
_GRAPHS = ("mega_mhc", "mega_mhc_grad", "tiled", "tiled_grad")
_STATE = ("previous_output", "previous_pre_mix", "previous_post_mix", "previous_residual_mix")
_STATE_GRADS = ("g_residual", "g_previous_output", "g_previous_post_mix", "g_previous_residual_mix")
#: Buffers that hold no other dtype than this executor computes in.
_COMPUTE = ("u", "logits", "mixed_rstd")


@dataclass(frozen=True)
class _Tiles:
    """Rows and columns that a body walks at a time. They depend on the graph, n and C, so the bits of a token do not
    depend on T. ``stages`` of the products' walks, as far as shared memory goes, changes no bit."""

    rows: int
    width: int
    cube_rows: int
    cube_width: int
    mapping_rows: int
    step: int
    stages: int


def _choose_tiles(program: Program) -> _Tiles:
    geometry = program.geometry
    n, width = geometry["num_streams"], geometry["hidden_size"]
    widest = max(16, triton.next_power_of_2(width))
    ahead = 3 if n * DTYPES[program.buffer("new_residual").dtype].itemsize <= 8 else 2
    if program.graph == "tiled":
        step = 64 if geometry["part_width"] % 64 == 0 else 32
        return _Tiles(8, min(256, widest), 64, 64, 32, step, ahead)
    narrow = 64 if n <= 4 else 32
    if program.graph == "tiled_grad":
        cube = min(narrow, 64 if geometry["phi_width"] % 64 == 0 else 32)
        vector = min(narrow, 64 if geometry["part_width"] % 64 == 0 else 32)
        return _Tiles(32, min(vector, widest), 32, cube, 32, 64, ahead)
    return _Tiles(32, min(narrow, widest), 64, 64, 32, 64, ahead)


def resident_blocks(compiled: Any, num_warps: int, device: torch.device) -> int:
    """Blocks of a compiled kernel that ``device`` holds at once, as the driver says.

    Raises:
        BackendError: the driver does not answer.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    blocks = ctypes.c_int()
    with torch.cuda.device(device):
        _ = compiled.run  # loads the binary
        answer = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
            ctypes.byref(blocks),
            ctypes.c_void_p(compiled.function),
            ctypes.c_int(32 * num_warps),
            ctypes.c_size_t(compiled.metadata.shared),
        )
    if answer:
        raise BackendError(f"megakernel: expected the driver to tell its occupancy, got CUDA error {answer}")
    return blocks.value * device_info(device).sm_count


class _Watch:
    """The record that a launch leaves which is given up: the first one on a device until the host has looked."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.claimed = torch.zeros(1, dtype=torch.int32, device=device)
        # Pinned: the kernel writes it, the host reads it without waiting for anything.
        self.record = torch.zeros(8, dtype=torch.int32, pin_memory=on_gpu)
        self._lock = threading.Lock()

    def check(self) -> None:
        """Raise what the record says, once."""
        with self._lock:
            if not self.record[0]:
                return
            values = dict(zip(WATCH_FIELDS, self.record.tolist(), strict=False))
            self.record.zero_()
            self.claimed.zero_()
        raise ScheduleError(_describe(**values))


@functools.lru_cache(maxsize=None)
def _watch(device: torch.device) -> _Watch:
    return _Watch(device)


_EXECUTORS: weakref.WeakValueDictionary[int, GpuExecutor] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count(1)
#: Executors that a CUDA graph has captured: their tables live as long as the process, for nobody tells when a graph goes.
_CAPTURED: set[GpuExecutor] = set()


def _describe(
    given_up: int, launch: int, worker: int, task: int, event: int, expected: int, seen: int
) -> str:
    executor = _EXECUTORS.get(launch)
    if executor is None:
        where, who, what = "a Program", f"task {task}", f"event {event}"
    else:
        program = executor.program
        where, what = f"{program.graph} ({program.direction})", program.describe_event(event)
        who = program.describe_task(task) if task >= 0 else "the epilogue"
    return f"{where} was given up: worker {worker}: {who} waits for {what}, which has {seen} of {expected} triggers"


def check_launches(device: torch.device | str | None = None) -> None:
    """Wait for a device and say whether a megakernel on it was given up since the last look. Every later launch on the
    device looks too, without waiting.

    Args:
        device: default the current CUDA device; the CPU where the interpreter runs.

    Raises:
        ScheduleError: one was; names worker, task, event, and its triggers expected and seen.
    """
    where = _device(device)
    if where.type == "cuda":
        torch.cuda.synchronize(where)
    _watch(where).check()


def _device(device: torch.device | str | None) -> torch.device:
    if INTERPRETING.value:
        return torch.device("cpu")
    where = torch.device("cuda") if device is None else torch.device(device)
    if where.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        raise BackendError(
            f"device: expected a CUDA device for the megakernel, that torch finds, got {where}"
        )
    return torch.device("cuda", torch.cuda.current_device()) if where.index is None else where


class GpuExecutor:
    """Runs a Program on a CUDA device: one launch, whose workers walk the queues of ``bytes(config)``.

    The launch is cooperative, so that all its workers are on the device at once or not at all, whatever else runs there.
    It is asynchronous and may be captured in a CUDA graph after the first call with the same dtypes; then the executor
    lives as long as the process. Any number of streams may run one executor at a time: what a launch writes belongs to
    it alone, and its event counters are cleared on its stream.

    Args:
        program: what to run; its graph is one of this package's, its streams in a 16- or 32-bit dtype, everything
            else that it computes in float32.
        device: default the current CUDA device. With ``TRITON_INTERPRET=1`` the CPU, and one worker whatever the
            Program says.
        budget: polls in vain after which a waiting worker gives the launch up.
        check: prove the Program first; False is for tests that need a broken one.

    Raises:
        InputError: the Program is none that the kernel knows, or an argument is not as above.
        BackendError: the device is not one that runs it.
        ScheduleError: the Program is wrong, or deadlocks with its workers.
    """

    def __init__(
        self,
        program: Program,
        device: torch.device | str | None = None,
        *,
        budget: int = DEFAULT_BUDGET,
        check: bool = True,
    ) -> None:
        _check_program(program)
        if not 0 < budget < 1 << 31:
            raise InputError(f"budget: expected 1 .. 2**31 - 1 polls, got {budget}")
        self.program, self.device, self.budget = program, _device(device), budget
        self.launched = replace(program, mixed_workers=1) if INTERPRETING.value else program
        if check:
            verify(program)
            check_queues(self.launched)
        self._number = next(_NUMBERS)
        self._tiles = _choose_tiles(program)
        self._table = torch.frombuffer(bytearray(program.table), dtype=torch.int32).to(self.device)
        self._stages = torch.from_numpy(program.stage_of_task.copy()).to(self.device)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # other streams read the table too
        self._compiled: dict[tuple[Any, ...], Any] = {}
        _EXECUTORS[self._number] = self

    @property
    def workers(self) -> int:
        """Workers a run starts."""
        return self.launched.workers

    def run(
        self,
        inputs: Mapping[str, Tensor | None],
        *,
        settings: Settings | None = None,
        wanted: Collection[str] | None = None,
    ) -> dict[str, Tensor]:
        """Launch the Program once, on the current stream of the device.

        Args:
            inputs: its input buffers by name, in their shapes and dtypes, on the device. Gradients may be None or left
                out: absent; so may, together, what comes from the site before (not in ``tiled_grad``): the first site of
                a chain. ``residual`` may have any strides along tokens and streams; the others, and a ``residual``
                whose last dimension is not dense, are copied unless they are contiguous.
            settings: scalars of the call.
            wanted: outputs and results to return; None for all. The backward makes no others.

        Returns:
            Outputs and results by name. While a profile records, the device has ended the launch before it returns.

        Raises:
            InputError: an input is not what the Program says.
            ScheduleError: a launch on this device was given up since the last look (the interpreter: this one).
        """
        watch = _watch(self.device)
        with torch.cuda.device(self.device if self.device.type == "cuda" else -1):
            capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            if capturing:
                _CAPTURED.add(self)
            else:
                watch.check()
                if self.device.type == "cuda":
                    stream = torch.cuda.current_stream(self.device)
                    self._table.record_stream(stream)
                    self._stages.record_stream(stream)
            memory = self._memory(inputs, wanted)
            session = None if capturing else profiler.current()
            self._launch(memory, settings or Settings(), watch, session)
        note_launch(self.program, "gpu", self.workers, interpreted=INTERPRETING.value)
        if INTERPRETING.value:
            watch.check()
        return {
            buffer.name: tensor
            for buffer in self.program.buffers
            if buffer.role in ("output", "result")
            and (wanted is None or buffer.name in wanted)
            and (tensor := memory[buffer.name]) is not None
        }

    def _memory(
        self, inputs: Mapping[str, Tensor | None], wanted: Collection[str] | None
    ) -> dict[str, Tensor | None]:
        """A dense tensor for every buffer, but for the strides of ``residual``."""
        forward = self.program.direction == "forward"
        # The stages of the forward read one another's outputs.
        made = None if forward else wanted
        memory = allocate(self.program, inputs, made, self.device, poison=INTERPRETING.value)
        for buffer in self.program.buffers:
            tensor = memory[buffer.name]
            if buffer.role != "input":
                continue
            if tensor is None:
                self._check_absent(buffer.name, memory)
                continue
            if tensor.device != self.device:
                raise InputError(f"{buffer.name}: expected a tensor on {self.device}, got {tensor.device}")
            if buffer.name != "residual" or tensor.stride(-1) != 1:
                memory[buffer.name] = tensor.contiguous()
        if not any(memory.get(name) is not None for name in _STATE_GRADS) and "g_projected" in memory:
            memory["g_projected"] = None
        return memory

    def _check_absent(self, name: str, memory: Mapping[str, Tensor | None]) -> None:
        if name.startswith("g_") or (name == "residual" and self.program.graph == "mega_mhc_grad"):
            return
        entry = self.program.graph != "tiled_grad" and all(memory[other] is None for other in _STATE)
        if name not in _STATE or not entry:
            raise InputError(f"{name}: expected a tensor, got None")

    def _constants(
        self, memory: Mapping[str, Tensor | None], settings: Settings, align: int
    ) -> dict[str, Any]:
        """The constexprs of a launch: nothing that depends on T."""
        geometry, tiles = self.program.geometry, self._tiles
        n, width = geometry["num_streams"], geometry["hidden_size"]
        forward = self.program.direction == "forward"
        stream = DTYPES[self.program.buffer("new_residual").dtype]
        phi = DTYPES[self.program.buffer("phi").dtype]
        return {
            "FORWARD": forward,
            "TILED": self.program.graph in ("tiled", "tiled_grad"),
            "n": n,
            "C": width,
            "COLUMNS": columns(n * n + 2 * n),
            "ROWS": tiles.rows,
            "WIDTH": tiles.width,
            "CUBE_ROWS": tiles.cube_rows,
            "CUBE_WIDTH": tiles.cube_width,
            "MAPPING_ROWS": tiles.mapping_rows,
            "STEP": tiles.step,
            "RATIO": SLICE // tiles.step,
            "PARTS": geometry.get("parts", 1),
            "PART_WIDTH": geometry.get("part_width", n * width),
            "PHI_WIDTH": geometry.get("phi_width", width),
            "ITERATIONS": settings.num_iters,
            "SEGMENT": sinkhorn_heuristic(n, True).segment,
            "G_PARTS": g_parts(stream),
            "X_PARTS": PARTS[stream],
            "W_PARTS": min(PARTS[phi], 3 if forward else g_parts(stream)),
            "ORDER": ORDER["fp32"],
            "ALIGN": align,
            "STATE": any(memory.get(name) is not None for name in _STATE_GRADS),
            "ENTRY": memory["previous_residual_mix"] is None,
            "EPILOGUE": any(memory[step.result] is not None for step in self.program.epilogue),
            "BLOCK": _BLOCK,
        }

    def _launch(
        self,
        memory: dict[str, Tensor | None],
        settings: Settings,
        watch: _Watch,
        session: profiler.profile | None,
    ) -> None:
        program, device = self.program, self.device
        residual, phi = memory["residual"], memory["phi"]
        assert phi is not None
        strides = (0, 0) if residual is None else residual.stride()[:2]
        align = alignment(*strides, program.geometry["hidden_size"])
        constants = self._constants(memory, settings, align)
        counters = torch.empty(program.event_count + SPARE_COUNTERS, dtype=torch.int32, device=device)
        parts = _prepare(phi, counters, constants)
        records = tally = None
        if session is not None:
            shape = (self.workers, session.capacity, profiler.RECORD_WORDS)
            records = torch.empty(shape, dtype=torch.int64, device=device)
            tally = torch.zeros(self.workers, dtype=torch.int32, device=device)
        sums = {name: 0 if (t := memory.get(name)) is None else len(t) for name in _PARTIALS}
        args = (
            Buffers(**{name: memory.get(name) for name in Buffers._fields}),
            self._table,
            parts,
            counters,
            watch.claimed,
            watch.record,
            records,
            tally,
            None if records is None else self._stages,
            program.geometry["token_count"],
            *(stride // align for stride in strides),
            max(sums[name] for name in _PARTIALS[:3]),
            sums["partial_phi"],
            program.geometry.get("ring_slots", 1),
            program.num_cube_workers,
            program.num_vector_workers,
            int(self.launched.mixed_workers is not None),
            program.event_count,
            program.events[-1].base,
            self.budget,
            self._number,
            0 if session is None else session.capacity,
            settings.norm_eps,
            settings.hc_eps,
        )
        self._start(args, tuple(constants.values()))
        if session is not None:
            assert records is not None
            assert tally is not None
            session.add(self._recorded(records, tally, session))

    def _start(self, args: tuple[Any, ...], constants: tuple[Any, ...]) -> None:
        options = {"num_warps": _NUM_WARPS, "num_stages": self._tiles.stages, "enable_fp_fusion": False}
        if INTERPRETING.value:
            megakernel[(1,)](*args, *constants, **options)
            return
        options["launch_cooperative_grid"] = True
        tensors = (*args[0], *args[1:9])
        key = (constants, *(None if t is None else (t.dtype, t.data_ptr() % 16 == 0) for t in tensors))
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = megakernel.warmup(*args, *constants, grid=(self.workers,), **options)
            room = resident_blocks(compiled, _NUM_WARPS, self.device)
            if self.workers > room:
                raise ScheduleError(
                    f"program: expected at most {room} workers, which {self.device} holds at once, got {self.workers}"
                )
            self._compiled[key] = compiled
        compiled[(self.workers, 1, 1)](*args, *constants)

    def _recorded(self, records: Tensor, tally: Tensor, session: profiler.profile) -> profiler.Launch:
        """What the device wrote down; waits for it."""
        made = tally.cpu().numpy()
        words = records.cpu().numpy()
        kept = [worker[: min(int(count), len(worker))] for worker, count in zip(words, made, strict=True)]
        return profiler.make_launch(
            self.launched,
            np.concatenate(kept),
            executor="gpu",
            kernel_name="megakernel",
            dropped=int(np.maximum(made - session.capacity, 0).sum()),
            step=session.step_number,
        )


_PARTIALS = ("partial_norm_weight", "partial_alpha", "partial_bias", "partial_phi")


def _prepare(phi: Tensor, counters: Tensor, constants: Mapping[str, Any]) -> Tensor:
    """Phi in padded bf16 parts, and the counters at zero; both on the current stream."""
    rows, step, parts = constants["COLUMNS"], constants["STEP"], constants["W_PARTS"]
    size, width = phi.shape
    padded = triton.cdiv(width, step) * step
    found = torch.empty(parts, rows, padded, dtype=torch.bfloat16, device=phi.device)
    grid = (triton.cdiv(max(rows * padded, counters.numel()), _BLOCK),)
    prepare_kernel[grid](
        phi, found, counters, width, counters.numel(), rows, size, step, parts, _BLOCK, num_warps=4
    )
    return found


def _check_program(program: Program) -> None:
    if program.graph not in _GRAPHS:
        raise InputError(f"program: expected one of the graphs {', '.join(_GRAPHS)}, got {program.graph!r}")
    for buffer in program.buffers:
        wide = buffer.dtype == "float64"
        computed = buffer.role in ("scratch", "partial") and buffer.name != "staged"
        if wide or ((computed or buffer.name in _COMPUTE) and buffer.dtype != "float32"):
            expected = "a float of at most 32 bits" if wide else "float32"
            raise InputError(f"{buffer.name}: expected {expected} on a GPU, got {buffer.dtype}")
