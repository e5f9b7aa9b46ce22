"""What a checkpoint's files say about its pooling, and the prompts that its inputs become."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raylens.modeling.pooling import Dense, Pooling, PoolingSettings, find_pooling
from raylens.preprocess.pooled_inputs import PLAIN, InputForm, PooledInputs, read_input_form
from raylens.preprocess.schema import ChatPrompt, InvalidRequestError, PooledPrompt, TextPrompt
from tests.pooling.checkpoints import INSTRUCTION, Json, with_modules
from tests.pooling.in_process import PICTURE, text

TOKENIZER = SimpleNamespace(encode=lambda word, add_special_tokens: {"yes": [7], "no": [8]}.get(word, [1, 2]))
LAST: tuple[str, Json] = ("Pooling", {"pooling_mode": "lasttoken"})


def config(model_type: str = "qwen3_vl", architecture: str = "Qwen3VLForConditionalGeneration", **more: Any) -> Any:
    return SimpleNamespace(model_type=model_type, architectures=[architecture], **more)


def found(folder: Path, settings: PoolingSettings | None = None, **more: Any) -> Pooling | None:
    return find_pooling(config(**more), TOKENIZER, str(folder), None, settings or PoolingSettings())


def test_a_model_without_any_such_file_only_generates(tmp_path: Path) -> None:
    assert found(tmp_path) is None
    late = found(tmp_path, model_type="colqwen2")
    assert late is not None
    assert late.embeds
    assert not late.generates


def test_settings_go_before_files(tmp_path: Path) -> None:
    with_modules(tmp_path, [LAST, ("Normalize", {})])
    assert found(tmp_path) == Pooling("last", normalizes=True)
    assert found(tmp_path, PoolingSettings(rows="mean", normalizes=False)) == Pooling("mean")
    scoring = found(tmp_path, PoolingSettings(score_tokens=("no", "yes")))
    assert scoring == Pooling("last", score_tokens=(7, 8))
    assert scoring.scores_pairs
    with pytest.raises(ValueError, match=r"pooling\.score_tokens: 'maybe' is not one token, but 2"):
        found(tmp_path, PoolingSettings(score_tokens=("no", "maybe")))


def test_classifiers_name_their_classes(tmp_path: Path) -> None:
    many = found(tmp_path, architecture="Gemma3ForSequenceClassification", id2label={1: "dog", 0: "cat"})
    assert many == Pooling("last", labels=("cat", "dog"), generates=False)
    assert not many.embeds
    assert not many.scores_pairs
    one = found(tmp_path, architecture="Gemma3ForSequenceClassification", id2label={0: "relevant"})
    assert one is not None
    assert one.scores_pairs


def test_dense_layers_keep_their_place(tmp_path: Path) -> None:
    with_modules(
        tmp_path, [LAST, ("Dense", {"activation_function": "torch.nn.modules.activation.Tanh"}), ("Dense", {})]
    )
    assert found(tmp_path) == Pooling("last", dense=(Dense("2_Dense", "Tanh"), Dense("3_Dense", "Identity")))


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ([("Pooling", {"pooling_mode": "cls"})], "pooling_mode is cls, only lasttoken and mean are supported"),
        ([("Pooling", {"pooling_mode": ["mean", "max"]})], "pooling_mode is mean, max"),
        ([("Normalize", {})], "Normalize at this place"),
        ([LAST, LAST], "Pooling at this place"),
        ([LAST, ("Dense", {"activation_function": "os.system"})], "os.system"),
        ([LAST, ("Dense", {"use_residual": True})], "residual"),
    ],
    ids=str,
)
def test_other_modules_are_refused(tmp_path: Path, modules: list[tuple[str, Json]], message: str) -> None:
    with_modules(tmp_path, modules)
    with pytest.raises(ValueError, match=message):
        found(tmp_path)


def test_broken_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text("{")
    with pytest.raises(ValueError, match=r"modules\.json is not JSON"):
        found(tmp_path)


def inputs(form: InputForm = PLAIN, *, takes_pairs: bool = False) -> PooledInputs:
    return PooledInputs(form, lambda modality: f"<{modality}>", takes_pairs=takes_pairs)


def test_an_input_is_plain_text_unless_files_say_otherwise(tmp_path: Path) -> None:
    assert read_input_form(str(tmp_path)) == PLAIN
    assert inputs().prompt(PooledPrompt([text("a "), PICTURE, text("b")])) == TextPrompt("a <image>b")
    with_modules(tmp_path, [LAST])
    form = read_input_form(str(tmp_path))
    assert inputs(form).prompt(PooledPrompt([text("a")])) == TextPrompt(f"{INSTRUCTION}a")
    assert inputs(form).prompt(PooledPrompt([text("a")], purpose="query")) == TextPrompt("Find: a")
    assert inputs(form).prompt(PooledPrompt([text("a")], purpose="document")) == TextPrompt("a")
    assert inputs(form).prompt(PooledPrompt([text("a")], instruction="Now ")) == TextPrompt("Now a")


def test_a_purpose_without_a_prompt_has_the_default_one() -> None:
    form = InputForm({"default": "D: ", "query": "Q: "}, "default")
    said = [inputs(form).prompt(PooledPrompt([text("a")], purpose=purpose)) for purpose in ("query", "document", None)]
    assert said == [TextPrompt("Q: a"), TextPrompt("D: a"), TextPrompt("D: a")]


def test_a_checkpoint_that_takes_messages_gets_them(tmp_path: Path) -> None:
    with_modules(tmp_path, [LAST], is_chat=True)
    form = read_input_form(str(tmp_path))
    user = {"role": "user", "content": [text("a")]}
    given = inputs(form).prompt(PooledPrompt([text("a")]))
    assert given == ChatPrompt([{"role": "system", "content": INSTRUCTION}, user], add_generation_prompt=True)
    assert inputs(form).prompt(PooledPrompt([text("a")], purpose="document")) == ChatPrompt([user])


def test_pairs_have_the_roles_of_the_template_or_the_form_of_qwen() -> None:
    pair = PooledPrompt([text("d")], query=[PICTURE], instruction="Judge.")
    assert inputs(takes_pairs=True).prompt(pair) == ChatPrompt(
        [
            {"role": "system", "content": "Judge."},
            {"role": "query", "content": [PICTURE]},
            {"role": "document", "content": [text("d")]},
        ]
    )
    own = inputs().prompt(pair)
    assert isinstance(own, ChatPrompt)
    system, user = own.messages
    assert system["content"].startswith("Judge whether the Document meets the requirements")
    joined = "".join(part.get("text", "<image>") for part in user["content"])
    assert joined == "<Instruct>: Judge.<Query>:<image>\n<Document>:d"
    assert own.add_generation_prompt


def test_files_of_other_shapes_are_no_form(tmp_path: Path) -> None:
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 512, "do_lower_case": False}))
    assert read_input_form(str(tmp_path)) == PLAIN


def test_pages_and_queries_do_not_mix() -> None:
    frames: Any = SimpleNamespace(query=lambda processor, said: f"Q {said}", page=lambda processor: "P")
    framed = PooledInputs(PLAIN, str, takes_pairs=False, frames=frames)
    assert framed.prompt(PooledPrompt([text("a"), text("b")])) == TextPrompt("Q ab")
    assert framed.prompt(PooledPrompt([PICTURE])) == TextPrompt("P")
    for content in ([PICTURE, text("a")], [PICTURE, PICTURE]):
        with pytest.raises(InvalidRequestError, match="a text or one picture"):
            framed.prompt(PooledPrompt(content))
