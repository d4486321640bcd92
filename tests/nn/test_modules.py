"""Modules: their parameters, what they compute, and that they keep no state."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fused_mhc import (
    HyperConnection,
    InputError,
    Mixes,
    SinglePassHyperConnection,
    fused_h_post_bda,
    input_expand,
    learned_output_contract,
    mega_mhc_exit,
    mhc_pre,
    output_contract,
)
from fused_mhc.nn import HyperConnected, InputExpand, LearnedOutputContract, OutputContract
from fused_mhc.testing import transcription
from fused_mhc.testing.compare import assert_bit_equal, assert_near, projection_error

C, N_STREAMS = 12, 3
SIZE = N_STREAMS * N_STREAMS + 2 * N_STREAMS
MODULES: dict[str, Callable[..., nn.Module]] = {
    "HyperConnection": HyperConnection,
    "SinglePassHyperConnection": SinglePassHyperConnection,
    "LearnedOutputContract": LearnedOutputContract,
}
SHAPES = {
    "HyperConnection": {
        "weight": (SIZE, N_STREAMS * C),
        "alpha_pre": (1,),
        "alpha_post": (1,),
        "alpha_res": (1,),
        "bias": (SIZE,),
    },
    "SinglePassHyperConnection": {
        "phi": (SIZE, N_STREAMS * C),
        "alpha": (3,),
        "bias": (SIZE,),
        "norm_weight": (C,),
    },
    "LearnedOutputContract": {"weight": (N_STREAMS, N_STREAMS * C), "scale": (1,), "base": (N_STREAMS,)},
}


def randn(*shape: int, seed: int = 0, device: str = "cpu") -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def awake(module: nn.Module) -> nn.Module:
    """Parameters away from their first values, so that every one of them matters."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator).to(parameter.device)
    return module


# Construction


@pytest.mark.parametrize("name", MODULES)
def test_parameters(name: str) -> None:
    module = MODULES[name](C, N_STREAMS)
    assert {k: tuple(p.shape) for k, p in module.named_parameters()} == SHAPES[name]
    assert set(module.state_dict()) == set(SHAPES[name])
    for parameter in module.parameters():
        assert parameter.dtype is torch.float32
        assert parameter.sequence_parallel is True  # type: ignore[attr-defined]
        assert parameter.requires_grad
    assert not list(module.buffers())


def test_no_norm_weight() -> None:
    module = SinglePassHyperConnection(C, N_STREAMS, norm=False)
    assert module.norm_weight is None
    assert set(module.state_dict()) == {"phi", "alpha", "bias"}


