"""Compares the three halves of a found model with the model's own forward, before the first request.

No family declares such a model: all facts about it come from its class and its processor. What these do not tell would
be silently wrong in an answer, such as tokens of a picture that see each other. The test runs in float32 on the CPU.
The decoder has as many layers as it has kinds of layers. Windows, and the choices of indexers, are short, so that a
short prompt exceeds them."""

import json
import wave
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from huggingface_hub import snapshot_download
from PIL import Image
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from raylens.encoder.config import EncoderConfig
from raylens.encoder.loader import load_vision_half
from raylens.encoder.models.family import VisionFamily
from raylens.llm.config import EngineConfig
from raylens.llm.engine import LLMEngine
from raylens.llm.loader import load_language_family, why_unsupported
from raylens.llm.models.family import LanguageFamily
from raylens.llm.reference_windows import has_reference_layers
from raylens.llm.sampling.logprobs import TokenLogprobs
from raylens.llm.sampling.params import SamplingParams
from raylens.llm.sequence import FinishReason
from raylens.modeling.families import family_of
from raylens.modeling.found_model import TOKEN_TYPES, FoundModel, arguments_of, find_model
from raylens.modeling.half_model import check_names_no_pickle
from raylens.modeling.model_configs import load_model_config
from raylens.preprocess.hf_processor import load_processor
from raylens.preprocess.models.found import Samples, call_processor, sampling_rate
from raylens.preprocess.processor import MultiModalProcessor, ProcessorConfig
from raylens.preprocess.schema import ItemInfo, ItemTensors, ProcessedPrompt, TextPrompt

_SHORTENED = {
    "sliding_window": 32,
    "index_topk": 32,
    "index_block_size": 8,
    "index_topk_blocks": 4,
    "indexer_compress_ratio": 8,
    "indexer_budget": 24,
}
"""The most tokens of windows, and of the choices of indexers and their blocks."""
_NUM_TOKENS = 8
"""Of an answer."""
_TOLERANCE = 2e-3
"""The most that embeddings, in terms of their largest number, and log probabilities of an answer may differ."""
_LEAST_ROUNDING, _MOST_ROUNDING, _MOST_ROUNDINGS = 1e-5, 1e-3, 20
"""The log probabilities of a prompt may differ on average by this many times the rounding of the model itself, within
these bounds."""
_KV_CACHE_BYTES = 2**30
_WORDS = " ".join(["Say what is in the picture and where, then count the rows of the table below it."] * 4)
_SMALL, _LARGER = (90, 120), ((300, 410), (700, 1300))
"""(height, width) in pixels of the pictures."""
_SECONDS = (0.369375, 0.9, 0.9)
"""Durations of the sounds. The first ends within a frame of Gemma 4. The two in one prompt are equally long, because
some processors change the end of a shorter one."""
_FILES = ["*.json", "*.jinja", "*.model", "*.safetensors", "*.txt"]
_DEPTHS = ("num_hidden_layers", "n_layer", "num_layers")


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


def check_found_model(model: str, revision: str | None) -> str:
    """Returns what was found, in one line. Raises SelfTestError, which names the half, and ValueError for a model that
    cannot run at all."""
    config = load_model_config(model, revision)
    reason = "it is an encoder-decoder" if config.is_encoder_decoder else why_unsupported(config.get_text_config())
    if reason is not None:
        raise SelfTestError(f"Generate: the text model is not supported: {reason}")
    check_names_no_pickle(config, model)
    found, language = find_model(config), load_language_family(config)
    folder = Path(model)
    if not folder.is_dir():
        folder = Path(snapshot_download(model, revision=revision, allow_patterns=_FILES))
    with TemporaryDirectory(prefix="raylens-self-test-") as shortened:
        _shorten(found, config, language, folder, Path(shortened))
        _compare(found, shortened)
    facts = [
        *([] if found.features is None else [f"pictures by {found.features or 'the class'}.get_image_features"]),
        f"decoder {found.decoder}",
        *([] if found.sounds is None else [f"sounds by {found.sounds or 'the class'}.get_audio_features"]),
        f"{language.num_rope_axes} rotary axes",
        f"{language.num_deepstack_levels(config)} deepstack levels",
    ]
    return f"found, self-tested: {found.whole.__name__}, {', '.join(facts)}"


