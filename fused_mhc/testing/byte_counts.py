"""The fewest bytes that each operation must move: the yardstick of every benchmark.

Counted are the tensors as wide as a stream, each read or written once; the mappings (n to n*n numbers a token) and
the parameters are left out, except for `sinkhorn`, which has nothing else.
"""

from __future__ import annotations

from ..checks import check_choice, check_count, check_streams
from ..dispatch import DIRECTIONS, OPERATIONS

__all__ = ["fewest_bytes", "stream_units"]


def stream_units(op: str, direction: str, n: int) -> int:
    """How many tensors of ``[T, C]`` the operation must read and write, in ``direction`` (``"fwd"`` or ``"bwd"``).

    At n = 4: aggregate 5 and 9, post 9 and 14, projection 4 and 8, single pass 10 and 15. A backward counts the
    gradients of every input. `sinkhorn` moves no stream: 0.

    Raises:
        InputError: an unknown operation or direction, or n outside 1..16.
    """
    check_choice("op", op, tuple(OPERATIONS))
    check_choice("direction", direction, DIRECTIONS)
    check_streams("n", n)
    forward, backward = {
        "sinkhorn": (0, 0),
        "h_aggregate": (n + 1, 2 * n + 1),  # x, out; g, x, g_x
        "h_post_bda": (2 * n + 1, 3 * n + 2),  # residual, x, out; g, residual, x, g_residual, g_x
        "proj_rms_compute_h": (n, 2 * n),  # x; x, g_x
        "fused_add_3": (4 * n, 0),  # a, b, c, out, all n streams; g is every gradient as it is
        "input_expand": (n + 1, n + 1),
        "output_contract": (n + 1, n + 1),
        "learned_output_contract": (n + 1, 2 * n + 1),
        "mhc_pre": (n + 1, 3 * n + 1),  # x, layer_input; g_layer_input, x, gradient of the passed-on x, g_x
        "mega_mhc": (
            2 * n + 2,
            3 * n + 3,
        ),  # residual, output, new residual, block input; G, g_b and the gradients
        "mega_mhc_entry": (n + 2, n + 3),  # x, new residual, block input; G, g_b, x, g_x
        "mega_mhc_exit": (n + 2, 2 * n + 3),  # residual, output, out; g, residual, output and their gradients
    }[op]
    return forward if direction == "fwd" else backward


def fewest_bytes(
    op: str, direction: str, tokens: int, n: int, hidden_size: int, element_size: int = 2
) -> int:
    """Bytes for ``tokens`` tokens of ``n`` streams of ``hidden_size`` elements of ``element_size`` bytes.

    `sinkhorn`: the logits read and the matrices written (backward: one more matrix read), ``hidden_size`` unused.

    Raises:
        InputError: as `stream_units`; a negative token count; a size below 1.
    """
    check_count("tokens", tokens, 0)
    check_count("hidden_size", hidden_size)
    check_count("element_size", element_size)
    if op == "sinkhorn":
        return (2 if direction == "fwd" else 3) * n * n * tokens * element_size
    return stream_units(op, direction, n) * tokens * hidden_size * element_size
