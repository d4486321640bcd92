"""Sharded models against one process, with gloo on the CPU.

The scenarios below run one after another in 2 and in 4 processes (``python test_distributed.py RANKS FILE`` prints what
became of each on every rank). The first one that fails is the last that its rank runs; a hang ends by gloo's time-out,
and by that of the run.
"""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fused_mhc import (
    BackendError,
    HyperConnection,
    InputError,
    Mixes,
    SinglePassHyperConnection,
    input_expand,
)
from fused_mhc.integrations.distributed import (
    carried_streams,
    check_ranks_agree,
    fully_shard_mappings,
    sum_gradients,
)
from fused_mhc.nn.contract import LearnedOutputContract
from fused_mhc.nn.hyper_connection import HyperConnected
from fused_mhc.ops import _native
from fused_mhc.testing.compare import assert_bit_equal

RANKS = (2, 4)
SECONDS = 100
SCENARIOS: dict[str, Callable[[int, int], None]] = {}


def scenario(function: Callable[[int, int], None]) -> Callable[[int, int], None]:
    SCENARIOS[function.__name__] = function
    return function


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert_bit_equal(found[name], grad, name)


class TwoPass(nn.Module):
    """A stack of sublayers, each with a two-pass hyper-connection, and the learned head."""

    def __init__(self, width: int, depth: int = 2, n: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            HyperConnected(nn.Linear(width, width), HyperConnection(width, n)) for _ in range(depth)
        )
        self.head = LearnedOutputContract(width, n)

    def forward(self, x: Tensor) -> Tensor:
        x = input_expand(x, self.head.num_streams)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Site(nn.Module):
    """A sublayer behind its single-pass boundary; the first one opens the chain, the last one closes it."""

    def __init__(self, width: int, n: int = 4, *, first: bool = False, last: bool = False) -> None:
        super().__init__()
        self.first, self.last = first, last
        self.boundary = SinglePassHyperConnection(width, n)
        self.branch = nn.Linear(width, width)

    def forward(self, x: Tensor, *carried: Tensor) -> Any:
        if self.first:
            x, residual, mixes = self.boundary.entry(x)
        else:
            residual, *pieces = carried
            x, residual, mixes = self.boundary(x, residual, Mixes(*pieces))
        assert all(m.dtype in (torch.float32, torch.float64) for m in mixes)
        x = self.branch(x)
        return self.boundary.exit(x, residual, mixes) if self.last else (x, residual, *mixes)


