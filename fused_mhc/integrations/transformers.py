"""Hugging Face Transformers: one call switches DeepSeek V4 over to the fused operations, one call undoes it.

What changes is the arithmetic of three classes of ``transformers.models.deepseek_v4`` (transformers >= 5.17), and
nothing else: parameters, state dicts, module classes, hooks and configuration stay as they are.

| class | becomes |
|---|---|
| ``DeepseekV4HyperConnection`` | `mhc_pre` |
| ``DeepseekV4DecoderLayer``, the two updates of the streams | `fused_h_post_bda` |
| ``DeepseekV4HyperHead`` | `learned_output_contract` |

The mixes stay in fp32 to the end (Transformers rounds them to the activations' dtype before it mixes); in fp32 the
two agree to rounding. Transformers 5.17 has no single-pass (V4.1) classes to switch.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import re
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from ..checks import check_backend, check_positive, check_streams
from ..dispatch import MHCBackend
from ..errors import InputError
from ..ops.contract import learned_output_contract
from ..ops.h_post_bda import fused_h_post_bda
from ..ops.mhc_pre import mhc_pre

__all__ = ["apply_fused_mhc_to_deepseek_v4", "undo_fused_mhc_to_deepseek_v4"]

_LEAST = (5, 17)
_MODELING = "transformers.models.deepseek_v4.modeling_deepseek_v4"
#: The attribute that names a module's backend, on the class (None: not switched) or on one module.
_MARK = "fused_mhc_backend"


def _hyper_connection(self: Any, hidden_streams: Tensor, hand_on: bool = False) -> tuple[Tensor, ...]:
    """``(post, comb, collapsed)`` as in Transformers; with ``hand_on`` also the streams, for the residual path, so
    that their gradient is added in the one write of the gradient of the input."""
    alpha_pre, alpha_post, alpha_res = self.scale.split(1)
    collapsed, post, comb, streams = mhc_pre(
        hidden_streams,
        self.fn,
        alpha_pre,
        alpha_post,
        alpha_res,
        self.base,
        self.hc_sinkhorn_iters,
        self.fused_mhc_backend,
        rms_eps=self.input_norm.eps,
        compute_h_eps=self.hc_eps,
        sinkhorn_eps=self.hc_eps,
    )
    return (post, comb, collapsed, streams) if hand_on else (post, comb, collapsed)


def _decoder_layer(
    self: Any, hidden_states: Tensor, input_ids: Tensor | None = None, **kwargs: Any
) -> Tensor:
    backend = self.fused_mhc_backend
    post, comb, collapsed, streams = self.attn_hc(hidden_states, hand_on=True)
    output, _ = self.self_attn(self.input_layernorm(collapsed), **kwargs)
    hidden_states = fused_h_post_bda(comb, streams, post, output, None, backend)
    post, comb, collapsed, streams = self.ffn_hc(hidden_states, hand_on=True)
    output = self.mlp(self.post_attention_layernorm(collapsed), input_ids=input_ids)
    return fused_h_post_bda(comb, streams, post, output, None, backend)


def _hyper_head(self: Any, x: Tensor) -> Tensor:
    return learned_output_contract(
        x, self.hc_fn, self.hc_scale, self.hc_base, self.eps, self.input_norm.eps, self.fused_mhc_backend
    )


#: Class -> what its forward takes in the versions we know, and what it becomes.
_FUSED: dict[str, tuple[tuple[str, ...], Callable[..., Any]]] = {
    "DeepseekV4HyperConnection": (("self", "hidden_streams"), _hyper_connection),
    "DeepseekV4DecoderLayer": (("self", "hidden_states", "input_ids", "kwargs"), _decoder_layer),
    "DeepseekV4HyperHead": (("self", "x"), _hyper_head),
}

#: Forwards that are switched now, and the ones they stand for.
_originals: dict[type[nn.Module], Callable[..., Any]] = {}
#: Models that were switched one by one.
_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def _modeling() -> ModuleType:
    """Transformers' module of DeepSeek V4.

    Raises:
        InputError: transformers is absent, too old, or has the classes in a form that is not known here.
    """
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        version = "none"
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers < _LEAST:
        least = ".".join(map(str, _LEAST))
        raise InputError(
            f"transformers: expected version {least} or newer, got {version}; install it with "
            "pip install 'fused-mhc[hf]'"
        )
    modeling = importlib.import_module(_MODELING)
    for name, (parameters, _) in _FUSED.items():
        cls = getattr(modeling, name, None)
        forward = getattr(cls, "forward", None)
        if cls in _originals and getattr(forward, "__wrapped__", None) is _originals[cls]:
            continue
        if forward is None or forward.__module__ != _MODELING:
            raise InputError(
                f"{name}.forward: expected the one of transformers, got "
                f"{'none' if forward is None else forward.__module__ + '.' + forward.__qualname__}; "
                "undo the other patch first"
            )
        found = tuple(inspect.signature(forward).parameters)
        if found != parameters:
            raise InputError(
                f"{name}.forward: expected the parameters {', '.join(parameters)}, got {', '.join(found)}; "
                f"transformers {version} is not supported yet, use 5.17"
            )
    return modeling


def _sites(model: Any, modeling: ModuleType) -> dict[str, nn.Module]:
    """The modules of ``model`` that are switched, by name, after all checks of the model.

    Raises:
        InputError: the model is none, has nothing to switch, was changed by others, or its weights do not fit its
            configuration.
    """
    if not isinstance(model, nn.Module):
        raise InputError(
            f"model: expected a DeepSeek V4 model of transformers or None, got {type(model).__name__}"
        )
    classes = tuple(getattr(modeling, name) for name in _FUSED)
    sites = {name: module for name, module in model.named_modules() if isinstance(module, classes)}
    config = getattr(model, "config", None)
    if config is None or not any(isinstance(m, modeling.DeepseekV4DecoderLayer) for m in sites.values()):
        raise InputError(
            "model: expected a DeepSeek V4 model of transformers (a config and DeepseekV4DecoderLayer inside), "
            f"got {type(model).__name__}"
        )
    config = config.get_text_config()
    n, width = config.hc_mult, config.hidden_size
    check_streams("config.hc_mult", n)
    check_positive("config.hc_eps", config.hc_eps)
    rows = n * n + 2 * n
    shapes = {
        "fn": (rows, n * width),
        "base": (rows,),
        "scale": (3,),
        "hc_fn": (n, n * width),
        "hc_base": (n,),
        "hc_scale": (1,),
    }
    for name, module in sites.items():
        if "forward" in vars(module):
            raise InputError(
                f"{name}: expected a module that runs its class's forward, got one with a forward of its own "
                "(another patch, or hooks of accelerate): call apply_fused_mhc_to_deepseek_v4() without a model, "
                "before the model is built or loaded"
            )
        for parameter, shape in shapes.items():
            weight = getattr(module, parameter, None)
            if weight is None:
                continue
            found = tuple(
                getattr(weight, "ds_shape", weight.shape)
            )  # DeepSpeed's ZeRO-3 keeps the whole shape there
            if found != shape:
                raise InputError(
                    f"{name}.{parameter}: expected shape {shape} for config.hc_mult = {n} and "
                    f"config.hidden_size = {width}, got {found}"
                )
    return sites


def _switch(original: Callable[..., Any], fused: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that is ``fused`` on marked modules and ``original`` on all others."""

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (original if self.fused_mhc_backend is None else fused)(self, *args, **kwargs)

    return forward


