"""Our processor beside Hugging Face's own, for one small checkpoint: the same prompt and media through both."""

import functools
import itertools
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from raylens.modeling.families import load_family
from raylens.preprocess.hasher import content_hash, mm_hash
from raylens.preprocess.hf_processor import ImageBackend, load_processor
from raylens.preprocess.processor import MultiModalProcessor, ProcessorConfig
from raylens.preprocess.schema import ItemInfo, ItemTensors, ProcessedPrompt, TextPrompt, TokensPrompt
from tests.pictures import encoded
from tests.preprocess.merged_items import merged_items
from tests.preprocess.small_processors import Vocabulary, prompt_placeholder, save_processor

SIZES = ((64, 64), (100, 40), (37, 91), (150, 150), (20, 120))
"""(width, height) of the pictures in turn: square, wide, high, large, very narrow."""

EDGES = ("", "Look: ", "a<", "\n", "one\n\n", " ", "x y", "zwei  ", "é", "> and ", "\n\n\n")
"""Texts that merge with what stands beside them, for tokenisers that merge at all."""


def picture(index: int) -> Image.Image:
    """Noise, so that any mix-up of pictures or parts of them shows."""
    width, height = SIZES[index % len(SIZES)]
    pixels = np.random.default_rng(index).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


class Pair:
    """One checkpoint's processors, ours and Hugging Face's."""

    def __init__(self, model_type: str, vocabulary: Vocabulary, backend: ImageBackend) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="raylens-processor-")  # goes with this object
        folder = Path(self._temporary.name)
        self.folder = str(folder)
        save_processor(model_type, vocabulary, folder)
        self._cache: dict[str, tuple[ItemInfo, ItemTensors]] = {}
        self.model_type = model_type
        self.family = load_family("preprocess", model_type)
        self.placeholder = prompt_placeholder(model_type)
        # Mllama's processor puts one before a text that has none, wherever the tokenizer's own is.
        self.opening = "<s>" if model_type == "mllama" else ""
        self.ours = MultiModalProcessor(ProcessorConfig(str(folder), image_backend=backend, max_model_len=200_000))
        self.theirs = load_processor(self.family, str(folder), backend=backend)

    def prompt(self, texts: Sequence[str]) -> str:
        """The texts with a placeholder between any two of them."""
        return self.opening + self.placeholder.join(texts)

    def one_shot(self, text: str, pictures: Sequence[int]) -> dict[str, Any]:
        """Everything through Hugging Face's processor at once, with the pictures as those of one prompt, as chat
        templates pass them; to OneVision a flat list means pictures of a prompt each."""
        images = [picture(index) for index in pictures]
        outputs = self.theirs(text=text, images=[images] if images else None, return_tensors="pt")
        return dict(outputs)

    def as_rendered(self, ids: list[int]) -> list[int]:
        """The processor's ids, with a token for each of a picture's features where it leaves one for all."""
        if self.model_type != "mllama":
            return ids
        info, _ = self.items([0])[0]
        counts = [info.num_embeds if one == info.expansion.token_ids[0] else 1 for one in ids]
        return [one for one, count in zip(ids, counts, strict=True) for _ in range(count)]

    def contents(self, index: int) -> bytes:
        return encoded(picture(index))

    def items(self, pictures: Sequence[int]) -> list[tuple[ItemInfo, ItemTensors]]:
        """The pictures of one prompt, each processed alone."""
        contents = [self.contents(index) for index in pictures]
        return [self.ours.items.process("image", one, num_in_prompt=len(contents)) for one in contents]

    def cached_items(self, pictures: Sequence[int]) -> list[tuple[ItemInfo, ItemTensors]]:
        """The same, each made once for all prompts that hold it, under the key that the pipeline would use."""
        identity = self.ours.identity
        found = []
        for index in pictures:
            key = mm_hash(
                content_hash(self.contents(index)),
                modality="image",
                processor_fingerprint=identity.fingerprint,
                is_among_others="image" in identity.count_dependent and len(pictures) > 1,
            )
            if key not in self._cache:
                content = self.contents(index)
                self._cache[key] = self.ours.items.process("image", content, num_in_prompt=len(pictures))
            found.append(self._cache[key])
        return found

    def render_text(self, text: str, infos: Sequence[ItemInfo]) -> ProcessedPrompt:
        return self.ours.prompts.render(TextPrompt(text), infos, _hashes(infos))

    def render_ids(self, ids: Sequence[int], infos: Sequence[ItemInfo]) -> ProcessedPrompt:
        return self.ours.prompts.render(TokensPrompt(list(ids)), infos, _hashes(infos))

    def check(self, text: str, pictures: Sequence[int], items: Sequence[tuple[ItemInfo, ItemTensors]]) -> None:
        """Ids and tensors are those of the one-shot call, from the prompt as text and as token ids."""
        expected = self.one_shot(text, pictures)
        expected_ids = self.as_rendered(expected["input_ids"][0].tolist())
        infos = [info for info, _ in items]
        prompt = self.render_text(text, infos)
        assert prompt.prompt_token_ids == expected_ids, self.difference(prompt.prompt_token_ids, expected_ids)
        self.check_placeholders(prompt, infos)
        assert self.render_ids(self.theirs.tokenizer(text)["input_ids"], infos) == prompt
        if items:
            assert self.render_ids(expected_ids, infos) == prompt, "expanded already"
            self.check_tensors([tensors for _, tensors in items], expected)

    def check_tensors(self, items: Sequence[ItemTensors], expected: dict[str, Any]) -> None:
        merged = merged_items(self.ours.items, "image", items)
        compared = merged.keys() & expected.keys()
        assert {name for name in expected if name not in _OF_TEXT} <= compared, expected.keys()
        for name in compared:
            assert torch.equal(merged[name], torch.as_tensor(expected[name])), name

    def check_placeholders(self, prompt: ProcessedPrompt, infos: Sequence[ItemInfo]) -> None:
        """Every position that takes an embedding has the token for it, and no other position has; it is an item's own
        position, with the rest of the item around it. `infos`: in the order of the request."""
        embed_tokens = {modality.embed_token(self.theirs) for modality in self.family.modalities.values()}
        embed_ids = {self.theirs.tokenizer.convert_tokens_to_ids(token) for token in embed_tokens}
        found = [index for index, token in enumerate(prompt.prompt_token_ids) if token in embed_ids]
        taken = []
        for info, placeholder in zip(in_prompt_order(prompt, infos), prompt.placeholders, strict=True):
            mask = placeholder.is_embed or (True,) * placeholder.length
            positions = [placeholder.offset + index for index, is_embed in enumerate(mask) if is_embed]
            assert len(positions) == placeholder.num_embeds == info.num_embeds
            taken += positions
            expansion = info.expansion
            start = placeholder.offset - expansion.features.offset
            own = prompt.prompt_token_ids[start : start + len(expansion.token_ids)]
            assert own == expansion.token_ids.tolist()
        assert sorted(taken) == found

    def difference(self, ours: list[int], theirs: list[int]) -> str:
        """Where two lists of ids part, as tokens."""
        start = next((i for i, (a, b) in enumerate(itertools.zip_longest(ours, theirs)) if a != b), 0)
        tokens = self.theirs.tokenizer.convert_ids_to_tokens
        around = slice(max(0, start - 3), start + 6)
        return f"{len(ours)} and {len(theirs)} ids, at {start}: {tokens(ours[around])} {tokens(theirs[around])}"


@functools.cache
def pair(model_type: str, vocabulary: Vocabulary, backend: ImageBackend) -> Pair:
    return Pair(model_type, vocabulary, backend)


def in_prompt_order(prompt: ProcessedPrompt, infos: Sequence[ItemInfo]) -> list[ItemInfo]:
    """Those of a request's items that are in its prompt."""
    return [infos[index] for index in prompt.item_order or range(len(prompt.placeholders))]


def _hashes(infos: Iterable[ItemInfo]) -> list[str]:
    return [f"hash-{index}" for index, _ in enumerate(infos)]


# What the one-shot call returns besides an item's fields.
_OF_TEXT = {"input_ids", "attention_mask", "cross_attention_mask", "token_type_ids", "mm_token_type_ids", "labels"}
