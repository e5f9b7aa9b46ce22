"""The measured cost of each stage: the format of `costs.json`, written by `python -m benchmarks.stage_costs`.

Seconds are CPU seconds of one thread unless a field says otherwise. A stage on a GPU has GPU seconds."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field

from raylens.planning.load import Picture
from raylens.planning.settings import PlanError, PlanSettings, read_mapping


class MeasuredOn(PlanSettings):
    """The machine and the settings of the measurement."""

    model_config = ConfigDict(extra="allow", frozen=True)

    processor: str = Field(description="its name, and for GPUs theirs")
    cpus: float = Field(gt=0, description="cores")


class Work(PlanSettings):
    """A process's work for passing requests: linear in their contents and answers."""

    seconds_per_request: float = Field(0.0, ge=0)
    seconds_per_new_picture: float = Field(0.0, ge=0)
    seconds_per_repeated_picture: float = Field(0.0, ge=0)
    seconds_per_megapixel: float = Field(0.0, ge=0, description="of new and of repeated pictures")
    seconds_per_message: float = Field(0.0, ge=0, description="a message brings tokens that are ready together")
    seconds_per_piece: float = Field(0.0, ge=0, description="a piece is the tokens of one answer in a message")

    def of_request(self, pictures: tuple[Picture, ...] = ()) -> float:
        """Returns the seconds of a request, without its answer's tokens."""
        return self.seconds_per_request + sum(map(self.of_picture, pictures))

    def of_picture(self, picture: Picture) -> float:
        fixed = self.seconds_per_repeated_picture if picture.is_repeated else self.seconds_per_new_picture
        return fixed + self.seconds_per_megapixel * picture.megapixels


class Reserved(PlanSettings):
    cpus: float = Field(ge=0)
    gpus: float = Field(0.0, ge=0)


class ProcessCosts(PlanSettings):
    reserved: Reserved
    work: Work


class PreprocessCosts(ProcessCosts):
    """Preprocess. `work` excludes decoding and processing pictures."""

    seconds_per_item: float = Field(ge=0)
    seconds_per_megapixel: float = Field(ge=0)
    max_ongoing_items: int = Field(16, ge=1)
    niceness: int = Field(15, ge=0, le=19)

    def of_item(self, picture: Picture) -> float:
        """Returns the seconds of decoding and processing a picture."""
        return self.seconds_per_item + self.seconds_per_megapixel * picture.megapixels


class EncodeCosts(ProcessCosts):
    """Encode. `work` excludes the batches."""

    seconds_per_batch: float = Field(ge=0)
    seconds_per_patch: float = Field(ge=0)
    max_batch_patches: int = Field(1024, ge=1)
    niceness: int = Field(10, ge=0, le=19)


class GenerateCosts(ProcessCosts):
    """Generate. `work` excludes the engine's steps."""

    seconds_per_step: float = Field(ge=0)
    seconds_per_sequence: float = Field(ge=0, description="of a step, for each sequence that decodes in it")
    seconds_per_prompt_token: float = Field(ge=0)
    interpreter_seconds_per_step: float = Field(
        0.0, ge=0, description="part of seconds_per_step in which the engine holds the interpreter, and `work` waits"
    )
    wait_per_step: float = Field(0.0, ge=0, description="idle seconds between two steps")
    max_num_seqs: int = Field(64, ge=1, description="default: the CPU's; costs measured on a GPU include theirs")
    max_num_batched_tokens: int = Field(512, ge=1, description="likewise")
    max_decode_slowdown: float | None = Field(9.0, gt=1)
    short_prompt_share: float = Field(0.5, ge=0, le=0.9)

    def of_step(self, num_decodes: int, num_prompt_tokens: int) -> float:
        decoding = self.seconds_per_step + self.seconds_per_sequence * num_decodes
        return decoding + self.seconds_per_prompt_token * num_prompt_tokens


class ModelSizes(PlanSettings):
    """Model sizes of a picture: its patches in the encoder, its tokens in a prompt."""

    name: str
    patches_per_picture: float = Field(ge=0)
    patches_per_megapixel: float = Field(0.0, ge=0)
    tokens_per_picture: float = Field(ge=0)
    tokens_per_megapixel: float = Field(0.0, ge=0)
    bytes_per_embedding: float = Field(0.0, ge=0, description="bytes of the embedding of one token")
    pixel_bytes_per_patch: float = Field(0.0, ge=0, description="bytes of the tensors that Encode gets, a patch")

    def patches(self, picture: Picture) -> int:
        return max(1, round(self.patches_per_picture + self.patches_per_megapixel * picture.megapixels))

    def tokens(self, picture: Picture) -> int:
        return round(self.tokens_per_picture + self.tokens_per_megapixel * picture.megapixels)


class ByKind(PlanSettings):
    """A figure per kind of request: text only, with a new picture, with repeated pictures only."""

    text: float = Field(ge=0)
    new_picture: float = Field(ge=0)
    repeated_picture: float = Field(ge=0)

    def of(self, pictures: tuple[Picture, ...]) -> float:
        if not pictures:
            return self.text
        return self.repeated_picture if all(picture.is_repeated for picture in pictures) else self.new_picture


class FleetCosts(PlanSettings):
    """Limits of a large fleet. None: not measured, so an option or an assumption must provide the figure."""

    controller_seconds_per_replica_second: float | None = Field(None, ge=0, description="of the Serve controller")
    proxy_bytes_per_piece: float | None = Field(None, ge=0, description="sent to a client for a piece of an answer")
    proxy_bytes_per_megapixel: float | None = Field(None, ge=0, description="received for a picture, in base64")
    proxy_connections: int | None = Field(None, ge=1, description="of clients, that one HAProxy serves at once")


class Costs(PlanSettings):
    version: Literal[1]
    measured_on: MeasuredOn
    model: ModelSizes
    client: Work = Field(Work(), description="of the load's client, if it shares the cores")
    proxy: ProcessCosts
    ingress: ProcessCosts
    shared: ProcessCosts
    preprocess: PreprocessCosts
    encode: EncodeCosts
    generate: GenerateCosts
    beside: Work = Field(Work(), description="of other processes, such as Ray's, for a request; delays no request")
    background_cores: float = Field(0.0, ge=0, description="cores that the idle server takes")
    on_path_share: ByKind = Field(
        ByKind(text=1, new_picture=1, repeated_picture=1), description="share of each `work` that delays the request"
    )
    wait_seconds: ByKind = Field(
        ByKind(text=0, new_picture=0, repeated_picture=0), description="idle seconds before the first token"
    )
    fleet: FleetCosts = FleetCosts()

    def reserved(self, stage: str) -> Reserved:
        """Returns the reservation of a replica of the stage."""
        costs: ProcessCosts = getattr(self, stage)
        return costs.reserved


def read_costs(path: Path, overrides: Mapping[str, float] | None = None) -> Costs:
    """Reads the costs from a file, which holds them alone or as `costs` of a benchmark's document. `overrides` replace
    figures by name, such as `generate.seconds_per_step`. Raises PlanError that names file, field, limit and value."""
    values = read_mapping(path)
    values = values["costs"] if isinstance(values.get("costs"), dict) else values
    for name, value in (overrides or {}).items():
        _override(values, name, value)
    return Costs.checked(values, str(path))


def _override(values: dict[str, Any], name: str, value: float) -> None:
    *groups, field = name.split(".")
    for group in groups:
        values = values.setdefault(group, {})
        if not isinstance(values, dict):
            raise PlanError(f"--cost {name}: {group} is a figure, not a group of figures")
    values[field] = value