def _shorten(found: FoundModel, config: PreTrainedConfig, language: LanguageFamily, folder: Path, target: Path) -> None:
    """Links the checkpoint's files into `target`, with a configuration of fewer layers and shorter lengths."""
    for file in folder.iterdir():
        if file.name != "config.json":
            (target / file.name).symlink_to(file.resolve())
    settings = json.loads((folder / "config.json").read_text())
    own, text_config = settings.get("thinker_config", settings), config.get_text_config()
    text = own if text_config is config else _settings_of(text_config, own)
    depth, num_layers = text_config.num_hidden_layers, _num_kinds(found, config, language)
    # Layers that share a cache, have rows in one table, or get features of pictures by their number, keep it.
    is_whole = any(getattr(text_config, name, None) for name in ("num_kv_shared_layers", "hidden_size_per_layer_input"))
    is_whole = is_whole or hasattr(config, "deepstack_layer_map")
    if num_layers < depth and not is_whole:
        # Nemotron's pattern has a letter for each layer.
        lists = {name: value for name, value in text.items() if isinstance(value, list) or name.endswith("_pattern")}
        per_layer = [name for name, value in lists.items() if isinstance(value, list | str) and len(value) == depth]
        text |= {name: text[name][:num_layers] for name in per_layer}
        text |= dict.fromkeys([name for name in _DEPTHS if name in text] or _DEPTHS[:1], num_layers)
        if ids := text.get("ple_layer_ids"):  # counted from 1
            text["ple_layer_ids"] = [one for one in ids if one <= num_layers]
        if by_layer := text.get("per_layer_config"):
            text["per_layer_config"] = {layer: own for layer, own in by_layer.items() if int(layer) < num_layers}
    most = dict(_SHORTENED)
    if has_reference_layers(text_config):  # windows of answers
        most["sliding_window"] = _NUM_TOKENS // 2
    shortened = {name: min(value, most[name]) for name in most if (value := getattr(text_config, name, None))}
    text |= shortened
    settings |= {name: value for name, value in shortened.items() if name in settings}
    (target / "config.json").write_text(json.dumps(settings))