def test_signatures() -> None:
    """Names, order and defaults of SPEC.md."""
    two_pass = inspect.signature(HyperConnection).parameters
    assert {k: p.default for k, p in two_pass.items() if k != "hidden_size"} == {
        "num_streams": 4,
        "sinkhorn_iterations": 20,
        "rms_eps": 1e-6,
        "compute_h_eps": 1e-6,
        "sinkhorn_eps": 1e-6,
        "rms_eps_mode": "inside",
        "variant": "softmax",
        "alpha_init": 0.01,
        "backend": "auto",
        "device": None,
        "dtype": torch.float32,
    }
    single = inspect.signature(SinglePassHyperConnection).parameters
    assert {k: p.default for k, p in single.items() if k != "hidden_size"} == {
        "num_streams": 4,
        "sinkhorn_iterations": 20,
        "hc_eps": 1e-6,
        "norm_eps": 1e-6,
        "norm": True,
        "alpha_init": 0.01,
        "backend": "auto",
        "schedule": "auto",
        "device": None,
        "dtype": torch.float32,
    }
    for parameters in (two_pass, single):
        positional = [k for k, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert positional == ["hidden_size", "num_streams"]


@pytest.mark.parametrize("name", MODULES)
def test_reset_parameters(name: str) -> None:
    """Same seed, same parameters; another seed, another projection; an overwritten module starts anew."""
    torch.manual_seed(3)
    first = MODULES[name](C, N_STREAMS)
    torch.manual_seed(3)
    second = MODULES[name](C, N_STREAMS)
    for key, value in first.state_dict().items():
        assert_bit_equal(value, second.state_dict()[key], key)
    awake(second)
    torch.manual_seed(3)
    second.reset_parameters()  # type: ignore[operator]
    for key, value in first.state_dict().items():
        assert_bit_equal(value, second.state_dict()[key], key)


@pytest.mark.parametrize("alpha_init", [0.0, 0.01, 1.0])
def test_alpha_init(alpha_init: float) -> None:
    two_pass = HyperConnection(C, N_STREAMS, alpha_init=alpha_init)
    for alpha in (two_pass.alpha_pre, two_pass.alpha_post, two_pass.alpha_res):
        assert alpha.item() == pytest.approx(alpha_init)
    single = SinglePassHyperConnection(C, N_STREAMS, alpha_init=alpha_init)
    assert single.alpha.tolist() == pytest.approx([alpha_init] * 3)


@pytest.mark.parametrize("name", MODULES)
def test_meta_device(name: str) -> None:
    """Built on meta, then given memory and values: as good as new."""
    module = MODULES[name](C, N_STREAMS, device="meta")
    assert all(p.is_meta for p in module.parameters())
    module = module.to_empty(device="cpu")
    torch.manual_seed(3)
    module.reset_parameters()  # type: ignore[operator]
    torch.manual_seed(3)
    fresh = MODULES[name](C, N_STREAMS)
    for key, value in module.state_dict().items():
        assert_bit_equal(value, fresh.state_dict()[key], key)
    assert all(p.sequence_parallel for p in module.parameters())  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", MODULES)
def test_dtype(name: str) -> None:
    module = MODULES[name](C, N_STREAMS, dtype=torch.bfloat16)
    assert all(p.dtype is torch.bfloat16 for p in module.parameters())


@pytest.mark.parametrize("name", MODULES)
def test_state_dict_round_trip(name: str, device: str) -> None:
    module = awake(MODULES[name](C, N_STREAMS, device=device))
    other = MODULES[name](C, N_STREAMS, device=device)
    other.load_state_dict(module.state_dict())
    for key, value in module.state_dict().items():
        assert_bit_equal(other.state_dict()[key], value, key)


@pytest.mark.parametrize("name", MODULES)
def test_repr_and_copy(name: str) -> None:
    module = MODULES[name](C, N_STREAMS)
    for part in (name, f"hidden_size={C}", f"num_streams={N_STREAMS}", "backend='auto'"):
        assert part in repr(module)
    twin = copy.deepcopy(module)
    assert repr(twin) == repr(module)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, {"hidden_size": bad}) for name in MODULES for bad in (0, -1, 2.0, "8", None)),
        *((name, {"num_streams": bad}) for name in MODULES for bad in (0, 17, 2.0, True)),
        *((name, {"backend": bad}) for name in MODULES for bad in ("cuda", None)),
        *((name, {"dtype": bad}) for name in MODULES for bad in (torch.int32, "float32", None)),
        *(
            (name, {"sinkhorn_iterations": bad})
            for name in ("HyperConnection", "SinglePassHyperConnection")
            for bad in (0, 1.5, None)
        ),
        *(
            (name, {"alpha_init": bad})
            for name in ("HyperConnection", "SinglePassHyperConnection")
            for bad in (math.nan, math.inf, "0.01", None)
        ),
        *(
            ("HyperConnection", {eps: bad})
            for eps in ("rms_eps", "compute_h_eps", "sinkhorn_eps")
            for bad in (0.0, -1.0, math.nan)
        ),
        *(("SinglePassHyperConnection", {eps: 0.0}) for eps in ("hc_eps", "norm_eps")),
        *(("LearnedOutputContract", {eps: 0.0}) for eps in ("eps", "norm_eps")),
        ("HyperConnection", {"rms_eps_mode": "between"}),
        ("HyperConnection", {"variant": "hard"}),
        ("SinglePassHyperConnection", {"schedule": "eager"}),
    ],
    ids=str,
)
def test_bad_arguments(name: str, changes: dict[str, Any]) -> None:
    (argument,) = changes
    with pytest.raises(InputError, match=rf"^{argument}: expected .*got"):
        MODULES[name](**{"hidden_size": C, "num_streams": N_STREAMS, **changes})


