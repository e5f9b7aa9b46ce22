"""The fields of every request for generated text, whatever the form of its prompt."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from raylens.deployments.api.prompt_fields import PromptAndMedia, PromptFields
from raylens.deployments.api.wire import Accepted, NotDone, WireModel, at_most
from raylens.llm.sampling import bounds
from raylens.llm.sampling.params import SamplingParams
from raylens.llm.sampling.repetition_detection import RepetitionDetection
from raylens.llm.sampling.structured_output import StructuredOutput

_SAMPLING_FIELDS = (
    *("min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "ignore_eos"),
    *("include_stop_str_in_output", "skip_special_tokens", "thinking_token_budget"),
)
"""The fields that SamplingParams takes unchanged."""


class StreamOptions(WireModel):
    """`include_obfuscation` asks for padding against eavesdroppers who count bytes. This server does not add any."""

    include_usage: bool = False
    continuous_usage_stats: bool = Field(False, description="with include_usage: usage so far in every event")
    include_obfuscation: NotDone = None


class JsonSchema(WireModel):
    """`strict` is a hint: the answer is always valid against the schema."""

    name: str
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(WireModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_goes_with_its_type(self) -> Self:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise ValueError('json_schema has to be set where type is "json_schema", and only there')
        return self

    @property
    def structured_output(self) -> StructuredOutput | None:
        if self.json_schema is not None and self.json_schema.json_schema is not None:
            return StructuredOutput(json_schema=self.json_schema.json_schema)
        return None if self.type == "text" else StructuredOutput(json_object=True)


class StructuredOutputs(WireModel):
    """Forms of answers beyond OpenAI's API, with vLLM's names. Exactly one has to be set."""

    json_schema: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    grammar: str | None = None
    json_object: bool = False

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        set_ones = [one is not None for one in (self.json_schema, self.regex, self.choice, self.grammar)]
        number = sum([*set_ones, self.json_object])
        if number != 1:
            raise ValueError(f"exactly one of json, json_object, regex, choice and grammar has to be set, not {number}")
        return self

    @property
    def structured_output(self) -> StructuredOutput:
        choice = None if self.choice is None else tuple(self.choice)
        return StructuredOutput(
            json_schema=self.json_schema,
            json_object=self.json_object,
            regex=self.regex,
            choice=choice,
            grammar=self.grammar,
        )


class RepetitionFields(WireModel):
    """What counts as a repetition: a run of tokens, of one of these sizes, that comes so many times in a row."""

    max_pattern_size: int = Field(ge=0, description="0: nothing is a repetition")
    min_pattern_size: int = Field(0, ge=0, description="0: the same as 1")
    min_count: int = Field(2, ge=0)

    @property
    def detection(self) -> RepetitionDetection | None:
        """Raises InvalidRequestError."""
        if self.max_pattern_size == 0:
            return None
        return RepetitionDetection(self.max_pattern_size, self.min_pattern_size or 1, self.min_count)


class VllmXargs(WireModel):
    """The arguments of logits processors that are plug-ins of vLLM."""

    no_repeat_ngram_size: Annotated[int, bounds.NGRAM_SIZE] = Field(
        0, description="no run of so many tokens comes twice in the answer; 0: off"
    )


class AnyGenerationFields(PromptFields):
    """The fields that all APIs share that write text."""

    stream: bool | None = None
    stream_interval: int = Field(1, ge=1, le=1024, description="tokens in each event of a stream, but for the last one")
    temperature: Annotated[float, bounds.TEMPERATURE] | None = None
    top_p: Annotated[float, bounds.TOP_P] | None = None
    top_k: Annotated[int, bounds.TOP_K] | None = Field(None, description="-1 and 0: off")
    min_p: Annotated[float, bounds.MIN_P] | None = None
    presence_penalty: Annotated[float, bounds.PENALTY] | None = None
    frequency_penalty: Annotated[float, bounds.PENALTY] | None = None
    repetition_penalty: Annotated[float, bounds.REPETITION_PENALTY] | None = None
    logit_bias: Annotated[dict[int, float], at_most(bounds.MAX_BIASED_TOKENS)] | None = Field(
        None, description="added to the logits, by token id"
    )
    allowed_token_ids: Annotated[list[int], Field(fail_fast=True)] | None = Field(
        None, description="no other token may come, the end token among them"
    )
    bad_words: Annotated[list[str], Field(fail_fast=True)] = Field([], description="texts that may not come")
    seed: Annotated[int, bounds.SEED] | None = None
    min_tokens: int | None = Field(None, ge=0)
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[int], Field(fail_fast=True)] = Field(
        [], description="tokens that end the answer, as the model's end tokens do"
    )
    include_stop_str_in_output: bool = Field(False, description="what of stop and stop_token_ids ended it is told")
    ignore_eos: bool = False
    skip_special_tokens: bool = Field(True, description="leave special tokens out of the text")
    thinking_token_budget: (
        Annotated[int, Field(ge=-1), AfterValidator(lambda value: None if value == -1 else value)] | None
    ) = Field(None, description="tokens of thoughts after which the answer has to begin; -1: no limit")
    vllm_xargs: VllmXargs | None = None
    repetition_detection: RepetitionFields | None = Field(None, description="cut the answer off at a repetition")
    stage_timings: bool = Field(False, description="add the time of each stage, in seconds, to the answer")

    store: Accepted = None
    service_tier: Accepted = None
    safety_identifier: Accepted = None
    prompt_cache_retention: Accepted = None
    prompt_cache_options: Accepted = None
    length_penalty: Accepted = None  # of beam search
    spaces_between_special_tokens: Literal[True] | None = None

    moderation: NotDone = None
    use_beam_search: NotDone = None
    prompt_logprobs: NotDone = None
    logits_processors: NotDone = None
    guided_json: NotDone = None
    guided_regex: NotDone = None
    guided_choice: NotDone = None
    guided_grammar: NotDone = None
    structural_tag: NotDone = None
    kv_transfer_params: NotDone = None
    return_tokens_as_token_ids: NotDone = None

    def prompts_and_media(self) -> list[PromptAndMedia]:
        """Returns each prompt and its media. Raises InvalidRequestError."""
        raise NotImplementedError

    def make_sampling_params(self, **own: Any) -> SamplingParams:
        """Returns the parameters of these fields and of `own`, more of them. Raises InvalidRequestError."""
        return SamplingParams(
            **{name: getattr(self, name) for name in _SAMPLING_FIELDS},
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=self.logit_bias or {},
            allowed_token_ids=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            bad_words=tuple(self.bad_words),
            repetition_detection=None if self.repetition_detection is None else self.repetition_detection.detection,
            no_repeat_ngram_size=0 if self.vllm_xargs is None else self.vllm_xargs.no_repeat_ngram_size,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids),
            **own,
        )


class GenerationFields(AnyGenerationFields):
    """The fields that chat completions and completions share."""

    n: Annotated[int, bounds.NUM_ANSWERS] | None = Field(None, description="answers to the one prompt")
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    return_token_ids: bool = Field(False, description="add the ids of the prompt and of the answer's tokens")
    return_tokens_as_token_ids: bool = Field(False, description="logprobs name tokens token_id:ID, not by their text")
    logprob_token_ids: Annotated[list[int], Field(fail_fast=True)] = Field(
        [], description="with logprobs: name these tokens at each place, not the likeliest"
    )
    prompt_logprobs: Annotated[int, bounds.NUM_LOGPROBS] | None = Field(
        None, description="add the log-probabilities of the prompt's tokens, and of so many likeliest ones beside each"
    )
    metadata: Accepted = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    guided_grammar: str | None = None

    @model_validator(mode="after")
    def _takes_older_names(self) -> Self:
        """Takes vLLM's earlier names of the fields of `structured_outputs`."""
        older = {name: getattr(self, f"guided_{name}") for name in ("json", "regex", "choice", "grammar")}
        if given := {name: value for name, value in older.items() if value is not None}:
            if self.structured_outputs is not None:
                raise ValueError(f"structured_outputs and guided_{min(given)} cannot both be set")
            self.structured_outputs = StructuredOutputs.model_validate(given)
        return self

    @model_validator(mode="after")
    def _options_agree(self) -> Self:
        if self.structured_outputs is not None and self.response_format is not None:
            raise ValueError("response_format and structured_outputs cannot both be set")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options may be set only where stream is true")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs come with a whole answer only, not where stream is true")
        return self

    @property
    def num_answers(self) -> int:
        """The number of answers to each prompt."""
        return 1 if self.n is None else self.n

    @property
    def structured_output(self) -> StructuredOutput | None:
        form = self.structured_outputs or self.response_format
        return None if form is None else form.structured_output

    @property
    def field_names(self) -> Mapping[str, str]:
        if self.structured_outputs is not None:
            names = {"json_schema": "json", "regex": "regex", "choice": "choice", "grammar": "grammar"}
            return {field: f"structured_outputs.{name}" for field, name in names.items()}
        return {"json_schema": "response_format.json_schema.schema", "json_object": "response_format"}
