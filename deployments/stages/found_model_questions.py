"""Questions to a found model, in the form of its three halves and in its own, and the whole model's answers."""

import wave
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from io import BytesIO
from typing import Any

import torch
from PIL import Image
from transformers import GenerationConfig

from raylens.modeling.families import family_of
from raylens.modeling.found_model import TOKEN_TYPES, FoundModel, arguments_of
from raylens.modeling.model_configs import load_model_config
from raylens.modeling.quantized_checkpoint import take_quantization
from raylens.modeling.stored_weights import stored_class
from raylens.preprocess.hf_processor import load_processor
from raylens.preprocess.models.found import Samples, call_processor, sampling_rate
from raylens.preprocess.processor import MultiModalProcessor, ProcessorConfig
from raylens.preprocess.schema import ItemInfo, ItemTensors, ProcessedPrompt, TextPrompt

NUM_TOKENS = 8
"""Of an answer."""
_WORDS = " ".join(["Say what is in the picture and where, then count the rows of the table below it."] * 4)
_SMALL, _LARGER = (90, 120), ((300, 410), (700, 1300))
"""(height, width) in pixels of the pictures."""
_SECONDS = (0.369375, 0.9, 0.9)
"""Durations of the sounds. The first ends within a frame of Gemma 4. The two in one prompt are equally long, because
some processors change the end of a shorter one."""


class SelfTestError(ValueError):
    """A half of a found model computes something else than the model's own forward."""


@dataclass(frozen=True)
class Question:
    """A prompt: our halves' input, and the model's own."""

    prompt: ProcessedPrompt
    items: Sequence[tuple[ItemInfo, ItemTensors]]
    inputs: Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    """The model's own answer: the embeddings that its decoder got (num_prompt_tokens, hidden_size), the log
    probabilities of the prompt's tokens from the second on, their mean change by another order of the same sums, the
    tokens of the answer, and the log probabilities of all tokens of the vocabulary at each of these (num_tokens,
    vocab)."""

    embeds: torch.Tensor
    of_prompt: torch.Tensor
    rounding: float
    token_ids: list[int]
    logprobs: torch.Tensor


@contextmanager
def naming(half: str) -> Iterator[None]:
    """Turns any error into a SelfTestError that names the half."""
    try:
        yield
    except SelfTestError:
        raise
    except Exception as error:
        raise SelfTestError(f"{half}: {type(error).__name__}: {error}") from error


def questions_of(checkpoint: str) -> list[Question]:
    """Returns a prompt with a picture and one with two, or with as many as the model takes; for a model that hears one
    with a sound and one with two sounds and a picture; and a text alone.

    Raises SelfTestError if Preprocess makes other tokens than the model's processor."""
    ours = MultiModalProcessor(ProcessorConfig(checkpoint))
    family = family_of("preprocess", load_model_config(checkpoint))
    theirs = load_processor(family, checkpoint)
    asked: list[tuple[str, list[Image.Image], list[Samples]]] = []
    small, seen = _picture(*_SMALL), ""
    if "image" in ours.items.modalities:
        with naming("Preprocess"):
            target = family.modalities["image"].update(theirs).target
            large = _unlike(ours, theirs, target, small)
        seen = _marked(target, theirs, "vision")
        several = [large, small][: ours.items.rules("image").max_items]
        asked += [
            (f"{seen}{_WORDS}", [small], []),
            (f"Look: {' and '.join([seen] * len(several))} {_WORDS}", several, []),
        ]
    if "audio" in ours.items.modalities:
        heard = _marked(family.modalities["audio"].update(theirs).target, theirs, "audio")
        short, *alike = (_noise(round(seconds * sampling_rate(theirs)), seed) for seed, seconds in enumerate(_SECONDS))
        asked.append((f"{heard}{_WORDS}", [], [short]))
        with suppress(ValueError):  # some processors take one sound
            call_processor(theirs, heard * 2, [], alike)
            asked.append((f"One {heard} two {seen} three {heard} {_WORDS}", [small] if seen else [], alike))
    asked.append((_WORDS, [], []))
    questions = []
    for text, pictures, sounds in asked:
        with naming("Preprocess"):
            inputs = dict(call_processor(theirs, text, pictures, sounds, return_mm_token_type_ids=True))
            items = [
                *(ours.items.process("image", _encoded(picture)) for picture in pictures),
                *(ours.items.process("audio", _recorded(sound, sampling_rate(theirs))) for sound in sounds),
            ]
            names = [f"picture {picture.width}" for picture in pictures] + [f"sound {sound[0]}" for sound in sounds]
            prompt = ours.prompts.render(TextPrompt(text), [info for info, _ in items], names)
        expected = inputs["input_ids"][0].tolist()
        if prompt.prompt_token_ids != expected:
            media = f"{len(pictures)} pictures" + (f", {len(sounds)} sounds" if sounds else "")
            reason = f"{media} and a text give {len(prompt.prompt_token_ids)} tokens"
            raise SelfTestError(f"Preprocess: {reason}, the model's processor gives other {len(expected)}")
        questions.append(Question(prompt, prompt.placed(items), inputs))
    return questions


