"""How a checkpoint turns a prompt's hidden states into embeddings or scores, by its own files and the settings."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from raylens.modeling.checkpoint_files import read_json

PooledRows = Literal["last", "mean", "all"]
"""The positions whose hidden states are pooled: the prompt's last one, the mean of all, or each on its own."""

_CLASSIFIER = "ForSequenceClassification"
_ACTIVATIONS = ("torch.nn.modules.linear.", "torch.nn.modules.activation.")


@dataclass(frozen=True, slots=True)
class Dense:
    """A linear layer of sentence-transformers behind the pooling. `folder`: in the checkpoint. `activation`: the name
    of a class of `torch.nn`."""

    folder: str
    activation: str = "Identity"


@dataclass(frozen=True, slots=True)
class Pooling:
    """What comes of a prompt's hidden states, which are those after the decoder's final norm.

    `module`: the path of the model's own layer that projects each of them. `dense`: further layers. `normalizes`:
    whether vectors get the length 1. `score_tokens`: the ids of the tokens for relevant and irrelevant; the result is
    the difference of their logits. Without the second one it is the logit of the first. `labels`: the classes of a
    classifier, whose logits are the result. `generates`: whether the model also writes text."""

    rows: PooledRows
    module: str | None = None
    dense: tuple[Dense, ...] = ()
    normalizes: bool = False
    score_tokens: tuple[int, int | None] | None = None
    labels: tuple[str, ...] = ()
    generates: bool = True

    @property
    def scores_pairs(self) -> bool:
        """Whether the result is the relevance of one text for another in the same prompt, not a vector."""
        return self.score_tokens is not None or len(self.labels) == 1

    @property
    def embeds(self) -> bool:
        """Whether the result is one vector, or one for each token."""
        return not self.scores_pairs and not self.labels


OWN_POOLING: Mapping[str, Pooling] = dict.fromkeys(
    ("colpali", "colqwen2"), Pooling("all", module="embedding_proj_layer", normalizes=True, generates=False)
)
"""By `model_type`: the models whose class itself ends in vectors."""


@dataclass(frozen=True, slots=True)
class PoolingSettings:
    """What replaces the checkpoint's own pooling; None: nothing does. See `config.PoolingConfig`."""

    rows: Literal["last", "mean"] | None = None
    normalizes: bool = True
    score_tokens: tuple[str, str] | None = None


NO_SETTINGS = PoolingSettings()


def find_pooling(
    hf_config: Any, tokenizer: Any, model: str, revision: str | None = None, settings: PoolingSettings = NO_SETTINGS
) -> Pooling | None:
    """Returns the pooling of a checkpoint, a folder or a hub id, or None if the model only generates. The settings go
    before sentence-transformers' `modules.json`, which goes before the model's class.

    Raises ValueError for modules that are not supported, and for a score token outside the vocabulary."""
    if settings.score_tokens is not None:
        irrelevant, relevant = (_token_id(tokenizer, token) for token in settings.score_tokens)
        return Pooling("last", score_tokens=(relevant, irrelevant))
    if settings.rows is not None:
        return Pooling(settings.rows, normalizes=settings.normalizes)
    own = OWN_POOLING.get(hf_config.model_type)
    if (modules := read_json(model, "modules.json", revision)) is not None and own is None:
        return _of_modules(modules, model, revision)
    if any(name.endswith(_CLASSIFIER) for name in hf_config.architectures or ()):
        if (kind := getattr(hf_config, "problem_type", None)) not in (None, "single_label_classification"):
            raise ValueError(f"{model}: a classifier of problem_type {kind}, which is not supported")
        labels = tuple(hf_config.id2label[index] for index in sorted(hf_config.id2label))
        return Pooling("last", labels=labels, generates=False)
    return own


def _token_id(tokenizer: Any, token: str) -> int:
    """Raises ValueError for a text that is not one token."""
    ids = tokenizer.encode(token, add_special_tokens=False)
    if len(ids) != 1:
        raise ValueError(f"pooling.score_tokens: {token!r} is not one token, but {len(ids)}")
    return int(ids[0])


def _of_modules(modules: list[dict[str, str]], model: str, revision: str | None) -> Pooling | None:
    """Returns the pooling of a chain of sentence-transformers' modules; None if it ends with the model itself."""
    pooling: Pooling | None = None
    for one in modules[1:]:
        name, folder = one["type"].rpartition(".")[2], one["path"]
        config = read_json(model, f"{folder}/config.json", revision) or {}
        match name:
            case "Pooling" if pooling is None:
                pooling = Pooling(_pooled_rows(config))
            case "LogitScore" if pooling is None:
                pooling = Pooling("last", score_tokens=(config["true_token_id"], config.get("false_token_id")))
            case "Dense" if pooling is not None and not pooling.normalizes:
                pooling = replace(pooling, dense=(*pooling.dense, Dense(folder, _activation(config))))
            case "Normalize" if pooling is not None:
                pooling = replace(pooling, normalizes=True)
            case _:
                raise ValueError(f"{model}: modules.json has {name} at this place, which is not supported")
    return pooling


def _pooled_rows(config: Mapping[str, Any]) -> PooledRows:
    """Returns the positions that sentence-transformers' module Pooling takes, in its new or its old form. Raises
    ValueError for others."""
    modes = config.get("pooling_mode") or [
        name.removeprefix("pooling_mode_").removesuffix("_tokens")
        for name, is_on in config.items()
        if name.startswith("pooling_mode_") and is_on
    ]
    match [modes] if isinstance(modes, str) else list(modes):
        case ["lasttoken"]:
            return "last"
        case ["mean"]:
            return "mean"
        case other:
            raise ValueError(f"pooling_mode is {', '.join(other)}, only lasttoken and mean are supported")


def _activation(config: Mapping[str, Any]) -> str:
    """Returns the class name of a dense layer's activation. Raises ValueError for one outside of torch, and for a
    residual connection."""
    path: str = config.get("activation_function") or "torch.nn.modules.linear.Identity"
    if not path.startswith(_ACTIVATIONS) or config.get("use_residual"):
        raise ValueError(f"a dense layer with {path[:100]}, which is not supported, or with a residual connection")
    return path.rpartition(".")[2]