def test_bad_calls(device: str) -> None:
    two_pass, single = HyperConnection(C, 3, device=device), SinglePassHyperConnection(C, 3, device=device)
    with pytest.raises(InputError):
        two_pass.pre(torch.zeros(2, 3, C + 1, device=device))
    with pytest.raises(InputError):
        two_pass.pre(torch.zeros(2, 4, C, device=device))
    _, state = two_pass.pre(torch.zeros(2, 3, C, device=device))
    with pytest.raises(InputError):
        two_pass.post(state, torch.zeros(2, C + 1, device=device))
    with pytest.raises(InputError):
        single.entry(torch.zeros(2, C + 1, device=device))


# The two-pass module


def test_two_pass_is_its_operations(device: str) -> None:
    module = awake(HyperConnection(C, N_STREAMS, device=device))
    assert isinstance(module, HyperConnection)
    x, bias = randn(2, 5, N_STREAMS, C, device=device), randn(C, seed=2, device=device)
    layer_input, state = module.pre(x)
    expected = mhc_pre(x, module.weight, module.alpha_pre, module.alpha_post, module.alpha_res, module.bias)
    for actual, other in zip((layer_input, state.h_post, state.h_res, state.residual), expected, strict=True):
        assert_bit_equal(actual, other)
    branch = torch.tanh(layer_input)
    out = module.post(state, branch, bias)
    assert_bit_equal(out, fused_h_post_bda(expected[2], x, expected[1], branch, bias))
    assert_bit_equal(module(x, torch.tanh), module.post(state, branch))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"variant": "paper", "rms_eps_mode": "outside"},
        {"sinkhorn_iterations": 2, "rms_eps": 1e-2, "compute_h_eps": 1e-3, "sinkhorn_eps": 1e-3},
    ],
    ids=str,
)
def test_two_pass_options_reach_the_operation(options: dict[str, Any], device: str) -> None:
    module = awake(HyperConnection(C, N_STREAMS, device=device, **options))
    assert isinstance(module, HyperConnection)
    x = 0.1 * randn(5, N_STREAMS, C, device=device)
    layer_input, state = module.pre(x)
    renamed = {("num_iterations" if k == "sinkhorn_iterations" else k): v for k, v in options.items()}
    parameters = {k: p.detach().cpu().double() for k, p in module.named_parameters()}
    exact = transcription.mhc_pre(x.cpu().double(), **parameters, **renamed)
    bound = 8 * projection_error(N_STREAMS * C)
    for actual, expected in zip((layer_input, state.h_post, state.h_res), exact, strict=False):
        assert_near(actual, expected, bound)


def test_two_pass_starts_near_a_plain_residual_network(device: str) -> None:
    """Pre-mixes 1/n, post-mixes 1, mixing near the identity."""
    for n in (2, 4, 8):
        module = HyperConnection(64, n, device=device)
        _, state = module.pre(randn(50, n, 64, seed=9, device=device))
        assert (state.h_post - 1).abs().max() < 0.05
        diagonal = state.h_res.diagonal(dim1=-2, dim2=-1)
        assert diagonal.detach().min().item() > 0.8


def test_two_pass_keeps_no_state(device: str) -> None:
    """Two calls in flight at once do not see each other, and the module holds nothing afterwards."""
    module = awake(HyperConnection(C, N_STREAMS, device=device))
    assert isinstance(module, HyperConnection)
    before = set(vars(module))
    one, two = (randn(4, N_STREAMS, C, seed=s, device=device) for s in (1, 2))
    alone = module(one, torch.tanh)
    input_one, state_one = module.pre(one)
    input_two, state_two = module.pre(two)
    module.post(state_two, torch.tanh(input_two))
    assert_bit_equal(module.post(state_one, torch.tanh(input_one)), alone)
    assert set(vars(module)) == before


