"""Lets layers of transformers change states of single tokens in their slots.

Such a layer calls one function for the state of its convolution and one for its recurrent state. Replacing them lets it
compute guesses in one pass, together with the tokens that they follow."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from raylens.cpu_kernels.library import KernelLibrary
from raylens.llm.cpu.delta_rule import delta_rule
from raylens.llm.states.slot_states import SlotStates
from raylens.modeling.function_replacement import forward_of, replace_functions

_DELTA_RULE = "torch_recurrent_gated_delta_rule"
_STATE = {
    "causal_conv1d_update": "conv_state",
    _DELTA_RULE: "initial_state",
    "mamba2_selective_state_update": "state",
}
"""transformers' functions for single tokens, and their arguments with the states."""
_OF_ROWS = frozenset({"hidden_states", "query", "key", "value", "g", "beta", "dt", "B", "C"})
"""Their arguments that have a row for each token."""


def takes_slots(mixer: nn.Module, library: KernelLibrary | None) -> bool:
    """Lets a layer take SlotStates for the states of single tokens, by replacing its functions in this layer alone.
    Returns False for a layer that changes a state in other ways. `library`: None without Raylens' kernels."""
    forward = forward_of(mixer)
    names = forward.__code__.co_names
    own = {name: partial(_by_wave, forward.__globals__[name], _STATE[name]) for name in _STATE if name in names}
    if len(own) < len({"get_conv_state", "get_recurrent_state"}.intersection(names)) or not own:
        return False
    if library is not None and _DELTA_RULE in own:
        own[_DELTA_RULE] = partial(delta_rule, library, own[_DELTA_RULE])
    replace_functions(mixer, own)
    return True


def _by_wave(function: Callable[..., Any], state_name: str, *args: Any, **kwargs: Any) -> Any:
    """Calls one of the functions with the rows of each wave, and with their states."""
    names = list(inspect.signature(function).parameters)
    given = dict(zip(names, args, strict=False)) | kwargs
    states = given[state_name]
    if not isinstance(states, SlotStates):
        return function(*args, **kwargs)
    outputs, has_returned_states = [], False
    for wave in states.waves:
        before = states.read(wave)
        own = {name: value[wave.rows] if name in _OF_ROWS else value for name, value in given.items()}
        own[state_name] = before
        # Positional arguments stay positional, because other implementations name them otherwise.
        result = function(
            *(own[name] for name, _ in zip(names, args, strict=False)), **{name: own[name] for name in kwargs}
        )
        has_returned_states = isinstance(result, tuple)
        output, after = result if has_returned_states else (result, before)
        states.write(wave, after)
        outputs.append(output)
    output = torch.cat(outputs)
    return (output, states) if has_returned_states else output
