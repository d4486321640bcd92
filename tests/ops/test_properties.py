"""Properties that hold for any data: symmetry under renaming of streams, linearity, doubly stochastic mixing."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fused_mhc import (
    fused_add_3,
    fused_h_aggregate,
    fused_h_post_bda,
    fused_proj_rms_compute_h,
    fused_sinkhorn,
    input_expand,
    mega_mhc,
    mega_mhc_entry,
    mhc_pre,
    output_contract,
)
from fused_mhc.testing.compare import assert_bit_equal, assert_near, projection_error
from fused_mhc.testing.inputs import Shape, Tensors, make_tensors

#: Relative error that a sum of a few dozen fp32 products may have.
SUMS = 64 * torch.finfo(torch.float32).eps

shapes = st.builds(
    Shape,
    st.tuples(st.integers(1, 6)),
    st.integers(1, 8),
    st.integers(1, 40),
)
seeds = st.integers(0, 2**16)
variants = st.sampled_from(["softmax", "paper"])


def made(op: str, shape: Shape, seed: int, device: str) -> dict[str, Tensor]:
    tensors: Tensors = make_tensors(op, shape, torch.float32, device=device, seed=seed)
    return {k: t for k, t in tensors.items() if t is not None}


def order(n: int, seed: int, device: str) -> Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed)).to(device)


@given(shapes, seeds, variants, st.integers(1, 20), st.floats(0.1, 6.0))
def test_sinkhorn_sums(
    device: str, shape: Shape, seed: int, variant: str, num_iterations: int, scale: float
) -> None:
    """Columns sum to s/(s+eps) next to 1; no entry is negative."""
    logits = made("sinkhorn", shape, seed, device)["input_logits"] * scale
    out = fused_sinkhorn(logits, num_iterations, variant=variant)
    assert bool((out >= 0).all())
    assert (out.double().sum(-2) - 1).abs().max() <= 1e-5


@given(shapes, seeds, variants)
def test_sinkhorn_renamed_streams(device: str, shape: Shape, seed: int, variant: str) -> None:
    """Renaming rows and columns of the logits renames those of the matrix."""
    logits = made("sinkhorn", shape, seed, device)["input_logits"]
    rows, columns = order(shape.n, seed, device), order(shape.n, seed + 1, device)
    renamed = fused_sinkhorn(logits[:, rows][:, :, columns], 20, variant=variant)
    assert_near(renamed, fused_sinkhorn(logits, 20, variant=variant)[:, rows][:, :, columns], SUMS)


@given(shapes, seeds, st.floats(-30.0, 30.0))
def test_sinkhorn_paper_shift(device: str, shape: Shape, seed: int, shift: float) -> None:
    """A constant added to a row of logits changes nothing (the maximum is taken off)."""
    logits = made("sinkhorn", shape, seed, device)["input_logits"]
    shifted = fused_sinkhorn(logits + shift, 20)
    assert_near(shifted, fused_sinkhorn(logits, 20), SUMS * (1 + abs(shift)))


@given(shapes, seeds)
def test_aggregate_and_post_renamed_streams(device: str, shape: Shape, seed: int) -> None:
    """The streams' order is a matter of names: collapse does not see it, the update carries it along."""
    renamed = order(shape.n, seed, device)
    one = made("h_aggregate", shape, seed, device)
    assert_near(
        fused_h_aggregate(one["x"][:, renamed], one["h_pre"][:, renamed]), fused_h_aggregate(**one), SUMS
    )
    two = made("h_post_bda", shape, seed, device)
    out = fused_h_post_bda(
        two["h_res"][:, renamed][:, :, renamed],
        two["original_residual"][:, renamed],
        two["h_post"][:, renamed],
        two["x"],
        two["bias"],
    )
    assert_near(out, fused_h_post_bda(**two)[:, renamed], SUMS)


@given(shapes, seeds, st.floats(-3.0, 3.0), st.floats(-3.0, 3.0))
def test_aggregate_is_linear(device: str, shape: Shape, seed: int, a: float, b: float) -> None:
    first, second = (made("h_aggregate", shape, s, device) for s in (seed, seed + 1))
    h_pre = first["h_pre"]
    both = fused_h_aggregate(a * first["x"] + b * second["x"], h_pre)
    scale = 20 * torch.ones_like(both, dtype=torch.float64)
    parts = a * fused_h_aggregate(first["x"], h_pre) + b * fused_h_aggregate(second["x"], h_pre)
    assert_near(both, parts, SUMS, scale=scale * shape.n)


@given(shapes, seeds, st.floats(-3.0, 3.0), st.floats(-3.0, 3.0))
def test_post_is_linear_in_streams_and_branch(
    device: str, shape: Shape, seed: int, a: float, b: float
) -> None:
    first, second = (made("h_post_bda", shape, s, device) for s in (seed, seed + 1))
    mixes = (first["h_res"], first["h_post"])

    def post(residual: Tensor, x: Tensor) -> Tensor:
        return fused_h_post_bda(mixes[0], residual, mixes[1], x)

    both = post(
        a * first["original_residual"] + b * second["original_residual"], a * first["x"] + b * second["x"]
    )
    parts = a * post(first["original_residual"], first["x"]) + b * post(
        second["original_residual"], second["x"]
    )
    scale = 20 * torch.ones_like(both, dtype=torch.float64)
    assert_near(both, parts, SUMS, scale=scale * shape.n)