class SinglePass(nn.Sequential):
    def __init__(self, width: int, depth: int = 2) -> None:
        super().__init__(*(Site(width, first=i == 0, last=i == depth - 1) for i in range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        carried: Any = (x,)
        for site in self:
            carried = site(*carried)
        return carried


# Sequence parallelism


def sequence_parallel(
    rank: int, width: int, counts: list[int]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients of one mapping: summed over ranks that hold ``counts`` tokens each, and of one process."""
    torch.manual_seed(0)
    module = HyperConnection(width)
    x, target = torch.randn(2, sum(counts), 4, width)

    def run(part: slice) -> dict[str, Tensor]:
        module.zero_grad()
        (module(x[part], torch.tanh) * target[part]).sum().backward()
        return gradients(module)

    whole = run(slice(None))
    start = sum(counts[:rank])
    run(slice(start, start + counts[rank]))
    sum_gradients(module)
    return gradients(module), whole


@scenario
def sequence_parallel_bits(rank: int, ranks: int) -> None:
    """Each rank's tokens fill one chunk of the native sum over tokens, so the sum over ranks has the order of one
    process; only a scale is a sum over columns, too, which comes last in one process and first here: the rounding of
    512 terms."""
    whole, _native.CHUNK_ELEMENTS = _native.CHUNK_ELEMENTS, 128 * 4 * 32  # small, to be quick
    found, expected = sequence_parallel(rank, 32, [128] * ranks)
    _native.CHUNK_ELEMENTS = whole
    scales = [name for name in expected if name.startswith("alpha")]
    for name in scales:
        assert (found.pop(name) - expected[name]).abs() <= 1e-5 * expected.pop(name).abs(), name
    assert_equal(found, expected)


@scenario
def sequence_parallel_uneven(rank: int, ranks: int) -> None:
    """Any split, a rank without tokens among them (row F31): another order of sums over 37 tokens, 1e-5 at most. All
    ranks hold the same bits."""
    counts = [5, 0, 21, 11] if ranks == 4 else [37, 0]
    found, expected = sequence_parallel(rank, 8, counts)
    for name, grad in expected.items():
        off = (found[name] - grad).abs().max()
        assert off <= 1e-5 * grad.abs().max(), f"{name}: {off}"
        everywhere = [torch.empty_like(found[name]) for _ in range(ranks)]
        dist.all_gather(everywhere, found[name])
        for other in everywhere:
            assert_bit_equal(other, found[name], name)


@scenario
def sum_gradients_in_rank_order(rank: int, ranks: int) -> None:
    """Mixed dtypes, missing and frozen gradients, several buckets; the sum is made in fp32 and rounded once."""
    from fused_mhc.integrations import distributed

    distributed._BUCKET_BYTES = 16
    parts = [1.0, 2.0**-9, 2.0**-9, 2.0**-9][:ranks]  # bf16 alone would drop each of the small ones
    dtypes = [torch.float32, torch.float32, torch.bfloat16, torch.float64]
    parameters = [nn.Parameter(torch.zeros(3, dtype=d)) for d in dtypes]
    missing, frozen = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2), requires_grad=False)
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, parts[rank])
    if rank == 1:
        missing.grad = torch.ones(2)
    addresses = [p.grad.data_ptr() for p in parameters]
    sum_gradients([*parameters, missing, frozen])
    assert [p.grad.data_ptr() for p in parameters] == addresses
    for parameter in parameters:
        assert torch.equal(parameter.grad, torch.full((3,), sum(parts)).to(parameter.dtype))
    assert missing.grad.tolist() == [1.0, 1.0]
    assert frozen.grad is None


# FSDP2


def sharded(model: nn.Module, blocks: list[nn.Module], dtype: torch.dtype | None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    fully_shard_mappings(model, mesh=mesh)
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)


def fsdp2(
    rank: int, ranks: int, model: nn.Module, blocks: Callable[[Any], list[nn.Module]], x: Tensor
) -> None:
    """Mixed precision: the output has the bits of a model whose sublayers are bf16 and whose mappings are fp32, and
    gradients are the mean over ranks (of each rank's own tokens), rounded by nobody on the way."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 2.0**-12  # lost in bf16 (row F23)
    plain = copy.deepcopy(model)
    for name, module in plain.named_modules():
        if name.endswith("branch"):
            module.bfloat16()
    sums: dict[str, Tensor] = {}
    for other in range(ranks):
        plain.zero_grad()
        out = plain(x[other])
        if other == rank:
            expected = out.detach()
        out.float().square().mean().backward()
        for name, grad in gradients(plain).items():
            sums[name] = sums.get(name, 0.0) + grad.float()
    sharded(model, blocks(model), torch.bfloat16)
    for _ in range(2):  # parameters are gathered anew the second time
        model.zero_grad()
        out = model(x[rank])
        assert_bit_equal(out.detach(), expected, "output")
        out.float().square().mean().backward()
    for name, parameter in model.named_parameters():
        grad = parameter.grad.full_tensor()
        assert grad.dtype is torch.float32
        off = (grad - sums[name] / ranks).abs().max()
        assert off <= 1e-6 * sums[name].abs().max(), f"{name}: {off}"
        mapping = "branch" not in name
        assert getattr(parameter, "sequence_parallel", False) is mapping, name


@scenario
def fsdp2_two_pass(rank: int, ranks: int) -> None:
    torch.manual_seed(0)
    fsdp2(rank, ranks, TwoPass(8), lambda model: list(model.blocks), torch.randn(ranks, 3, 5, 8).bfloat16())


@scenario
def fsdp2_single_pass(rank: int, ranks: int) -> None:
    torch.manual_seed(0)
    fsdp2(rank, ranks, SinglePass(8, 3), list, torch.randn(ranks, 3, 5, 8).bfloat16())


@scenario
def fsdp2_deepseek_v4(rank: int, ranks: int) -> None:
    """A switched model of transformers; full precision, so that nothing but the sharding differs."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    from fused_mhc.integrations.transformers import apply_fused_mhc_to_deepseek_v4

    torch.manual_seed(0)
    model = DeepseekV4ForCausalLM(
        DeepseekV4Config(
            vocab_size=32, hidden_size=16, moe_intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
            layer_types=["sliding_attention"] * 2, head_dim=8, qk_rope_head_dim=4, q_lora_rank=8, o_groups=2,
            o_lora_rank=4, n_routed_experts=2, num_experts_per_tok=2, num_hash_layers=0, initializer_range=0.1,
        )
    )  # fmt: skip
    tokens = torch.randint(32, (ranks, 2, 6))
    apply_fused_mhc_to_deepseek_v4(model)
    means: dict[str, Tensor] = {}
    for other in range(ranks):
        model.zero_grad()
        out = model(tokens[other], labels=tokens[other])
        if other == rank:
            expected = out.logits.detach()
        out.loss.backward()
        for name, grad in gradients(model).items():
            means[name] = means.get(name, 0.0) + grad / ranks
    sharded(model, list(model.model.layers), None)
    model.zero_grad()
    out = model(tokens[rank], labels=tokens[rank])
    assert_bit_equal(out.logits.detach(), expected, "logits")
    out.loss.backward()
    for name, parameter in model.named_parameters():
        off = (parameter.grad.full_tensor() - means[name]).abs().max()
        assert off <= 1e-6 * means[name].abs().max() + 1e-9, f"{name}: {off}"


# Pipeline stages


class Stage(nn.Module):
    """One block of `TwoPass`, with the ends of the streams where they belong."""

    def __init__(self, model: TwoPass, index: int) -> None:
        super().__init__()
        self.block = model.blocks[index]
        self.first = index == 0
        self.head = model.head if index == len(model.blocks) - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(input_expand(x, 4) if self.first else x)
        return x if self.head is None else self.head(x)


def pipeline(rank: int, ranks: int, model: Any, stage: nn.Module, single_pass: bool) -> None:
    """Gradients have the bits of one process that takes the micro-batches in turn."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    width, batch, length, count = 8, 2, 5, 4
    x, target = torch.randn(2, count * batch, length, width)

    def loss(out: Tensor, wanted: Tensor) -> Tensor:
        return (out - wanted).square().mean()

    reference = copy.deepcopy(model)
    for part, wanted in zip(x.split(batch), target.split(batch), strict=True):
        loss(reference(part), wanted).backward()
    carried = carried_streams((batch, length), 4, width, torch.float32, single_pass=single_pass)
    ends = (torch.empty(batch, length, width, device="meta"),)
    piece = PipelineStage(
        stage,
        rank,
        ranks,
        torch.device("cpu"),
        input_args=ends if rank == 0 else carried,
        output_args=ends if rank == ranks - 1 else carried,
    )
    schedule = Schedule1F1B(piece, count, loss)
    schedule.step(*((x,) if rank == 0 else ()), target=target)
    mine = {id(p) for p in stage.parameters()}
    checked = 0
    for (name, parameter), exact in zip(model.named_parameters(), reference.parameters(), strict=True):
        if id(parameter) in mine and exact.grad is not None:
            assert_bit_equal(parameter.grad, exact.grad / count, name)
            checked += 1
    assert checked >= 5


@scenario
def pipeline_two_pass(rank: int, ranks: int) -> None:
    torch.manual_seed(0)
    model = TwoPass(8, ranks)
    pipeline(rank, ranks, model, Stage(model, rank), False)


@scenario
def pipeline_single_pass(rank: int, ranks: int) -> None:
    torch.manual_seed(0)
    model = SinglePass(8, ranks)
    pipeline(rank, ranks, model, model[rank], True)


# Agreement


@scenario
def ranks_agree(rank: int, ranks: int) -> None:
    check_ranks_agree()
    if rank == 1:
        os.environ["MHC_DISABLE_TRITON"] = "1"
    with pytest.raises(BackendError, match=r"MHC_DISABLE_TRITON.* 1 on ranks 1; set MHC_FORCE_BACKEND"):
        check_ranks_agree()  # on every rank
    os.environ["MHC_FORCE_BACKEND"] = "native"
    os.environ.pop("MHC_DISABLE_TRITON", None)
    check_ranks_agree()
    os.environ["MHC_FORCE_BACKEND"] = "triton" if rank == 0 else "native"
    with pytest.raises(
        BackendError, match=r"sinkhorn fwd \(backend 'auto'\).* on ranks 0; native on ranks 1"
    ):
        check_ranks_agree()
    os.environ.pop("MHC_FORCE_BACKEND")


# The machinery


def outcome(function: Callable[[int, int], None], rank: int, ranks: int) -> str | None:
    """None, or how it failed."""
    try:
        function(rank, ranks)
    except Exception:  # noqa: BLE001  # told to the test, whatever it is
        return traceback.format_exc()
    return None


def work(rank: int, ranks: int, meeting: str, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks, timeout=timedelta(seconds=20)
    )
    for name, function in SCENARIOS.items():
        end = outcome(function, rank, ranks)
        results.put((name, rank, end))
        if end is not None:
            break  # the others can no longer meet this rank
    results.put((None, rank, None))
    results.close()
    results.join_thread()
    dist.destroy_process_group()


def launch(ranks: int, meeting: str) -> dict[str, dict[int, str | None]]:
    """Run the scenarios in ``ranks`` processes, forked from this one, which has only imported: how each ended, by
    scenario and rank."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    for rank in range(ranks):
        context.Process(target=work, args=(rank, ranks, meeting, results), daemon=True).start()
    told: dict[str, dict[int, str | None]] = {}
    running = ranks
    while running:
        name, rank, end = results.get(timeout=SECONDS / 2)
        if name is None:
            running -= 1
        else:
            told.setdefault(name, {})[rank] = end
    return told


@pytest.mark.timeout(SECONDS + 20)
@pytest.mark.parametrize("ranks", RANKS)
def test_ranks(ranks: int, tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MHC_")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, __file__, str(ranks), str(tmp_path / "meeting")],
        env=environment,
        cwd=root,
        timeout=SECONDS,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(done.stdout.splitlines()[-1])
    failed = [
        f"{name}, rank {rank}: {end}"
        for name, ends in told.items()
        for rank, end in ends.items()
        if end is not None
    ]
    assert not failed, "\n".join(failed)
    assert {name: len(ends) for name, ends in told.items()} == dict.fromkeys(SCENARIOS, ranks)


# What one process can tell


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_one_rank_changes_nothing() -> None:
    module = HyperConnection(4)
    module(torch.randn(3, 4, 4), torch.tanh).sum().backward()
    before = gradients(module)
    sum_gradients(module)
    assert_equal(gradients(module), before)
    check_ranks_agree()


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant: bool, dtype: torch.dtype) -> None:
    """Row F25: bit-equal with and without, two-pass and single-pass."""

    def run(again: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        pair = nn.ModuleDict({"two": TwoPass(8), "single": SinglePass(8, 3)}).to(dtype)
        x = torch.randn(2, 5, 8, dtype=dtype).requires_grad_()
        streams = input_expand(x, 4)
        for block in pair["two"].blocks:
            streams = checkpoint(block, streams, use_reentrant=reentrant) if again else block(streams)
        carried: Any = (pair["two"].head(streams),)
        for site in pair["single"]:
            carried = checkpoint(site, *carried, use_reentrant=reentrant) if again else site(*carried)
        carried.float().square().sum().backward()
        assert x.grad is not None
        return gradients(pair) | {"x": x.grad, "out": carried.detach()}

    assert_equal(run(True), run(False))


def test_carried_streams() -> None:
    (streams,) = carried_streams((2, 7), 4, 16, torch.bfloat16)
    assert (streams.shape, streams.dtype, streams.device.type) == ((2, 7, 4, 16), torch.bfloat16, "meta")
    parts = carried_streams((2, 7), 3, 16, torch.bfloat16, single_pass=True)
    assert [tuple(t.shape) for t in parts] == [(2, 7, 16), (2, 7, 3, 16), (2, 7, 3), (2, 7, 3), (2, 7, 3, 3)]
    assert [t.dtype for t in parts] == [torch.bfloat16] * 2 + [torch.float32] * 3


def test_bad_input() -> None:
    with pytest.raises(InputError, match="init_process_group first"):
        sum_gradients(HyperConnection(4))
    with pytest.raises(InputError, match="init_process_group first"):
        check_ranks_agree()
    with pytest.raises(InputError, match="mp_policy: expected none"):
        fully_shard_mappings(HyperConnection(4), mp_policy=None)
    with pytest.raises(InputError, match="got Linear without any"):
        fully_shard_mappings(nn.Linear(2, 2))
    for arguments, told in (
        (((2, -1), 4, 8, torch.float32), "lead"),
        (((2,), 17, 8, torch.float32), "num_streams"),
        (((2,), 4, 0, torch.float32), "hidden_size"),
        (((2,), 4, 8, torch.int64), "dtype"),
    ):
        with pytest.raises(InputError, match=told):
            carried_streams(*arguments)


@pytest.mark.usefixtures("alone")
def test_bad_input_in_a_group() -> None:
    with pytest.raises(InputError, match="pass the parameters themselves"):
        sum_gradients(nn.Linear(2, 2))
    with pytest.raises(InputError, match="group: expected a process group"):
        sum_gradients(HyperConnection(4), "everyone")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="backend: expected"):
        check_ranks_agree(backend="cuda")


if __name__ == "__main__":
    import transformers  # noqa: F401  # once, before the fork

    print(json.dumps(launch(int(sys.argv[1]), sys.argv[2])))  # noqa: T201  # read by test_ranks