def test_wrapper(device: str) -> None:
    """Any ``[..., C] -> [..., C]`` inside, further arguments passed on to it."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(C, C, device=device)

        def forward(self, x: Tensor, factor: float, *, shift: float = 0.0) -> Tensor:
            result: Tensor = self.inner(x) * factor + shift
            return result

    connection, branch = HyperConnection(C, N_STREAMS, device=device), Scale()
    wrapped = HyperConnected(branch, connection)
    x = randn(2, 4, N_STREAMS, C, device=device)
    assert_bit_equal(wrapped(x, 2.0, shift=1.0), connection(x, lambda h: branch(h, 2.0, shift=1.0)))
    assert {k.split(".")[0] for k in wrapped.state_dict()} == {"branch", "connection"}


# The single-pass module


def chain(x: Tensor, sites: list[SinglePassHyperConnection], branch: Callable[[Tensor], Tensor]) -> Tensor:
    block_input, residual, mixes = sites[0].entry(x)
    for site in sites[1:]:
        block_input, residual, mixes = site(branch(block_input), residual, mixes)
    return sites[-1].exit(branch(block_input), residual, mixes)


def exact_chain(
    x: Tensor, sites: list[SinglePassHyperConnection], branch: Callable[[Tensor], Tensor]
) -> Tensor:
    """The same from the transcription in fp64."""
    parameters = [[site.phi, site.alpha, site.bias, site.norm_weight] for site in sites]
    double = [[None if p is None else p.detach().cpu().double() for p in group] for group in parameters]
    residual, *mixes, block_input = transcription.mega_mhc_entry(x.cpu().double(), N_STREAMS, *double[0])
    for group in double[1:]:
        residual, *mixes, block_input = transcription.mega_mhc(branch(block_input), residual, *mixes, *group)
    return transcription.mega_mhc_exit(branch(block_input), residual, *mixes, double[-1][-1])


@pytest.mark.parametrize("norm", [True, False])
def test_single_pass_chain(norm: bool, device: str) -> None:
    sites = [awake(SinglePassHyperConnection(C, N_STREAMS, norm=norm, device=device)) for _ in range(3)]
    x = randn(2, 5, C, device=device)
    found = chain(x, sites, torch.tanh)  # type: ignore[arg-type]
    assert found.shape == x.shape
    assert_near(found, exact_chain(x, sites, torch.tanh), 1e-4)  # type: ignore[arg-type]


def test_single_pass_results(device: str) -> None:
    site = awake(SinglePassHyperConnection(C, N_STREAMS, device=device))
    assert isinstance(site, SinglePassHyperConnection)
    x = randn(2, 5, C, device=device)
    block_input, residual, mixes = site.entry(x)
    assert isinstance(mixes, Mixes)
    assert (mixes.pre.shape, mixes.post.shape, mixes.residual.shape) == (
        (2, 5, N_STREAMS),
        (2, 5, N_STREAMS),
        (2, 5, N_STREAMS, N_STREAMS),
    )
    assert_bit_equal(residual, input_expand(x, N_STREAMS))
    assert block_input.shape == x.shape
    out = site.exit(block_input, residual, mixes)
    assert_bit_equal(out, mega_mhc_exit(block_input, residual, *mixes, site.norm_weight))


def test_single_pass_keeps_no_state(device: str) -> None:
    sites = [awake(SinglePassHyperConnection(C, N_STREAMS, device=device)) for _ in range(2)]
    before = set(vars(sites[0]))
    one, two = (randn(4, C, seed=s, device=device) for s in (1, 2))
    alone = chain(one, sites, torch.tanh)  # type: ignore[arg-type]
    first, second = (s for s in sites if isinstance(s, SinglePassHyperConnection))
    input_one, residual_one, mixes_one = first.entry(one)
    first.entry(two)
    input_one, residual_one, mixes_one = second(torch.tanh(input_one), residual_one, mixes_one)
    assert_bit_equal(second.exit(torch.tanh(input_one), residual_one, mixes_one), alone)
    assert set(vars(first)) == before


def test_bf16_streams_keep_fp32_mixes(device: str) -> None:
    """The normal case: bf16 activations, fp32 parameters, fp32 mixes, fp32 gradients of the parameters."""
    two_pass = HyperConnection(C, N_STREAMS, device=device)
    single = SinglePassHyperConnection(C, N_STREAMS, device=device)
    x = randn(5, N_STREAMS, C, device=device).bfloat16()
    layer_input, state = two_pass.pre(x)
    out = two_pass.post(state, layer_input)
    block_input, residual, mixes = single.entry(x[:, 0])
    block_input, residual, mixes = single(block_input, residual, mixes)
    assert {t.dtype for t in (layer_input, out, block_input, residual)} == {torch.bfloat16}
    assert {t.dtype for t in (state.h_post, state.h_res, *mixes)} == {torch.float32}
    loss = out.float().square().sum() + block_input.float().sum() + sum(m.square().sum() for m in mixes)
    loss.backward()
    for parameter in (*two_pass.parameters(), *single.parameters()):
        assert parameter.grad is not None
        assert parameter.grad.dtype is torch.float32
        assert bool(torch.isfinite(parameter.grad).all())


# The ends of the streams


def test_ends(device: str) -> None:
    x = randn(2, 3, C, device=device)
    streams = InputExpand(N_STREAMS)(x)
    assert_bit_equal(streams, input_expand(x, N_STREAMS))
    assert_bit_equal(OutputContract()(streams), output_contract(streams))
    head = awake(LearnedOutputContract(C, N_STREAMS, eps=1e-3, norm_eps=1e-2, device=device))
    assert isinstance(head, LearnedOutputContract)
    assert_bit_equal(
        head(streams), learned_output_contract(streams, head.weight, head.scale, head.base, 1e-3, 1e-2)
    )
    with pytest.raises(InputError):
        InputExpand(0)


# Training


@pytest.mark.parametrize("kind", ["two pass", "single pass"])
def test_a_small_model_learns(kind: str, device: str) -> None:
    """A regression: the loss falls to a fraction, and the same seed gives the same bits."""

    def train() -> tuple[list[float], list[Tensor]]:
        torch.manual_seed(1)
        branches = nn.ModuleList(nn.Linear(C, C, device=device) for _ in range(3))
        if kind == "two pass":
            sites = nn.ModuleList(HyperConnection(C, N_STREAMS, device=device) for _ in range(3))
        else:
            sites = nn.ModuleList(SinglePassHyperConnection(C, N_STREAMS, device=device) for _ in range(3))
        head = nn.Linear(C, C, device=device)
        parameters = [*branches.parameters(), *sites.parameters(), *head.parameters()]
        optimizer = torch.optim.Adam(parameters, lr=1e-2)
        x = randn(64, C, seed=3, device=device)
        target = torch.sin(2 * x).roll(1, -1)
        losses = []
        for _ in range(60):
            if kind == "two pass":
                streams = input_expand(x, N_STREAMS)
                for site, branch in zip(sites, branches, strict=True):
                    streams = site(streams, lambda h, f=branch: torch.tanh(f(h)))
                out = head(output_contract(streams))
            else:
                block_input, residual, mixes = sites[0].entry(x)  # type: ignore[operator]
                for site, branch in zip(list(sites)[1:], branches, strict=False):
                    block_input, residual, mixes = site(torch.tanh(branch(block_input)), residual, mixes)
                out = head(sites[-1].exit(torch.tanh(branches[-1](block_input)), residual, mixes))  # type: ignore[operator]
            loss = (out - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, [p.detach() for p in parameters]

    losses, parameters = train()
    again, same = train()
    assert losses[-1] < 0.3 * losses[0], losses
    assert losses == again
    for one, other in zip(parameters, same, strict=True):
        assert_bit_equal(one, other)
