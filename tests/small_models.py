"""Small checkpoints of every family with random weights, and requests with what transformers answers to them."""

import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel

from raylens.modeling.families import load_family
from raylens.preprocess.schema import LanguageInputs, PlaceholderRange, ProcessedPrompt
from tests.preprocess.parity import Pair, pair
from tests.preprocess.small_processors import Vocabulary, save_processor

Json = dict[str, Any]

NUM_TOKENS = 16
VOCABULARY: Vocabulary = "byte_level"


def whole_class(model_type: str) -> type[PreTrainedModel]:
    """transformers' own class, vision half and all; for a model that it does not have, the tests' reference."""
    if model_type == "wemm":
        from tests.wemm_reference import ReferenceWemm

        return ReferenceWemm
    whole: type[PreTrainedModel] = load_family("encoder", model_type).whole_class
    return whole


def make_checkpoint(
    model_type: str,
    folder: Path,
    text_config: Json | None = None,
    *,
    is_tied: bool = False,
    change: Callable[[Path], None] = lambda folder: None,
) -> str:
    """A checkpoint with random weights, spread out more than transformers draws them: with its own initialisation
    greedy answers hardly depend on the picture.

    `text_config`: what its text model has besides or instead. `is_tied`: whether the output head is the embeddings.
    `change`: what becomes of the settings in the folder before the weights are made.
    """
    save_processor(model_type, VOCABULARY, folder)
    change(folder)
    settings = json.loads((folder / "config.json").read_text())
    settings["tie_word_embeddings"] = is_tied
    settings.get("text_config", settings).update({**(text_config or {}), "tie_word_embeddings": is_tied})
    (folder / "config.json").write_text(json.dumps(settings))
    # Gemma multiplies embeddings by the root of their size. Large ones make every token repeat itself.
    embedding_spread = 0.3 if is_tied or "gemma" in model_type else 1.0
    torch.manual_seed(0)
    model = whole_class(model_type)(AutoConfig.from_pretrained(folder))
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            fan_in = parameter.shape[-1] if parameter.ndim < 4 else parameter[0].numel()
            spread = embedding_spread if "embed_tokens" in name or "tok_embeddings" in name else 1.5
            torch.nn.init.normal_(parameter, std=spread * fan_in**-0.5)
        elif name.endswith(("_scale", "gate")):  # from 0, which would hide what it scales
            torch.nn.init.constant_(parameter, 0.3 if name.endswith("gate") else 1.0)
    # timm writes into the settings that it is given.
    model.config = AutoConfig.from_pretrained(folder)
    model.save_pretrained(folder)
    return str(folder)


def with_pictures_of_1024_tokens(folder: Path) -> None:
    """PaliGemma's settings as of the checkpoints for 448 pixels: 32 x 32 patches."""
    processor, model = folder / "preprocessor_config.json", folder / "config.json"
    settings = json.loads(processor.read_text())
    settings |= {"size": {"height": 448, "width": 448}, "image_seq_length": 1024}
    processor.write_text(json.dumps(settings))
    config = json.loads(model.read_text())
    config["vision_config"]["image_size"] = 448
    model.write_text(json.dumps(config))


@dataclass(frozen=True)
class Request:
    """A prompt with its items' embeddings, the greedy tokens of transformers' `generate`, and the logits (vocab,) from
    which it chose the first."""

    prompt: ProcessedPrompt
    embeddings: list[torch.Tensor]
    expected: list[int]
    logits: torch.Tensor


def small_requests(model_type: str, model: PreTrainedModel) -> list[Request]:
    """One text with different pictures, several pictures in a prompt, none at all: as far as the family takes it."""
    family = pair(model_type, VOCABULARY, "auto").family
    # Pictures of 980 pixels.
    is_slow = model_type == "aria"
    texts_and_pictures: list[tuple[list[str], list[int]]] = [(["Look: ", " what?"], [0]), (["Look: ", " what?"], [1])]
    if family.modalities["image"].max_items is None and not is_slow:
        texts_and_pictures += [(["a", "b ", " c"], [2, 3]), (["One ", "two", " three ", "?"], [0, 4, 0])]
    if not family.requires_items and model_type != "blip-2":  # whose `generate` wants a picture
        texts_and_pictures.append((["Hello"], []))
    return [picture_request(model_type, model, texts, pictures) for texts, pictures in texts_and_pictures]


