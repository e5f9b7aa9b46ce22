"""`POST /v1/completions`: prompts as text or token ids, with media beside them or in the text."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BaseModel, Field, model_validator

from raylens.deployments.api.generation import GenerationFields
from raylens.deployments.api.prompts import PromptMedia, Prompts, prompt_and_media
from raylens.deployments.api.wire import NotDone, OrAbsent, PromptLogprobs, StageTimings, Usage
from raylens.deployments.pipeline.media_source import MediaSource
from raylens.llm.sampling import bounds
from raylens.llm.sampling.params import SamplingParams
from raylens.preprocess.schema import InvalidRequestError, Prompt


class CompletionRequest(GenerationFields, PromptMedia):
    """`echo` puts the prompt's text before each answer's. With `logprobs`, each answer then has those of the prompt,
    too."""

    most_at_once: ClassVar[int] = bounds.MAX_N

    prompt: Prompts
    max_tokens: int | None = Field(16, ge=0, description="null: as many as the context has room for")
    logprobs: Annotated[int, bounds.NUM_LOGPROBS] | None = None
    echo: bool | None = None
    best_of: int | None = None
    add_special_tokens: Literal[True] | None = None
    suffix: NotDone = None
    prompt_embeds: NotDone = None

    @model_validator(mode="after")
    def _returns_all_of_a_few_answers(self) -> Self:
        number = len(self.prompts) * self.num_answers
        if number > bounds.MAX_N:
            raise ValueError(f"{number} answers to all prompts together, the limit is {bounds.MAX_N}")
        if self.best_of not in (None, self.num_answers):
            raise ValueError("best_of has to be the same as n: all answers are returned")
        if self.logprob_token_ids and self.logprobs is None:
            raise ValueError("logprob_token_ids may be set only where logprobs is")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens may be 0 only where echo is true")
        if self.prompt_logprobs is not None and self.echo and self.logprobs is not None:
            raise ValueError("prompt_logprobs and echo with logprobs tell the same, set one of them")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one or more. Each is a text or token ids."""
        if isinstance(self.prompt, list) and self.prompt and not isinstance(self.prompt[0], int):
            return [one for one in self.prompt if not isinstance(one, int)]
        return [self.prompt]  # type: ignore[list-item]

    @property
    def field_names(self) -> Mapping[str, str]:
        return {**super().field_names, "messages": "prompt"}

    def prompts_and_media(self) -> list[tuple[Prompt, list[MediaSource]]]:
        prompts = self.prompts
        if len(prompts) == 1:
            return [prompt_and_media(prompts[0], self.multi_modal_data, "prompt")]
        if self.multi_modal_data:
            raise InvalidRequestError(f"goes with one prompt, not with {len(prompts)}", field="multi_modal_data")
        return [prompt_and_media(prompt, None, f"prompt[{index}]") for index, prompt in enumerate(prompts)]

    def sampling_params(self) -> SamplingParams:
        return self.make_sampling_params(
            max_tokens=self.max_tokens,
            n=self.num_answers,
            logprobs=self.logprobs,
            prompt_logprobs=self.logprobs if self.echo and self.logprobs is not None else self.prompt_logprobs,
            structured_output=self.structured_output,
            logprob_token_ids=tuple(self.logprob_token_ids),
        )


class CompletionLogprobs(BaseModel):
    """Lists with one entry for each token. The first token of an echoed prompt has no log-probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    token_ids: OrAbsent[list[int]] = None
    prompt_token_ids: OrAbsent[list[int]] = None
    prompt_logprobs: OrAbsent[PromptLogprobs] = None


class Completion(BaseModel):
    """A whole answer, or one event of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    stage_timings: OrAbsent[StageTimings] = None
