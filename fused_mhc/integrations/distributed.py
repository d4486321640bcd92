"""torch.distributed: what a sharded model with hyper-connections needs beside torch's own tools.

- Sequence parallelism (each rank holds a part of the tokens): `sum_gradients` after the backward.
- FSDP2: `fully_shard_mappings` before the blocks are sharded, so that the mapping's parameters stay fp32.
- Pipeline stages carry the streams: `carried_streams` gives their shapes.
- Any of these: `check_ranks_agree` once at the start.

Activation checkpointing needs no helper: ``torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)`` around
a block that holds hyper-connections gives the same bits. No operation of this library communicates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import dispatch, env
from ..checks import FLOAT_DTYPES, check_count, check_streams
from ..errors import BackendError, InputError
from ..nn import HyperConnection, SinglePassHyperConnection
from ..nn._init import mark_sequence_parallel
from ..nn.contract import LearnedOutputContract

__all__ = ["carried_streams", "check_ranks_agree", "fully_shard_mappings", "sum_gradients"]

#: Bytes of gradients that one collective carries.
_BUCKET_BYTES = 32 << 20

_MAPPINGS = (HyperConnection, SinglePassHyperConnection, LearnedOutputContract)
#: Mappings of transformers, by name so that it need not be imported.
_MAPPING_NAMES = ("DeepseekV4HyperConnection", "DeepseekV4HyperHead")
#: Methods beside ``forward`` that read the parameters.
_METHODS = ("pre", "entry", "exit")


def _check_group(group: dist.ProcessGroup | None) -> None:
    if not (dist.is_available() and dist.is_initialized()):
        raise InputError(
            "group: expected an initialised process group, got none; call torch.distributed.init_process_group first"
        )
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise InputError(f"group: expected a process group or None, got {type(group).__name__}")


def _local(t: Tensor) -> Tensor:
    """The part of a sharded tensor that lies here; a plain tensor itself."""
    local: Any = getattr(t, "to_local", None)
    return t if local is None else local()


def _buckets(parameters: Iterable[nn.Parameter]) -> Iterator[list[Tensor]]:
    """Gradients in the order of the parameters, of one dtype and device and about `_BUCKET_BYTES` each time."""
    bucket: list[Tensor] = []
    size = 0
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        grad = _local(parameter.grad)
        same = not bucket or (bucket[0].dtype, bucket[0].device) == (grad.dtype, grad.device)
        if not same or size >= _BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(grad)
        size += grad.numel() * grad.element_size()
    if bucket:
        yield bucket


@torch.no_grad()
def sum_gradients(
    parameters: nn.Module | Iterable[nn.Parameter], group: dist.ProcessGroup | None = None
) -> None:
    """Sum gradients over a group of ranks that each saw other tokens, in rank order, in place.

    Under sequence parallelism every rank computes the mapping's gradients from its own tokens; the gradient of the
    whole sequence is their sum. ``((g_0 + g_1) + g_2) + ...`` is computed on every rank, in fp32 (fp64 for fp64) and
    rounded once, so all ranks hold the same bits, on every run and whatever the collective's algorithm. For the
    projection and the bias they are the bits of one process, too, where each rank's tokens fill one chunk of the
    operation's sum over tokens.

    Every rank of the group must call this with the same parameters. A missing gradient counts as zeros (a rank
    without tokens). Shards of DTensors are summed shard by shard: give the group of the sequence dimension.

    Args:
        parameters: a module (its parameters that bear ``sequence_parallel = True``, as those of `fused_mhc.nn` do),
            or the parameters themselves. Frozen ones are passed over.
        group: the group; None (default) is the default group.

    Raises:
        InputError: there is no process group, or the module has no marked parameter.
    """
    _check_group(group)
    if isinstance(parameters, nn.Module):
        name = type(parameters).__name__
        parameters = [p for p in parameters.parameters() if getattr(p, "sequence_parallel", False)]
        if not parameters:
            raise InputError(
                f"parameters: expected a module with parameters that bear sequence_parallel = True, got {name} "
                "without one; pass the parameters themselves"
            )
    ranks = dist.get_world_size(group)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
    for bucket in _buckets(parameters):
        flat = torch.cat([grad.reshape(-1) for grad in bucket])
        parts = flat.new_empty(ranks * flat.numel())
        gather(parts, flat, group=group)
        first, *rest = parts.view(ranks, -1)
        total = first.to(torch.promote_types(flat.dtype, torch.float32), copy=True)
        for part in rest:
            total += part
        for grad, summed in zip(bucket, total.split([grad.numel() for grad in bucket]), strict=True):
            grad.copy_(summed.view(grad.shape))


def fully_shard_mappings(model: nn.Module, **options: Any) -> list[nn.Module]:
    """FSDP2 for the mapping's parameters: groups of their own, kept and reduced in their own dtype (fp32).

    Call it before ``fully_shard`` of the blocks and of the model, whose mixed precision then reaches every other
    parameter and leaves these alone. Give those ``MixedPrecisionPolicy(..., cast_forward_inputs=False)`` where a
    block takes mixes as arguments (single-pass models): FSDP would round them otherwise.

    Args:
        model: a module that holds `HyperConnection`, `SinglePassHyperConnection`, `LearnedOutputContract` or
            DeepSeek V4 mappings of transformers.
        options: of ``torch.distributed.fsdp.fully_shard`` (``mesh``, ``reshard_after_forward``, ...), except
            ``mp_policy``.

    Returns:
        The modules that were sharded, in the order of ``model.modules()``.

    Raises:
        InputError: ``mp_policy`` is given, or the model has no mapping.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    if "mp_policy" in options:
        raise InputError(
            f"mp_policy: expected none (the mappings keep their dtype), got {options['mp_policy']!r}; "
            "give it to fully_shard of the blocks"
        )
    found = [module for module in model.modules() if _is_mapping(module)]
    if not found:
        raise InputError(
            f"model: expected one with hyper-connections, got {type(model).__name__} without any"
        )
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    for module in found:
        marked = [getattr(p, "sequence_parallel", False) for p in module.parameters(recurse=False)]
        fully_shard(module, mp_policy=policy, **options)
        for method in _METHODS:
            if hasattr(module, method):
                register_fsdp_forward_method(module, method)
        if any(marked):  # the shards are new parameters
            mark_sequence_parallel(module)
    return found


