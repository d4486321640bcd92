"""Dropout of `fused_h_post_bda`: the generator's published vectors, and the mask SPEC.md states."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fused_mhc import fused_h_post_bda
from fused_mhc.ops.h_post_bda.philox import dropout_numbers, philox_4x32
from fused_mhc.testing.compare import assert_bit_equal
from fused_mhc.testing.transcription import dropout_mask, philox_4x32_10

# Known answers published with Random123 (philox4x32, 10 rounds): counter, key, result.
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
SEEDS = (0, 1, -1, 1234, 2**32, 2**40 + 7, 2**63 - 1, -(2**63))


@pytest.mark.parametrize(("counter", "key", "answer"), VECTORS)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], answer: tuple[int, ...]) -> None:
    assert philox_4x32_10(counter, key) == answer  # type: ignore[arg-type]
    words = philox_4x32(
        tuple(torch.tensor([c]) for c in counter),  # type: ignore[arg-type]
        tuple(torch.tensor([k]) for k in key),  # type: ignore[arg-type]
    )
    assert tuple(int(w) for w in words) == answer


def kept(shape: tuple[int, int, int], dropout_p: float, seed: int | Tensor | None, device: str) -> Tensor:
    """The mask that the operation applies: a branch of ones and no residual."""
    tokens, n, width = shape
    out = fused_h_post_bda(
        torch.zeros(tokens, n, n, device=device),
        torch.zeros(tokens, n, width, device=device),
        torch.ones(tokens, n, device=device),
        torch.ones(tokens, width, device=device),
        dropout_p=dropout_p,
        seed=seed,
    )
    mask = out != 0
    torch.testing.assert_close(out[mask], torch.full_like(out[mask], 1.0 / (1.0 - dropout_p)))
    return mask


@pytest.mark.parametrize("seed", SEEDS)
def test_mask(seed: int, device: str) -> None:
    """Element by element the mask of the written-out generator, also where n*C is no multiple of 4."""
    for shape in ((5, 3, 7), (2, 4, 8), (1, 1, 1), (7, 1, 5)):
        mask = kept(shape, 0.3, seed, device).cpu()
        assert torch.equal(mask.flatten(), dropout_mask(mask.numel(), 0.3, seed)), shape


@pytest.mark.parametrize("element", range(6))
def test_a_uniform_equal_to_p_is_kept(element: int, device: str) -> None:
    """Kept where ``word * 2^-32 >= p`` in fp32: p is set to exactly what this element draws."""
    word = philox_4x32_10((element // 4, 0, 0, 0), (9, 0))[element % 4]
    uniform = float(torch.tensor(word, dtype=torch.int64).float() * 2.0**-32)
    assert bool(kept((1, 2, 4), uniform, 9, device).flatten()[element])
    above = float(torch.nextafter(torch.tensor(uniform), torch.tensor(1.0)))
    assert not bool(kept((1, 2, 4), above, 9, device).flatten()[element])


def test_seed_as_a_tensor(device: str) -> None:
    for seed in SEEDS:
        tensor = torch.tensor(seed, dtype=torch.int64, device=device)
        assert torch.equal(kept((3, 4, 8), 0.5, tensor, device), kept((3, 4, 8), 0.5, seed, device))


@pytest.mark.parametrize("dropout_p", [1e-9, 0.1, 0.5, 0.9, 1 - 2.0**-20])
def test_share_of_kept_elements(dropout_p: float, device: str) -> None:
    mask = kept((64, 4, 256), dropout_p, 5, device)
    share, count = float(mask.float().mean()), mask.numel()
    deviation = (dropout_p * (1 - dropout_p) / count) ** 0.5
    assert abs(share - (1 - dropout_p)) <= 5 * deviation + 1 / count


def test_forward_and_backward_draw_the_same_mask(device: str) -> None:
    """The gradient of the branch is zero exactly where the forward dropped it."""
    generator = torch.Generator().manual_seed(3)
    h_res = torch.rand(6, 4, 4, generator=generator).to(device)
    residual = torch.zeros(6, 4, 33, device=device)
    h_post = (0.5 + torch.rand(6, 4, generator=generator)).to(device).requires_grad_()
    x = torch.ones(6, 33, device=device, requires_grad=True)
    out = fused_h_post_bda(h_res, residual, h_post, x, dropout_p=0.4, seed=11)
    mask = (out != 0).float()
    g_post, g_x = torch.autograd.grad(out, (h_post, x), torch.ones_like(out))
    torch.testing.assert_close(g_post, mask.sum(-1) / 0.6)
    torch.testing.assert_close(g_x, (h_post.detach().unsqueeze(-1) * mask).sum(-2) / 0.6)


def arguments(device: str) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((6, 4, 4), (6, 4, 16), (6, 4), (6, 16))
    return tuple(torch.randn(s, generator=generator).to(device) for s in shapes)


def test_no_dropout_outside_training_or_at_zero(device: str) -> None:
    given = arguments(device)
    plain = fused_h_post_bda(*given)
    assert_bit_equal(fused_h_post_bda(*given, dropout_p=0.0, seed=1), plain)
    assert_bit_equal(fused_h_post_bda(*given, dropout_p=0.5, training=False, seed=1), plain)


def test_residual_is_never_dropped(device: str) -> None:
    h_res, residual, h_post, x = arguments(device)
    out = fused_h_post_bda(h_res, residual, torch.zeros_like(h_post), x, dropout_p=0.9, seed=1)
    assert_bit_equal(out, fused_h_post_bda(h_res, residual, torch.zeros_like(h_post), x))


def test_seed_none_draws_from_torchs_generator(device: str) -> None:
    given = arguments(device)
    torch.manual_seed(21)
    first = fused_h_post_bda(*given, dropout_p=0.5)
    second = fused_h_post_bda(*given, dropout_p=0.5)
    torch.manual_seed(21)
    again = fused_h_post_bda(*given, dropout_p=0.5)
    assert_bit_equal(again, first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("p", [0.0, 2.0**-40, 0.1, 0.5, 0.9, 1.0 - 2.0**-24])
def test_kernels_compare_with_the_smallest_word_that_is_kept(p: float) -> None:
    threshold, scale = dropout_numbers(p)
    words = torch.tensor([threshold, threshold - 1]).to(torch.float32) * 2.0**-32
    assert words[0] >= torch.tensor(p)
    assert threshold == 0 or words[1] < torch.tensor(p)
    assert scale == 1.0 / (1.0 - p)


def test_no_seed_is_drawn_without_dropout(device: str) -> None:
    before = torch.get_rng_state()
    fused_h_post_bda(*arguments(device), dropout_p=0.0)
    fused_h_post_bda(*arguments(device), dropout_p=0.5, training=False)
    assert torch.equal(torch.get_rng_state(), before)


def test_mask_does_not_depend_on_leading_dimensions(device: str) -> None:
    h_res, residual, h_post, x = arguments(device)
    flat = fused_h_post_bda(h_res, residual, h_post, x, dropout_p=0.5, seed=9)
    shaped = fused_h_post_bda(
        h_res.view(2, 3, 4, 4),
        residual.view(2, 3, 4, 16),
        h_post.view(2, 3, 4),
        x.view(2, 3, 16),
        dropout_p=0.5,
        seed=9,
    )
    assert_bit_equal(shaped.view(flat.shape), flat)