def _marked(target: str, theirs: Any, kind: str) -> str:
    """Returns an item's text between the marks that the processor names for its kind. Some models look for them to find
    the item's rotary positions."""
    begin, end = (getattr(theirs, f"{kind}_{edge}_token", None) for edge in ("bos", "eos"))
    return target if begin is None or begin in target else f"{begin}{target}{end}"


def _unlike(ours: MultiModalProcessor, theirs: Any, target: str, small: Image.Image) -> Image.Image:
    """Returns a picture with other tensors than the small one, such as tiles, if both fit into one prompt."""

    def form(picture: Image.Image) -> tuple[int, dict[str, Any]]:
        info, tensors = ours.items.process("image", _encoded(picture))
        return len(info.expansion.token_ids), {name: tensor.shape for name, tensor in tensors.items()}

    found, own_form = small, form(small)[1]
    for size in _LARGER:
        num_tokens, other_form = form(picture := _picture(*size))
        if own_form != other_form and 2 * num_tokens + 2 * len(_WORDS) < ours.max_model_len:
            found = picture
            break
    try:
        call_processor(theirs, target * 2, [found, small])
    except ValueError:  # it puts only pictures of one form together
        return small
    return found


@torch.inference_mode()
def answers_of(
    found: FoundModel,
    checkpoint: str,
    questions: Sequence[Question],
    suppressed: Sequence[int],
    num_tokens: int = NUM_TOKENS,
) -> list[Answer]:
    """Returns the answers of the whole model to each question alone, without the tokens `suppressed`."""
    config = load_model_config(checkpoint)
    reading_class = stored_class(found.whole, take_quantization(config), keeps_forms=False)
    model: Any = reading_class.from_pretrained(
        checkpoint, config=config, dtype=torch.float32, use_safetensors=True, trust_remote_code=False
    ).eval()
    decoder = model.get_submodule(found.decoder)
    seen: list[torch.Tensor] = []

    def look(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        seen.append(kwargs["inputs_embeds"][0])

    known = arguments_of(model.forward)
    decoder.register_forward_pre_hook(look, with_kwargs=True)
    greedy = GenerationConfig(
        max_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
        suppress_tokens=list(suppressed),
    )
    model.generation_config = GenerationConfig()  # its end tokens would hold for `greedy`, too
    answers = []
    all_inputs = [known_inputs(question.inputs, known) for question in questions]
    with naming("the model's own forward"):
        for inputs in all_inputs:
            seen.clear()
            output = model.generate(**inputs, generation_config=greedy)
            token_ids = output.sequences[0, -num_tokens:].tolist()
            logprobs = torch.cat(output.logits).log_softmax(-1)
            answers.append(Answer(seen[0], _of_prompt(model, inputs), 0.0, token_ids, logprobs))
        with suppress(ValueError):  # some classes have one way of attention only
            decoder.set_attn_implementation("eager")
        return [
            replace(answer, rounding=mean_difference(_of_prompt(model, inputs), answer.of_prompt))
            for answer, inputs in zip(answers, all_inputs, strict=True)
        ]


def known_inputs(inputs: Mapping[str, Any], known: Sequence[str]) -> dict[str, Any]:
    """Returns the processor's outputs in float32, without token types that the model does not take."""
    taken = {name: one for name, one in inputs.items() if name in known or name not in TOKEN_TYPES}
    is_float = {name: isinstance(one, torch.Tensor) and one.is_floating_point() for name, one in taken.items()}
    return {name: one.float() if is_float[name] else one for name, one in taken.items()}


def _of_prompt(model: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
    """Returns the log probability of each token of the prompt but the first; -inf for one beyond the vocabulary."""
    logprobs: torch.Tensor = model(**inputs).logits[0, :-1].log_softmax(-1)
    ids = inputs["input_ids"][0, 1:, None]
    num_logits = logprobs.shape[1]
    return logprobs.gather(1, ids.clamp(max=num_logits - 1)).masked_fill(ids >= num_logits, -torch.inf)[:, 0]


def mean_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected)[expected > -torch.inf].abs().mean())


def suppressed_tokens(checkpoint: str) -> list[int]:
    """Returns the tokens that no answer may have here: `generate` would take a placeholder for another picture."""
    tokenizer: Any = load_processor(family_of("preprocess", load_model_config(checkpoint)), checkpoint).tokenizer
    return sorted(set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder))


def _picture(height: int, width: int) -> Image.Image:
    """Returns noise, so that a mix-up of parts shows."""
    generator = torch.Generator().manual_seed(width)
    pixels = torch.randint(256, (height, width, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


def _noise(num_samples: int, seed: int) -> Samples:
    """Returns samples that a WAV of 16 bits holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(-(2**14), 2**14, (num_samples,), generator=generator) / 2**15).numpy()


def _recorded(samples: Samples, rate: int) -> bytes:
    content = BytesIO()
    with wave.open(content, "wb") as file:
        file.setparams((1, 2, rate, 0, "NONE", ""))
        file.writeframes((samples * 2**15).astype("<i2").tobytes())
    return content.getvalue()


def _encoded(picture: Image.Image) -> bytes:
    content = BytesIO()
    picture.save(content, "PNG")
    return content.getvalue()
