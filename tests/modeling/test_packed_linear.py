"""Packed layers take the place of plain ones: with Raylens' kernels where they are built, with oneDNN otherwise."""

import pytest
import torch
from torch import nn

from raylens.cpu_kernels.library import VARIABLE
from raylens.modeling.onednn_linear import OneDnnLinear, onednn_dtypes
from raylens.modeling.packed_linear import KernelLinear, pack_linear_layers


class Special(nn.Linear):
    pass


def make_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 6, bias=False), nn.ReLU())
    return nn.Sequential(nn.Linear(4, 4), inner, Special(6, 4)).to(dtype).requires_grad_(False)


def types(model: nn.Module) -> list[type[nn.Module]]:
    return [type(module) for module in model.modules() if not isinstance(module, nn.Sequential)]


@pytest.mark.parametrize(("setting", "kind"), [("", KernelLinear), ("off", OneDnnLinear)])
def test_plain_layers_are_packed_wherever_they_are(
    setting: str, kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, setting)
    model = make_model()
    for shape in [(4,), (3, 4), (2, 3, 4), (0, 4)]:
        inputs = torch.randn(*shape)
        expected = make_model()(inputs)
        pack_linear_layers(model, torch.float32)
        assert types(model) == [kind, kind, nn.ReLU, Special]
        torch.testing.assert_close(model(inputs), expected)


@pytest.mark.parametrize("dtype", [dtype for dtype in onednn_dtypes() if dtype != torch.float32])
def test_layers_of_another_dtype_go_to_onednn(dtype: torch.dtype) -> None:
    model = make_model(dtype)
    pack_linear_layers(model, dtype)
    assert types(model) == [OneDnnLinear, OneDnnLinear, nn.ReLU, Special]


def test_only_the_named_layers_are_packed() -> None:
    model = make_model()
    pack_linear_layers(model, torch.float32, lambda name: name == "1.0")
    assert types(model) == [nn.Linear, KernelLinear, nn.ReLU, Special]


def test_what_no_library_takes_stays_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(4, 4, dtype=torch.float64), nn.Linear(4, 4, device="meta"))
    pack_linear_layers(model, torch.float32)
    assert [type(module) for module in model] == [nn.Linear, nn.Linear]
