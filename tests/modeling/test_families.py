"""The table of model families names what is there, all of it, and loads no more than is used."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from raylens.encoder.models.family import VisionFamily
from raylens.llm.models.family import LanguageFamily
from raylens.modeling.families import (
    FAMILIES,
    PARTLY_FOUND,
    RETRIEVAL,
    SERVED_FAMILIES,
    UNSERVED,
    Stage,
    known_to,
    load_family,
    multimodal_types,
)
from raylens.preprocess.models.family import ProcessorFamily

ROOT = Path(__file__).parent.parent.parent
CLASSES: dict[Stage, type] = {"preprocess": ProcessorFamily, "encoder": VisionFamily, "llm": LanguageFamily}


@pytest.mark.parametrize("stage", CLASSES)
def test_the_table_names_every_family_that_a_stage_declares(stage: Stage) -> None:
    named = [load_family(stage, model_type) for model_type in [*known_to(stage), *PARTLY_FOUND, *RETRIEVAL]]
    assert all(isinstance(family, CLASSES[stage]) or callable(family) for family in named)
    for file in (ROOT / stage / "models").glob("*.py"):
        module = importlib.import_module(f"raylens.{stage}.models.{file.stem}")
        declared = [one for one in vars(module).values() if isinstance(one, CLASSES[stage])]
        assert all(any(one is family for family in named) for one in declared), file


def test_a_family_is_served_when_every_stage_knows_it() -> None:
    assert set(known_to("llm")) & set(known_to("encoder")) == SERVED_FAMILIES
    unserved = {name for name, family in FAMILIES.items() if family.why_unserved is not None}
    of_some_stage = {"internlm2"}
    assert FAMILIES.keys() - SERVED_FAMILIES == unserved == of_some_stage | UNSERVED.keys()


def test_transformers_types_are_read_without_importing_it() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

    assert multimodal_types() == MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.keys()
    assert not modules_after("from raylens.modeling.families import is_found; is_found('x')") & {
        "torch",
        "transformers",
    }


def test_a_family_that_a_stage_does_not_know_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'bert' is not supported, only \['aria'"):
        load_family("encoder", "bert")
    with pytest.raises(ValueError, match="'internlm2' is not supported"):
        load_family("encoder", "internlm2")


def modules_after(code: str) -> set[str]:
    """The modules that a new interpreter has loaded after `code`."""
    command = [sys.executable, "-c", f"import sys\n{code}\nprint(*sys.modules)"]
    return set(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split())


def test_the_table_itself_loads_neither_torch_nor_transformers() -> None:
    assert not modules_after("import raylens.modeling.families") & {"torch", "transformers"}


SETUP = "from raylens.modeling.torchvision_build import make_importable\nmake_importable()"


@pytest.fixture(scope="module")
def llava_modules() -> set[str]:
    """What the class of LLaVA itself imports of transformers, and the configurations that `AutoConfig` knows of it."""
    return modules_after(f"{SETUP}\nfrom transformers import AutoConfig, LlavaForConditionalGeneration")


@pytest.mark.parametrize(
    ("stage", "use"), [pytest.param("encoder", ".model_class", marks=pytest.mark.slow), ("llm", "")]
)
def test_a_half_loads_the_models_of_its_own_family_only(stage: Stage, use: str, llava_modules: set[str]) -> None:
    """Generate finds its half of LLaVA on a model without weights. What that loads, the half needs itself."""
    use = f"from raylens.modeling.families import load_family\nload_family({stage!r}, 'llava'){use}"
    half = modules_after(f"{SETUP}\nimport {stage}.engine\n{use}")
    models = {name for name in half - llava_modules if name.startswith("transformers.models.") and "modeling_" in name}
    assert models == set()
