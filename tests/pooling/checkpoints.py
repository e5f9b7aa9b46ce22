"""Small checkpoints with the files of sentence-transformers, as models of embeddings and rerankers are published."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.small_models import make_checkpoint

Json = dict[str, Any]

INSTRUCTION = "Represent the user's input."
NUM_CLASSES = 3
_MODULES = "sentence_transformers"
PLACES = {
    "Pooling": f"{_MODULES}.sentence_transformer.modules.pooling.Pooling",
    "LogitScore": f"{_MODULES}.cross_encoder.modules.logit_score.LogitScore",
    "Dense": f"{_MODULES}.base.modules.dense.Dense",
    "Normalize": f"{_MODULES}.base.modules.normalize.Normalize",
}
RERANKER_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- {'system': '<Instruct>: ', 'query': '<Query>: ', 'document': '<Document>: '}[message.role] -}}"
    "{%- if message.content is string -%}{{ message.content }}{%- else -%}"
    "{%- for part in message.content -%}"
    "{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>"
    "{%- else -%}{{ part.text }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}{{ '\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ 'Answer: ' }}{%- endif -%}"
)


def with_modules(folder: Path, modules: Sequence[tuple[str, Json]], *, is_chat: bool = False) -> None:
    """Adds the files of a chain of modules behind the model, each with its configuration."""
    transformer = f"{_MODULES}.base.modules.transformer.Transformer"
    chain: list[Json] = [{"idx": 0, "name": "0", "path": "", "type": transformer}]
    for index, (name, config) in enumerate(modules, start=1):
        path = f"{index}_{name}"
        chain.append({"idx": index, "name": str(index), "path": path, "type": PLACES[name]})
        (folder / path).mkdir()
        _write(folder / path / "config.json", config)
    _write(folder / "modules.json", chain)
    modality = {"method": "forward", "method_output_name": "last_hidden_state"}
    modalities: Json = {"text": modality} | ({"message": {**modality, "format": "structured"}} if is_chat else {})
    processing = {"chat_template": {"add_generation_prompt": True}} if is_chat else {}
    _write(folder / "sentence_bert_config.json", {"modality_config": modalities, "processing_kwargs": processing})
    prompts = {"query": "Find: ", "document": "", "default": INSTRUCTION}
    _write(folder / "config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": "default"})


def embedding_model(folder: Path, modules: Sequence[tuple[str, Json]], *, is_chat: bool = True) -> str:
    """A checkpoint of Qwen3-VL."""
    checkpoint = make_checkpoint("qwen3_vl", folder)
    with_modules(folder, modules, is_chat=is_chat)
    for index, (name, config) in enumerate(modules, start=1):
        if name == "Dense":
            weights = torch.randn(config["out_features"], config["in_features"])
            save_file({"linear.weight": weights}, folder / f"{index}_{name}" / "model.safetensors")
    return checkpoint


def reranker(folder: Path, template: str | None = RERANKER_TEMPLATE) -> str:
    """A checkpoint that scores by the logits of two tokens."""
    checkpoint = embedding_model(folder, [("LogitScore", {"true_token_id": 40, "false_token_id": 41})])
    _write(folder / "config_sentence_transformers.json", {"prompts": {}, "default_prompt_name": None})
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return checkpoint


def classifier(folder: Path) -> str:
    """A checkpoint of `Gemma3ForSequenceClassification`: a linear layer in place of the output head."""
    checkpoint = make_checkpoint("gemma3", folder, is_tied=True)
    config = json.loads((folder / "config.json").read_text())
    labels = {str(index): f"class {index}" for index in range(NUM_CLASSES)}
    config |= {"architectures": ["Gemma3ForSequenceClassification"], "id2label": labels}
    config["label2id"] = {label: int(index) for index, label in labels.items()}
    _write(folder / "config.json", config)
    weights = load_file(folder / "model.safetensors")
    weights["score.weight"] = torch.randn(NUM_CLASSES, config["text_config"]["hidden_size"])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return checkpoint


def _write(file: Path, content: Mapping[str, Any] | Sequence[Any]) -> None:
    file.write_text(json.dumps(content))
