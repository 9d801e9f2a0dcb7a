"""Number formats: fixed rules, and gradients of shared weights that lose nothing by being shared."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from engine import small_config
from torch import Tensor

from sharebert.config import EngineConfig
from sharebert.launch import Ranks
from sharebert.loss import masked_lm_loss_sum
from sharebert.model.bert import Bert, initialize
from sharebert.precision import Precision, resolve_compile, resolve_device, resolve_precision
from sharebert.sharing import SharedLayers, one_group
from sharebert.train_state import name_in_unit

CPU = torch.device("cpu")
Autocast = Callable[[], contextlib.AbstractContextManager[object]]


def summed_gradients(is_shared: bool, autocast: Autocast) -> list[Tensor]:
    """Gradient of each layer parameter summed over 12 equal layers."""
    config = small_config(model={"num_layers": 12, "hidden_size": 64, "intermediate_size": 128}).model
    model = Bert(config, 50)
    initialize(model, 1, 0.05, lambda name: name_in_unit(name, 1))
    sharing = SharedLayers(model.encoder.layers)
    if is_shared:
        sharing.share(one_group(12))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 50, (16, 12), generator=generator)
    positions = torch.arange(4).repeat(16, 1)
    with autocast():
        logits = model(ids, positions)
    (masked_lm_loss_sum(logits, ids[:, :4], torch.ones(16, 4)) / 64).backward()
    if is_shared:
        return [p.grad for p in model.encoder.layers[0].parameters()]
    per_layer = [[p.grad for p in layer.parameters()] for layer in model.encoder.layers]
    return [torch.stack(gradients).sum(0) for gradients in zip(*per_layer, strict=True)]


def relative_error(gradients: list[Tensor], exact: list[Tensor]) -> float:
    pairs = list(zip(gradients, exact, strict=True))
    return float(sum((g - e).square().sum() for g, e in pairs) / sum(e.square().sum() for _, e in pairs)) ** 0.5


def test_bf16_gradients_of_shared_weights_are_as_exact_as_those_of_unshared_ones() -> None:
    bf16 = Precision("bf16", CPU).autocast
    exact = summed_gradients(False, contextlib.nullcontext)
    torch.testing.assert_close(summed_gradients(True, contextlib.nullcontext), exact, rtol=1e-4, atol=1e-6)
    shared = relative_error(summed_gradients(True, bf16), exact)
    unshared = relative_error(summed_gradients(False, bf16), exact)
    cached = relative_error(summed_gradients(True, lambda: torch.autocast("cpu", torch.bfloat16)), exact)
    assert shared <= 1.001 * unshared
    assert cached > 1.03 * unshared  # what autocast does by itself: the comparison can fail


def test_auto_is_bf16_exactly_where_the_hardware_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for has_it, name in ((True, "bf16"), (False, "fp32")):
        monkeypatch.setattr("sharebert.precision.hardware_has_bf16", lambda device, has_it=has_it: has_it)
        assert resolve_precision(EngineConfig(), CPU).name == name
    assert resolve_precision(EngineConfig(precision="bf16"), CPU).name == "bf16"


def test_fp16_on_a_cpu_runs_and_says_what_it_is_for(caplog: pytest.LogCaptureFixture) -> None:
    precision = resolve_precision(EngineConfig(precision="fp16"), CPU)
    assert precision.build_scaler().is_enabled()
    assert "for tests" in caplog.text
    assert not Precision("bf16", CPU).build_scaler().is_enabled()


def test_compile_is_off_on_a_cpu_unless_asked_for() -> None:
    assert not resolve_compile(EngineConfig(), CPU)
    assert resolve_compile(EngineConfig(compile="true"), CPU)
    assert resolve_compile(EngineConfig(), torch.device("cuda"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_refused() -> None:
    with pytest.raises(ValueError, match=r"engine\.device='cuda'.*torch sees none"):
        resolve_device(EngineConfig(device="cuda"), Ranks())
    assert resolve_device(EngineConfig(), Ranks()) == CPU