@given(shapes, seeds)
def test_identity_mixing_is_the_plain_residual(device: str, shape: Shape, seed: int) -> None:
    """Identity, post-mix one: every stream takes the branch's output, and nothing else changes."""
    tensors = made("h_post_bda", shape, seed, device)
    lead, n = shape.lead, shape.n
    out = fused_h_post_bda(
        torch.eye(n, device=device).expand(*lead, n, n),
        tensors["original_residual"],
        torch.ones(*lead, n, device=device),
        tensors["x"],
    )
    assert_bit_equal(out, tensors["original_residual"] + tensors["x"].unsqueeze(-2))


@given(shapes, seeds)
def test_doubly_stochastic_mixing_keeps_the_mean(device: str, shape: Shape, seed: int) -> None:
    """Rows that sum to 1 keep the sum over streams: the mean of what comes out is the mean of what went in, plus the
    mean post-mix times the branch."""
    tensors = made("h_post_bda", shape, seed, device)
    mixing = fused_sinkhorn(tensors["h_res"], 50)
    out = fused_h_post_bda(mixing, tensors["original_residual"], tensors["h_post"], tensors["x"])
    expected = (
        output_contract(tensors["original_residual"])
        + tensors["h_post"].mean(-1, keepdim=True) * tensors["x"]
    )
    scale = torch.full_like(expected, 8.0, dtype=torch.float64)
    assert_near(output_contract(out), expected, 1e-4, scale=scale)


@given(shapes, seeds)
def test_contract_undoes_expand(device: str, shape: Shape, seed: int) -> None:
    x = made("input_expand", shape, seed, device)["x"]
    expanded = input_expand(x, shape.n)
    for stream in expanded.unbind(-2):
        assert_bit_equal(stream.contiguous(), x)
    assert_near(output_contract(expanded), x, SUMS)


@given(shapes, seeds)
def test_add_is_exact_where_fp32_is(device: str, shape: Shape, seed: int) -> None:
    """bf16 sums: the fp32 sum, rounded once."""
    tensors = {k: t.bfloat16() for k, t in made("fused_add_3", shape, seed, device).items()}
    a, b, c = (tensors[k].float() for k in "abc")
    assert_bit_equal(fused_add_3(**tensors), ((a + b) + c).bfloat16())


@given(shapes, seeds)
def test_projection_ignores_the_scale_of_a_token(device: str, shape: Shape, seed: int) -> None:
    """Normalised streams: a token times a power of two gives the same mixes, and a rms as many times as large."""
    tensors = made("proj_rms_compute_h", shape, seed, device)
    options = {"n": shape.n, "eps": 1e-12}
    base = fused_proj_rms_compute_h(**tensors, **options)
    scaled = fused_proj_rms_compute_h(**{**tensors, "x": tensors["x"] * 4.0}, **options)
    for before, after in zip(base[:3], scaled[:3], strict=True):
        scale = torch.full_like(before, 4.0, dtype=torch.float64)
        assert_near(after, before, 2 * projection_error(shape.width), scale=scale)
    assert_near(scaled[3], 4.0 * base[3], SUMS)


@given(shapes, seeds)
def test_mhc_pre_is_its_parts(device: str, shape: Shape, seed: int) -> None:
    """4 + 1 + 2 in one call: the same as the three calls."""
    tensors = made("mhc_pre", shape, seed, device)
    layer_input, h_post, h_res, passed = mhc_pre(**tensors)
    x, parameters = tensors["x"], {k: t for k, t in tensors.items() if k != "x"}
    pre, post, res, _ = fused_proj_rms_compute_h(
        x.flatten(-2), **parameters, n=shape.n, rms_eps_mode="inside"
    )
    bound = 4 * projection_error(shape.width)
    assert_near(layer_input, fused_h_aggregate(x, pre), bound)
    assert_near(h_post, post, bound)
    assert_near(h_res, fused_sinkhorn(res.unflatten(-1, (shape.n, shape.n)), 20), 4 * bound)
    assert passed.data_ptr() == x.data_ptr()


@given(shapes, seeds)
def test_entry_is_mega_mhc_on_the_first_site(device: str, shape: Shape, seed: int) -> None:
    """Expanded streams, nothing before: identity, zeros and a one-hot pre-mix."""
    tensors = made("mega_mhc_entry", shape, seed, device)
    lead, n = shape.lead, shape.n
    x = tensors.pop("x")
    entry = mega_mhc_entry(x, n, **tensors)
    site = mega_mhc(
        torch.zeros_like(x),
        input_expand(x, n),
        torch.eye(n, device=device)[0].expand(*lead, n),
        torch.zeros(*lead, n, device=device),
        torch.eye(n, device=device).expand(*lead, n, n),
        **tensors,
    )
    assert_bit_equal(entry[0], site[0], "new_residual")
    bound = 4 * projection_error(shape.width)
    for name, actual, expected in zip(
        ("pre", "post", "res", "block_input"), entry[1:], site[1:], strict=True
    ):
        assert_near(actual, expected, bound, name)