def _switch_classes(modeling: ModuleType) -> None:
    for name, (_, fused) in _FUSED.items():
        cls = getattr(modeling, name)
        if cls not in _originals:
            _originals[cls] = cls.forward
            setattr(cls, _MARK, None)
            cls.forward = _switch(cls.forward, fused)


def _restore_classes() -> None:
    for cls, original in _originals.items():
        cls.forward = original
        delattr(cls, _MARK)
    _originals.clear()


def apply_fused_mhc_to_deepseek_v4(model: nn.Module | None = None, *, backend: MHCBackend = "auto") -> None:
    """Run DeepSeek V4's hyper-connections with the fused operations.

    ``apply_fused_mhc_to_deepseek_v4()`` before a model is built or loaded switches the classes, so every model of
    this process. ``apply_fused_mhc_to_deepseek_v4(model)`` switches one built model; others keep Transformers' own
    path. Either may be called again, to change the backend. Undo: `undo_fused_mhc_to_deepseek_v4`.

    Training, generation, gradient checkpointing, ``torch.compile``, saving and loading work as before; the state
    dict does not change. A copy of a switched model is switched as long as the model itself is.

    Args:
        model: a model of ``transformers`` >= 5.17 that holds ``DeepseekV4DecoderLayer`` modules, or None (default).
        backend: ``"auto"`` (default) or a backend's name; ``MHC_FORCE_BACKEND`` overrides it.

    Raises:
        InputError: transformers is absent or of an unsupported version; the model is of another kind, is switched in
            parts only, has been changed by another patch, or its weights do not fit ``config.hc_mult`` and
            ``config.hidden_size``. Nothing has been changed then.
        BackendError: by the first forward, where the named backend cannot run.
    """
    check_backend(backend)
    modeling = _modeling()
    if model is None:
        _switch_classes(modeling)
        for cls in _originals:
            setattr(cls, _MARK, backend)
        return
    sites = _sites(model, modeling)
    marked = [name for name, module in sites.items() if _MARK in vars(module)]
    if marked and len(marked) < len(sites):
        rest = next(name for name in sites if name not in marked)
        raise InputError(
            f"model: expected one that is switched as a whole or not at all, got {marked[0]} switched and {rest} "
            "not; call undo_fused_mhc_to_deepseek_v4(model) first"
        )
    _switch_classes(modeling)
    for module in sites.values():
        setattr(module, _MARK, backend)
    _models.add(model)


def undo_fused_mhc_to_deepseek_v4(model: nn.Module | None = None) -> None:
    """Take `apply_fused_mhc_to_deepseek_v4` back.

    Args:
        model: the model that was switched; None (default): the classes and every model.

    Raises:
        InputError: ``model`` is not switched by itself (where the classes are, call this without a model).
    """
    if model is None:
        for other in list(_models):
            _unmark(other)
        _restore_classes()
        return
    if not isinstance(model, nn.Module) or not _unmark(model):
        raise InputError(
            f"model: expected one that apply_fused_mhc_to_deepseek_v4(model) has switched, got "
            f"{type(model).__name__} that is not; to undo apply_fused_mhc_to_deepseek_v4() leave the model out"
        )
    if not _models and all(getattr(cls, _MARK) is None for cls in _originals):
        _restore_classes()


def _unmark(model: nn.Module) -> bool:
    """Take the marks off a model; False where there are none."""
    marked = [module for module in model.modules() if _MARK in vars(module)]
    for module in marked:
        delattr(module, _MARK)
    _models.discard(model)
    return bool(marked)