def picture_request(model_type: str, model: PreTrainedModel, texts: Sequence[str], pictures: Sequence[int]) -> Request:
    """`texts` with pictures, by their index in `parity.picture`, between any two of them."""
    families = pair(model_type, VOCABULARY, "auto")
    text = families.prompt(texts)
    inputs = families.one_shot(text, pictures)
    if "image_patches" in inputs:  # Fuyu's name for them
        inputs["pixel_values"] = inputs.pop("image_patches")
    items = families.cached_items(pictures)
    prompt = families.render_text(text, [info for info, _ in items])
    assert prompt.prompt_token_ids == families.as_rendered(inputs["input_ids"][0].tolist())
    prompt.mm_hashes[:] = [f"picture {index}" for index in pictures]
    with torch.inference_mode():
        rows = item_features(model, "image", inputs) if items else torch.empty(0, 0)
    num_embeds = [placeholder.num_embeds for placeholder in prompt.placeholders]
    embeddings = list(torch.split(rows, num_embeds)) if items else []
    return Request(prompt, embeddings, *greedy(model, inputs))


def video_request(model_type: str, model: PreTrainedModel, num_frames: int) -> Request:
    """A picture and a video of noise, for the families whose positions depend on which is which."""
    families = pair(model_type, VOCABULARY, "auto")
    inputs = _one_shot_video(families, num_frames)
    prompt = ProcessedPrompt(inputs["input_ids"][0].tolist(), [], ["noise", f"{num_frames} frames"])
    for modality in ("image", "video"):
        prompt.placeholders.append(_placeholder(prompt.prompt_token_ids, getattr(model.config, f"{modality}_token_id")))
        names = families.family.modalities[modality].language_fields
        fields: LanguageInputs = {name: torch.as_tensor(inputs[name]).numpy() for name in names}
        prompt.language_inputs.append(fields)
    with torch.inference_mode():
        embeddings = [item_features(model, modality, inputs) for modality in ("image", "video")]
    return Request(prompt, embeddings, *greedy(model, inputs))


def _one_shot_video(families: Pair, num_frames: int) -> dict[str, Any]:
    frames = torch.randint(256, (num_frames, 3, 64, 96), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    text = "a <|vision_start|><|image_pad|><|vision_end|> and <|vision_start|><|video_pad|><|vision_end|>?"
    pixels = torch.randint(256, (3, 64, 64), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    metadata = {"fps": 4.0, "total_num_frames": num_frames, "frames_indices": list(range(num_frames))}
    outputs = families.theirs(
        text=text,
        images=[pixels],
        videos=[frames],
        video_metadata=[metadata],
        do_sample_frames=False,
        return_tensors="pt",
    )
    return dict(outputs)


def _placeholder(token_ids: list[int], token_id: int) -> PlaceholderRange:
    start, end = token_ids.index(token_id), len(token_ids) - token_ids[::-1].index(token_id)
    return PlaceholderRange(start, end - start, tuple(token == token_id for token in token_ids[start:end]))


def greedy(model: PreTrainedModel, inputs: Mapping[str, Any]) -> tuple[list[int], torch.Tensor]:
    output = model.generate(
        **inputs,
        max_new_tokens=NUM_TOKENS,
        min_new_tokens=NUM_TOKENS,
        do_sample=False,
        eos_token_id=None,
        forced_eos_token_id=None,  # BART's, at the end of every answer
        return_dict_in_generate=True,
        output_logits=True,
    )
    return output.sequences[0, -NUM_TOKENS:].tolist(), output.logits[0][0]


def item_features(model: PreTrainedModel, modality: str, inputs: Mapping[str, Any]) -> torch.Tensor:
    """What the encoder hands over, items one behind another: features, those of deepstack levels beside them."""
    if model.config.model_type == "mllama":
        names = ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")
        states = model.model.vision_model(**{name: inputs[name] for name in names}).last_hidden_state
        return _rows(model.model.multi_modal_projector(states))
    name = f"get_{modality}_features"
    if model.config.model_type == "phi4_multimodal":  # which only writes them into a prompt
        ids, fields = inputs["input_ids"], {name: inputs[name] for name in inputs if name.startswith("image_")}
        written: torch.Tensor = model.model.embed_tokens_extend(ids, model.model.embed_tokens(ids), **fields)
        return written[ids == model.config.vision_config.image_token_id]
    get_features = getattr(model if hasattr(model, name) else model.model, name)
    if "args" in inspect.signature(get_features).parameters:  # passes on whatever it gets
        get_features = getattr(model.model, name)
    known = inspect.signature(get_features).parameters
    outputs = get_features(**{name: value for name, value in inputs.items() if name in known})
    features = outputs.last_hidden_state if outputs.pooler_output is None else outputs.pooler_output
    levels = [features, *(getattr(outputs, "deepstack_features", None) or ())]
    return torch.cat([_rows(level) for level in levels], dim=-1)


def _rows(features: torch.Tensor | Iterable[torch.Tensor]) -> torch.Tensor:
    """(num_embeds of all items, hidden_size) of what differs in shape between families."""
    parts = [features] if isinstance(features, torch.Tensor) else features
    return torch.cat([part.flatten(0, -2) for part in parts])