def _is_mapping(module: nn.Module) -> bool:
    return isinstance(module, _MAPPINGS) or any(c.__name__ in _MAPPING_NAMES for c in type(module).__mro__)


def carried_streams(
    lead: Sequence[int],
    num_streams: int,
    hidden_size: int,
    dtype: torch.dtype,
    *,
    single_pass: bool = False,
    mix_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, ...]:
    """What goes from one pipeline stage to the next for a micro-batch, as tensors on the meta device: for
    ``input_args`` and ``output_args`` of ``torch.distributed.pipelining.PipelineStage``.

    Args:
        lead: leading dimensions of a micro-batch, e.g. ``(batch, sequence)``.
        num_streams: n, 1..16.
        hidden_size: C, at least 1.
        dtype: of the streams.
        single_pass: False (default): two-pass blocks, which carry the streams alone. True: a chain of shifted single
            passes, which carries the last sublayer's output, the streams and the mixes.
        mix_dtype: of the mixes. Default float32.

    Returns:
        ``(streams [*lead, n, C],)``, or ``(previous_output [*lead, C], residual [*lead, n, C], pre [*lead, n],
        post [*lead, n], residual mix [*lead, n, n])``; each requires a gradient.

    Raises:
        InputError: an argument is not as above.
    """
    for size in lead:
        check_count("lead", size, 0)
    check_streams("num_streams", num_streams)
    check_count("hidden_size", hidden_size)
    for name, value in (("dtype", dtype), ("mix_dtype", mix_dtype)):
        if value not in FLOAT_DTYPES:
            raise InputError(f"{name}: expected float32, bfloat16, float16 or float64, got {value!r}")
    n, width = num_streams, hidden_size
    shapes: list[tuple[tuple[int, ...], torch.dtype]] = [((n, width), dtype)]
    if single_pass:
        shapes = [((width,), dtype), *shapes, ((n,), mix_dtype), ((n,), mix_dtype), ((n, n), mix_dtype)]
    return tuple(
        torch.empty(*lead, *shape, dtype=d, device="meta", requires_grad=True) for shape, d in shapes
    )


def check_ranks_agree(
    group: dist.ProcessGroup | None = None,
    backend: str = "auto",
    device: torch.device | str | None = None,
) -> None:
    """Compare, once, what would run each operation on every rank of a group; one collective, made here and never
    inside an operation.

    Ranks that run different backends or versions compute slightly different numbers, which data parallelism hides
    and sequence or pipeline parallelism turns into a drift that nobody finds.

    Args:
        group: the group; None (default) is the default group.
        backend: the policy the model uses. Default ``"auto"``.
        device: where this rank's tensors lie; default the current CUDA device, else the CPU.

    Raises:
        InputError: there is no process group, or ``backend`` is unknown.
        BackendError: on every rank, when the ranks differ; the message names the ranks and what differs.
    """
    _check_group(group)
    own = {
        f"{row.op} {row.direction} (backend {backend!r})": row.chosen
        for row in dispatch.backend_status(backend, device)
    }
    own["torch"] = torch.__version__
    own |= {name: str(value) for name, value in env.raw_values().items() if name.startswith("MHC_")}
    ranks: list[dict[str, str]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(ranks, own, group=group)
    for name in dict.fromkeys(name for settings in ranks for name in settings):
        values = [settings.get(name, "") for settings in ranks]
        if len(set(values)) > 1:
            told = "; ".join(
                f"{value or 'nothing'} on ranks {', '.join(str(i) for i, v in enumerate(values) if v == value)}"
                for value in dict.fromkeys(values)
            )
            raise BackendError(
                f"ranks: expected the same {name} everywhere, got {told}; set MHC_FORCE_BACKEND to one backend on "
                "all ranks, or make their installations equal"
            )
