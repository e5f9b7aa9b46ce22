"""Compares the three halves of a found model with the model's own forward, before the first request.

No family declares such a model: all facts about it come from its class and its processor. What these do not tell would
be silently wrong in an answer, such as tokens of a picture that see each other. The test runs in float32 on the CPU.
The decoder has as many layers as it has kinds of layers. Windows, and the choices of indexers, are short, so that a
short prompt exceeds them."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import PreTrainedConfig, PreTrainedModel

from raylens.deployments.stages.found_model_questions import (
    NUM_TOKENS,
    Answer,
    Question,
    SelfTestError,
    answers_of,
    mean_difference,
    naming,
    questions_of,
    suppressed_tokens,
)
from raylens.encoder.config import EncoderConfig
from raylens.encoder.loader import load_vision_half
from raylens.encoder.models.family import VisionFamily
from raylens.llm.config import EngineConfig
from raylens.llm.engine import LLMEngine
from raylens.llm.layer_types import REFERENCE, has_layers
from raylens.llm.loader import load_language_family, why_unsupported
from raylens.llm.models.family import LanguageFamily
from raylens.llm.sampling.logprobs import TokenLogprobs
from raylens.llm.sampling.params import SamplingParams
from raylens.llm.sequence import FinishReason
from raylens.modeling.checkpoint_files import text_section
from raylens.modeling.found_model import FoundModel, find_model
from raylens.modeling.half_model import check_names_no_pickle
from raylens.modeling.load_progress import told_progress
from raylens.modeling.model_configs import load_model_config
from raylens.preprocess.schema import ItemInfo, ItemTensors

_SHORTENED = {
    "sliding_window": 32,
    "index_topk": 32,
    "index_block_size": 8,
    "index_topk_blocks": 4,
    "indexer_compress_ratio": 8,
    "indexer_budget": 24,
    "log_scaling_n_floor": 32,
}
"""The most tokens of windows, of the choices of indexers and their blocks, and of positions without a scale."""
_TOLERANCE = 2e-3
"""The most that embeddings, in terms of their largest number, and log probabilities of an answer may differ."""
_LEAST_ROUNDING, _MOST_ROUNDING, _MOST_ROUNDINGS = 1e-5, 1e-3, 20
"""The log probabilities of a prompt may differ on average by this many times the rounding of the model itself, within
these bounds."""
_KV_CACHE_BYTES = 2**30
_FILES = ["*.json", "*.jinja", "*.model", "*.safetensors", "*.txt"]
_DEPTHS = ("num_hidden_layers", "n_layer", "num_layers")


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
        with told_progress():
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
    text = own if text_config is config else text_section(own) or {}
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
    if has_layers(text_config, REFERENCE):  # windows of answers
        most["sliding_window"] = NUM_TOKENS // 2
    shortened = {name: min(value, most[name]) for name in most if (value := getattr(text_config, name, None))}
    text |= shortened
    settings |= {name: value for name, value in shortened.items() if name in settings}
    (target / "config.json").write_text(json.dumps(settings))


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


@torch.inference_mode()
def _check_embeddings(
    checkpoint: str, questions: Sequence[Question], answers: Sequence[Answer]
) -> list[list[torch.Tensor]]:
    """Returns the embeddings of each question's items. Raises SelfTestError if the model's decoder got others."""
    model, family = load_vision_half(EncoderConfig(checkpoint))
    all_rows = []
    for question, answer in zip(questions, answers, strict=True):
        with naming("Encode"):
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
    with naming("Generate"):
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
        difference = mean_difference(torch.tensor([one.logprob for one in own_prompt]), answer.of_prompt)
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
        max_tokens=NUM_TOKENS,
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
