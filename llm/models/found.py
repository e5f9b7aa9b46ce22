"""The language half of a model that no family declares: each fact comes from the model's own methods."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from raylens.llm.models.family import LanguageFamily, output_head
from raylens.llm.prompt_layout import PromptLayout
from raylens.modeling.found_model import TOKEN_TYPES, arguments_of, find_model
from raylens.preprocess.schema import InvalidRequestError, LanguageInputs, ProcessedPrompt

_TEXT, _IMAGE, _VIDEO, _AUDIO = 0, 1, 2, 3


def find_language_family(config: PreTrainedConfig) -> LanguageFamily:
    """Raises ValueError if transformers has no such model."""
    found = find_model(config)
    num_levels = found.num_deepstack_levels
    family = LanguageFamily(
        whole=found.whole,
        unused=found.unused_by_language,
        decoder=found.decoder,
        num_deepstack_levels=lambda config: num_levels,
        logits=partial(_logits_of_whole, found.decoder),
    )
    if found.positions is None:
        return family
    positions = _rope_positions(found.on_meta.get_submodule(found.positions), [0], [_TEXT], [])
    return replace(family, layout=partial(_layout, found.positions, len(positions)), num_rope_axes=len(positions))


def with_plain_head(family: LanguageFamily, model: PreTrainedModel) -> LanguageFamily:
    """Returns a found family with the output embeddings as its head, if the class does nothing else after its
    decoder; any other family as it is."""
    head: Any = model.get_output_embeddings()
    if head is None or getattr(family.logits, "func", None) is not _logits_of_whole:
        return family
    hidden = torch.randn(2, head.in_features).to(model.device, model.dtype)
    with torch.inference_mode():
        is_plain = torch.equal(family.logits(model, hidden), output_head(model, hidden))
    return replace(family, logits=output_head) if is_plain else family


def _layout(path: str, num_axes: int, model: PreTrainedModel, prompt: ProcessedPrompt) -> PromptLayout:
    """Returns `rope_layout` for the placeholders of pictures, videos and sounds."""
    if not prompt.placeholders:
        return PromptLayout(rope_offsets=(0,) * num_axes)
    token_types, num_runs = [_TEXT] * len(prompt.prompt_token_ids), 0
    for placeholder, inputs in zip(prompt.placeholders, prompt.language_inputs, strict=True):
        kind = _kind_of(inputs)
        own = list(placeholder.embed_positions())
        for position in own:
            token_types[position] = kind
        num_runs += sum(1 for before, at in zip([None, *own], own, strict=False) if before is None or at != before + 1)
    if num_runs != sum(kind != _TEXT for kind, _ in groupby(token_types)):
        # The model does not check this: it would merge two adjacent items without a token between them.
        raise InvalidRequestError("two items have no token between them in the prompt", field="messages")
    try:
        return rope_layout(model.get_submodule(path), prompt, token_types)
    except (IndexError, RuntimeError, ValueError) as error:
        # Some models look for marks around an item, and do not check whether they are there.
        reason = f"the model finds no positions for the prompt's media: {type(error).__name__}"
        raise InvalidRequestError(reason, field="messages") from error


def _kind_of(inputs: LanguageInputs) -> int:
    kinds = {"video": _VIDEO, "audio": _AUDIO}
    return next((kind for word, kind in kinds.items() if any(word in name for name in inputs)), _IMAGE)


def rope_layout(owner: nn.Module, prompt: ProcessedPrompt, token_types: Sequence[int]) -> PromptLayout:
    """Returns the rotary positions that the model itself computes. `owner`: has `get_rope_index`. `token_types`: for
    each token 0 for text, 1 for a picture, 2 for a video, 3 for a sound.

    As in `generate`, each axis continues from the prompt's last token. The model's own `rope_deltas` continue from the
    largest position of the prompt, often a position of a video's last frame."""
    positions = _rope_positions(owner, prompt.prompt_token_ids, token_types, prompt.language_inputs)
    return PromptLayout(
        rope_positions=positions,
        rope_offsets=tuple((positions[:, -1] + 1 - len(token_types)).tolist()),
        # Directly after an item, generated text has other positions than text of a longer prompt.
        is_prefix_cacheable=token_types[-1] == _TEXT,
    )


def _rope_positions(
    owner: Any, token_ids: Sequence[int], token_types: Sequence[int], language_inputs: Sequence[LanguageInputs]
) -> npt.NDArray[np.int64]:
    """Returns the positions (num_axes, num_tokens) of `get_rope_index`, which takes what it names of all this."""
    ids, types = torch.tensor([token_ids]), torch.tensor([token_types], dtype=torch.int)
    known: dict[str, torch.Tensor] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    known |= dict.fromkeys(TOKEN_TYPES, types)
    for name in dict.fromkeys(name for inputs in language_inputs for name in inputs):
        known[name] = torch.from_numpy(np.concatenate([one[name] for one in language_inputs if name in one]))
    taken = arguments_of(owner.get_rope_index)
    batch, _ = owner.get_rope_index(**{name: value for name, value in known.items() if name in taken})
    # Some models count in floating point, in whole numbers.
    positions: npt.NDArray[np.int64] = batch[:, 0].long().numpy()
    return positions


def _logits_of_whole(path: str, model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    """Returns the logits of all that the model's class does after its decoder, which only returns `hidden` here."""
    embeds = hidden.unsqueeze(0)
    text = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
    types = {name: text for name in TOKEN_TYPES if name in arguments_of(model.forward)}
    with _returning(model.get_submodule(path), embeds):
        logits: torch.Tensor = model(inputs_embeds=embeds, use_cache=False, **types).logits[0]
    return logits


@contextmanager
def _returning(decoder: nn.Module, hidden: torch.Tensor) -> Iterator[None]:
    """Makes the decoder return these hidden states."""
    own = decoder.forward
    decoder.forward = lambda *args, **kwargs: _Output(last_hidden_state=hidden)
    try:
        yield
    finally:
        decoder.forward = own


class _Output(BaseModelOutputWithPast):
    """The output of any decoder. What a class asks for besides, such as router logits, is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
