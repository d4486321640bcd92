"""What every test shares: one thread per worker, and the backend, device and dtypes of this run.

``MHC_FORCE_BACKEND`` chooses the backend that the suite tests (default native). ``MHC_FORCE_BACKEND=triton
TRITON_INTERPRET=1`` interprets the Triton kernels on the CPU; without the interpreter they run on the GPU. A test
takes ``backend``, ``device`` and ``dtype`` as fixtures; what only native offers (fp64, equal bits for a token alone
and among others) follows from `NATIVE`.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings

from fused_mhc import env
from fused_mhc.checks import FLOAT_DTYPES
from fused_mhc.testing.verify import SHAPES, plan_verify

FORCED = env.forced_backend()
BACKEND = "native" if FORCED in (None, "auto") else FORCED
NATIVE = BACKEND == "native"
DEVICE = "cpu" if NATIVE or env.interpreting() else "cuda"
#: fp64 runs on native alone.
DTYPES = [d for d in FLOAT_DTYPES if NATIVE or d is not torch.float64]

# The interpreter takes about a second for a call on the largest shapes; they are left to native and to the GPU.
CASE_SHAPES = [s for s in SHAPES if NATIVE or not env.interpreting() or s.tokens * s.width < 500]

# These hold native's own promises (fp64, its memory, its generator), whatever backend is forced.
collect_ignore = [] if NATIVE else ["ops/test_gradcheck.py", "ops/test_native.py"]

torch.set_num_threads(1)
settings.register_profile(
    "suite",
    deadline=None,
    derandomize=True,
    max_examples=25 if NATIVE else 5,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
settings.load_profile("suite")


def _own(metafunc: pytest.Metafunc) -> set[str]:
    """Arguments that the test parametrizes itself."""
    names: set[str] = set()
    for marker in metafunc.definition.iter_markers("parametrize"):
        given = marker.args[0] if marker.args else marker.kwargs["argnames"]
        names.update(n.strip() for n in (given.split(",") if isinstance(given, str) else given))
    return names


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """``case``: every operation, mode, dtype and shape that the tested backend runs. ``dtype``: its dtypes."""
    wanted = set(metafunc.fixturenames) - _own(metafunc)
    if "case" in wanted:
        cases = plan_verify([BACKEND], device=DEVICE, shapes=CASE_SHAPES)
        metafunc.parametrize("case", cases, ids=[str(c).replace(" ", "-") for c in cases])
    if "dtype" in wanted:
        metafunc.parametrize("dtype", DTYPES, ids=[str(d).removeprefix("torch.") for d in DTYPES])


@pytest.fixture
def backend() -> str:
    """The backend that this run tests, by name."""
    return BACKEND


@pytest.fixture
def native() -> bool:
    """True when the tested backend is native."""
    return NATIVE


@pytest.fixture
def device() -> str:
    """Where the tested backend runs."""
    return DEVICE


@pytest.fixture
def dtypes() -> list[torch.dtype]:
    """The dtypes of the tested backend."""
    return DTYPES


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Every test starts from the same state of torch's generator."""
    torch.manual_seed(0)