def _settings_of(text_config: PreTrainedConfig, settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the part of the file for the text model."""
    names = ("text_config", "llm_config", "language_config")
    return next((settings[name] for name in names if isinstance(settings.get(name), dict)), {})


def _num_kinds(found: FoundModel, config: PreTrainedConfig, language: LanguageFamily) -> int:
    """Returns the number of first layers that hold each kind of layer, and a layer for each deepstack level."""
    decoder: Any = found.on_meta.get_submodule(found.decoder)
    types = getattr(config.get_text_config(), "layer_types", None) or [None] * len(decoder.layers)
    kinds = [(repr(layer), kind) for layer, kind in zip(decoder.layers, types, strict=True)]
    first: dict[tuple[str, Any], int] = {kind: index for index, kind in reversed(list(enumerate(kinds)))}
    return max(2, 1 + max(first.values()), language.num_deepstack_levels(config))


def _compare(found: FoundModel, checkpoint: str) -> None:
    questions, suppressed = questions_of(checkpoint), suppressed_tokens(checkpoint)
    answers = answers_of(found, checkpoint, questions, suppressed)
    rows = _check_embeddings(checkpoint, questions, answers)
    _check_answers(checkpoint, questions, answers, rows, suppressed)


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
        with _naming("Preprocess"):
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
        with _naming("Preprocess"):
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
    num_tokens: int = _NUM_TOKENS,
) -> list[Answer]:
    """Returns the answers of the whole model to each question alone, without the tokens `suppressed`."""
    config = load_model_config(checkpoint)
    model: Any = found.whole.from_pretrained(
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
    with _naming("the model's own forward"):
        for inputs in all_inputs:
            seen.clear()
            output = model.generate(**inputs, generation_config=greedy)
            token_ids = output.sequences[0, -num_tokens:].tolist()
            logprobs = torch.cat(output.logits).log_softmax(-1)
            answers.append(Answer(seen[0], _of_prompt(model, inputs), 0.0, token_ids, logprobs))
        with suppress(ValueError):  # some classes have one way of attention only
            decoder.set_attn_implementation("eager")
        return [
            replace(answer, rounding=_mean_difference(_of_prompt(model, inputs), answer.of_prompt))
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


def _mean_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected)[expected > -torch.inf].abs().mean())


def suppressed_tokens(checkpoint: str) -> list[int]:
    """Returns the tokens that no answer may have here: `generate` would take a placeholder for another picture."""
    tokenizer: Any = load_processor(family_of("preprocess", load_model_config(checkpoint)), checkpoint).tokenizer
    return sorted(set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder))


@torch.inference_mode()
def _check_embeddings(
    checkpoint: str, questions: Sequence[Question], answers: Sequence[Answer]
) -> list[list[torch.Tensor]]:
    """Returns the embeddings of each question's items. Raises SelfTestError if the model's decoder got others."""
    model, family = load_vision_half(EncoderConfig(checkpoint))
    all_rows = []
    for question, answer in zip(questions, answers, strict=True):
        with _naming("Encode"):
            rows = _rows_of(family, model, question.items)
        for (info, _), placeholder, own in zip(question.items, question.prompt.placeholders, rows, strict=True):
            expected = answer.embeds[list(placeholder.embed_positions())]
            found = own[:, : expected.shape[-1]]
            if found.shape != expected.shape:
                raise SelfTestError(f"Encode: embeddings of shape {list(found.shape)}, not {list(expected.shape)}")
            difference, largest = float((found - expected).abs().max()), float(expected.abs().max())
            if not difference <= _TOLERANCE * largest:  # 0 for features of deeper layers alone
                item = {"image": "a picture", "audio": "a sound"}[info.modality]
                reason = f"{item}'s embeddings differ by {difference:.1e} from the model's, up to {largest:.1e}"
                raise SelfTestError(f"Encode: {reason}")
        all_rows.append(rows)
    return all_rows


def _rows_of(
    family: VisionFamily, model: PreTrainedModel, items: Sequence[tuple[ItemInfo, ItemTensors]]
) -> list[torch.Tensor]:
    """Returns the embeddings of each item. Items of one modality are encoded together."""
    rows: dict[int, torch.Tensor] = {}
    for modality, rules in family.modalities.items():
        own = [index for index, (info, _) in enumerate(items) if info.modality == modality]
        if own:
            rows |= zip(own, rules.encode(model, [items[index][1] for index in own]), strict=True)
    return [rows[index] for index in range(len(items))]


def _check_answers(
    checkpoint: str,
    questions: Sequence[Question],
    answers: Sequence[Answer],
    rows: Sequence[Sequence[torch.Tensor]],
    suppressed: Sequence[int],
) -> None:
    """Raises SelfTestError if Generate, with all questions at once and in chunks, answers otherwise than the model."""
    longest = max(len(one.prompt.prompt_token_ids) for one in questions)
    largest_item = max(placeholder.length for one in questions for placeholder in one.prompt.placeholders)
    with _naming("Generate"):
        engine = LLMEngine(
            EngineConfig(
                checkpoint,
                kv_cache_bytes=_KV_CACHE_BYTES,
                max_num_batched_tokens=max(16, longest // 3),
                largest_item_tokens=largest_item,
                prompt_lookup=False,
                max_num_seqs=len(questions),
            )
        )
        ask = partial(_asked, engine, questions, rows, suppressed)
        of_prompts, outputs = ask(prompt_logprobs=0)
        ask()
        again = ask()[1]  # begins with what the cache has
    for answer, own_prompt, *all_outputs in zip(answers, of_prompts, outputs, again, strict=True):
        difference = _mean_difference(torch.tensor([one.logprob for one in own_prompt]), answer.of_prompt)
        allowed = min(max(_LEAST_ROUNDING, _MOST_ROUNDINGS * answer.rounding), _MOST_ROUNDING)
        if not difference <= allowed:
            reason = f"log probabilities of the prompt differ by {difference:.1e} from the model's"
            raise SelfTestError(f"Generate: {reason}, {allowed:.1e} would be rounding")
        for own_outputs in all_outputs:
            _check_answer(answer, own_outputs)


def _check_answer(answer: Answer, outputs: Sequence[tuple[int, TokenLogprobs]]) -> None:
    for step, (token_id, logprobs) in enumerate(outputs):
        difference = abs(logprobs.logprob - float(answer.logprobs[step, token_id]))
        if not difference <= _TOLERANCE:
            raise SelfTestError(f"Generate: log probabilities differ by {difference:.1e} from the model's")
        if token_id != answer.token_ids[step]:
            return  # two tokens of the same probability; the answers part here


def _asked(
    engine: LLMEngine,
    questions: Sequence[Question],
    rows: Sequence[Sequence[torch.Tensor]],
    suppressed: Sequence[int],
    **settings: Any,
) -> tuple[list[Sequence[TokenLogprobs]], list[list[tuple[int, TokenLogprobs]]]]:
    """Asks all questions at once. Returns for each the log probabilities of its prompt and the tokens of its answer."""
    params = SamplingParams(
        max_tokens=_NUM_TOKENS,
        temperature=0.0,
        ignore_eos=True,
        logprobs=0,
        logit_bias=dict.fromkeys(suppressed, -100.0),
        **settings,
    )
    for index, (question, own) in enumerate(zip(questions, rows, strict=True)):
        engine.add_request(str(index), question.prompt, list(own), params)
    outputs: list[list[tuple[int, TokenLogprobs]]] = [[] for _ in questions]
    of_prompts: list[Sequence[TokenLogprobs]] = [[] for _ in questions]
    while engine.has_unfinished():
        for output in engine.step():
            if output.error is not None or output.finish_reason is FinishReason.ERROR:
                raise SelfTestError(f"Generate: {output.error or 'a step failed, see the log'}")
            of_prompts[int(output.request_id)] = output.prompt_logprobs or of_prompts[int(output.request_id)]
            outputs[int(output.request_id)] += zip(output.token_ids, output.logprobs, strict=True)
    return of_prompts, outputs


@contextmanager
def _naming(half: str) -> Iterator[None]:
    """Turns any error into a SelfTestError that names the half."""
    try:
        yield
    except SelfTestError:
        raise
    except Exception as error:
        raise SelfTestError(f"{half}: {type(error).__name__}: {error}") from error


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
