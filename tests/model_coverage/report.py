"""Writes docs/models.md: what each model type of transformers with pictures or sounds does here, from one run."""

import tempfile
import warnings
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

from raylens.cpu_kernels.threads import usable_cores
from raylens.deployments.stages.found_model_check import check_found_model
from raylens.modeling.families import FAMILIES, SERVED_FAMILIES, load_family
from raylens.modeling.torchvision_build import make_importable
from raylens.preprocess.processor import MultiModalProcessor, ProcessorConfig
from tests.model_coverage.parity import WAYS, Case, found_cases, ways_that_differ
from tests.model_coverage.small_checkpoints import save_small_checkpoint
from tests.model_coverage.small_configs import small_config
from tests.small_models import make_checkpoint, small_requests, whole_class

PAGE = Path(__file__).parent.parent.parent / "docs" / "models.md"
_LONGEST_REASON = 150
_TEXT_MODELS = {"mistral4": "mistral3"}
"""Types of text models, with the type of the checkpoints that have them."""
_OF_WHOLE = {"vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "hidden_size", "max_position_embeddings"}
"""Settings of a text model that its checkpoint's other parts share."""


@dataclass(frozen=True)
class Row:
    """`is_equal`: by way. `note`: the reason for not serving the type, or what is served."""

    model_type: str
    served: str
    media: str = ""
    is_equal: tuple[bool, ...] = ()
    note: str = ""

    def __str__(self) -> str:
        ways = [{True: "yes", False: "no"}[one] for one in self.is_equal] or [""] * len(WAYS)
        return f"| `{self.model_type}` | {self.served} | {self.media} | {' | '.join(ways)} | {self.note} |"


def row_of(model_type: str) -> Row:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if model_type in _TEXT_MODELS:
            return _text_model_row(model_type, folder)
        if model_type in FAMILIES:
            return _declared_row(model_type, folder)
        return _found_row(model_type, folder)


def _declared_row(model_type: str, folder: str, text_config: dict[str, Any] | None = None) -> Row:
    if model_type not in SERVED_FAMILIES:
        return Row(model_type, "refused", note=FAMILIES[model_type].why_unserved or "")
    make_checkpoint(model_type, Path(folder), text_config)
    model = whole_class(model_type).from_pretrained(folder).eval()
    requests = small_requests(model_type, model)
    cases = [Case(one.prompt, one.embeddings, one.expected) for one in requests]
    media = _media(load_family("preprocess", model_type).modalities)
    return Row(model_type, "declared", media, _equal_ways(folder, cases))


def _text_model_row(model_type: str, folder: str) -> Row:
    whole, settings = _TEXT_MODELS[model_type], small_config(model_type).to_dict()
    row = _declared_row(whole, folder, {name: value for name, value in settings.items() if name not in _OF_WHOLE})
    return replace(row, model_type=model_type, served="as a part", note=f"the text model of a `{whole}`")


def _found_row(model_type: str, folder: str) -> Row:
    try:
        save_small_checkpoint(model_type, Path(folder))
    except Exception as error:
        return Row(model_type, "not tested", note=f"no small checkpoint: {_first_line(error)}")
    try:
        check_found_model(folder, None)
    except ValueError as error:
        return Row(model_type, "refused", note=_first_line(error))
    media = _media(MultiModalProcessor(ProcessorConfig(folder)).items.modalities)
    return Row(model_type, "found", media, _equal_ways(folder, found_cases(folder)))


def _media(modalities: Iterable[str]) -> str:
    return ", ".join({"image": "pictures", "video": "videos", "audio": "sounds"}[one] for one in modalities)


def _equal_ways(folder: str, cases: list[Case]) -> tuple[bool, ...]:
    differing = ways_that_differ(folder, cases)
    return tuple(way not in differing for way in WAYS)


def _first_line(error: Exception) -> str:
    text = (str(error).strip() or type(error).__name__).splitlines()[0].replace("|", "/")
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]}..."


def page_of(rows: list[Row]) -> str:
    count = Counter(row.served for row in rows)
    return f"""# Models

`python -m tests.model_coverage` writes this page from one run: {len(rows)} types, all of transformers
{transformers.__version__}'s models with pictures or sounds and Raylens' own, each as a small random checkpoint in
float32 on the CPU. {count["declared"]} types have a declaration. {count["found"]} more are found, and pass the start's
check ([decision](decisions/002-declared-families.md)). {count["as a part"]} is a part of a declared one.
{count["refused"]} are refused. For {count["not tested"]} types no small checkpoint can be made here; the check at the
start decides on a published one.

The columns from "alone" on say whether the greedy tokens of each way equal those of `generate`: prompts alone, all
together, in chunks of 96 tokens, with a cache so small that some are preempted, after an equal prompt, and with
embeddings that arrive late.

| `model_type` | served | media | {" | ".join(WAYS)} | note |
|---|---|---|{"---|" * len(WAYS)}---|
{chr(10).join(map(str, rows))}
"""


def write_page(wanted: list[str]) -> None:
    """`wanted`: types whose rows are printed instead."""
    known = {*MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES, *FAMILIES}
    types = wanted or sorted(one for one in known if f"{one}_thinker" not in known)
    rows = []
    with ProcessPoolExecutor(usable_cores(), mp_context=get_context("spawn"), initializer=make_importable) as pool:
        for row in pool.map(row_of, types):
            print(row, flush=True)
            rows.append(row)
    if not wanted:
        PAGE.write_text(page_of(rows))
