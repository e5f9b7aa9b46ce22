"""The settings of one application, the `args` in `serve.yaml`: every field typed and with its unit."""

from hashlib import sha256
from typing import Annotated, Any, Literal, Self
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from raylens.llm.config import NO_ASYNC_WITH_RANKS, NO_INT8_ON_GPU, DtypeName, EngineSettings
from raylens.preprocess.media import DEFAULT_VIDEO_FRAMES, MediaLimits
from raylens.preprocess.media_fetch import FetchPolicy


class Settings(BaseModel):
    """A group of settings. A misspelt field is an error, so it never falls back to its default."""

    model_config = ConfigDict(extra="forbid", frozen=True)


Resources = Annotated[
    dict[str, Annotated[float, Field(ge=0)]],
    Field(
        description="custom resources of Ray reserved per replica, by which a stage finds its nodes, e.g. {cpu_node: 1}"
    ),
]

_MOST_SUFFIX_CHARS = 100
"""A replica's log file is named after its deployment, and file systems limit names to 255 bytes."""

ModelSource = Annotated[str, Field(description="folder or hub id of the checkpoint")]


class MediaConfig(Settings):
    """The media of one request, and the sources that the server may fetch or read."""

    limits: MediaLimits = Field(MediaLimits(), description="what one request may bring")
    fetch: FetchPolicy = Field(FetchPolicy(), description="which http(s) URLs the server fetches")
    local_root: str | None = Field(
        None, description="folder on the ingress's node below which `file:` URLs may name files; null: none is read"
    )


class AuthConfig(Settings):
    """API keys. Without a file and without RAYLENS_API_KEYS in the environment, everybody may call."""

    keys_file: str | None = Field(None, description="YAML file of API keys' hashes, made with `raylens key`")


class Budget(Settings):
    """Limits of all concurrent requests together."""

    requests: int = Field(ge=1, description="in work")
    bytes: int = Field(ge=1, description="of bodies and fetched media, also of those that wait")
    pixels: int = Field(ge=1, description="of pictures and videos, by their headers")
    tokens: int = Field(
        ge=1,
        description="characters of text / 4 + answers x max_tokens, or 1024 where that is not set; a quarter more for"
        " each log-probability that is asked for beside a token",
    )


class AdmissionConfig(Settings):
    """Limits of concurrent requests. Each running ingress replica admits an equal share of both budgets. Excess
    requests wait for room; after `max_queue_seconds` they are refused with 429 and Retry-After."""

    total: Budget = Budget(requests=256, bytes=2**30, pixels=2**31, tokens=2**22)
    per_key: Budget = Budget(requests=64, bytes=2**28, pixels=2**29, tokens=2**20)
    max_queued_requests: int = Field(256, ge=0, description="requests that wait for room")
    max_queued_requests_per_key: int = Field(64, ge=0, description="of these with one API key")
    max_queue_seconds: float = Field(30.0, gt=0, description="seconds that a request waits for room at most")
    max_body_bytes: int = Field(96 * 2**20, ge=1, description="bytes of one request's body")
    body_timeout_s: float = Field(60.0, gt=0, description="seconds that sending a body may take")

    @field_validator("total", "per_key", mode="before")
    @classmethod
    def _other_fields_keep_their_defaults(cls, given: Any, info: ValidationInfo) -> Any:
        """Fills in a budget's missing fields. The two budgets have different defaults, so their class has none."""
        default: Budget = cls.model_fields[info.field_name or ""].default
        return default.model_dump() | given if isinstance(given, dict) else given


class UploadConfig(Settings):
    """Files that clients upload once and name in later requests (`/v1/files`)."""

    folder: str | None = Field(
        None,
        description="where they are kept; in a file system of all nodes they outlive any node; null: on the disk of one"
        " node, until the server ends",
    )

    max_bytes: int = Field(2**30, ge=0, description="bytes of all files")
    max_age_s: float = Field(86400.0, gt=0, description="seconds until a file is deleted")


class MetricsConfig(Settings):
    """The application's metrics for Prometheus. The endpoint's `/metrics` covers all nodes."""

    port: int = Field(
        8081,
        ge=0,
        le=65535,
        description="port of every node on which its metrics can be read; 0: any that is free, for one node only",
    )
    slo_time_to_first_token_s: float = Field(
        2.5, gt=0, description="seconds to the first token in which a request is as fast as you promise"
    )
    slo_time_per_output_token_s: float = Field(
        0.1, gt=0, description="mean seconds between its tokens, for the same purpose"
    )


class ScaledConfig(Settings):
    """A deployment that Ray Serve scales by its work: see `deployments/routing/work_scaling.py`."""

    min_replicas: int = Field(1, ge=1, description="replicas at rest")
    max_replicas: int = Field(1, ge=1, description="replicas under load")

    @model_validator(mode="after")
    def _most_are_no_fewer(self) -> Self:
        if self.max_replicas < self.min_replicas:
            raise ValueError(f"max_replicas is {self.max_replicas}, but min_replicas {self.min_replicas}")
        return self


class IngressConfig(ScaledConfig):
    """The HTTP endpoint. Its replicas share all state but open connections."""

    num_cpus: float = Field(0.5, ge=0, description="CPUs reserved per replica")
    resources: Resources = {}
    cors_origins: tuple[str, ...] = Field((), description="origins whose pages may call, e.g. https://example.com")
    allowed_hosts: tuple[str, ...] = Field(
        (), description="names in public DNS to which a server without API keys answers, e.g. vision.example.com"
    )
    first_token_timeout_s: float = Field(300.0, gt=0, description="seconds until a request without a token is given up")
    away_timeout_s: float = Field(
        5.0, gt=0, description="seconds that requests wait for a stage that is down or has no replica"
    )


class SharedConfig(Settings):
    """The state that all ingress replicas share: both item caches, the names that clients gave to items, and uploaded
    files."""

    shards: int = Field(1, ge=1, description="processes among which it is divided; on a cluster about one per node")
    num_cpus: float = Field(0.25, ge=0, description="CPUs reserved per shard")
    resources: Resources = {}
    processor_cache_bytes: int = Field(512 * 2**20, ge=0, description="bytes of processed items kept, by all shards")
    embedding_cache_bytes: int = Field(512 * 2**20, ge=0, description="bytes of embeddings kept, by all shards")


class PreprocessConfig(ScaledConfig):
    """The CPU stage."""

    num_cpus: float = Field(1.0, ge=0, description="CPUs reserved per replica, and its threads")
    resources: Resources = {}
    image_backend: Literal["auto", "pil", "torchvision"] = Field(
        "auto", description="what resizes pictures; auto: torchvision, which is faster, where it is installed"
    )
    video_frames: int = Field(
        DEFAULT_VIDEO_FRAMES,
        ge=1,
        description="frames of a video at most where neither the request nor the model's processor names a number or a"
        " rate",
    )
    max_replicas: int = Field(2, ge=1, description="replicas under load")


class VisionPartConfig(Settings):
    """One part of the vision half: the tower or the projector."""

    dtype: Literal["auto", DtypeName] = Field("auto", description="auto: the application's")
    device: str = Field("auto", description="auto: a GPU where the stage has one, else the CPU")


class EncodeConfig(ScaledConfig):
    """The vision stage. Its replicas encode different items, also of one request. With `placement: inline`, the
    settings apply to the vision half inside Generate."""

    placement: Literal["separate", "inline", "auto"] = Field(
        "separate",
        description="where items are encoded: in replicas of Encode; in those of Generate (inline), for little traffic"
        " with pictures; or each item where requests wait the least for it (auto)",
    )
    min_replicas: int = Field(
        1, ge=0, description="replicas at rest; 0: the first picture after a rest waits for one to start"
    )
    num_cpus: float = Field(1.0, ge=0, description="CPUs reserved per replica, and its threads")
    num_gpus: float = Field(0.0, ge=0, description="GPUs per replica, may be a fraction; 0 runs on the CPU")
    resources: Resources = {}
    tower: VisionPartConfig = VisionPartConfig()
    projector: VisionPartConfig = VisionPartConfig()
    linear: Literal["auto", "plain", "packed", "int8"] = Field(
        "auto",
        description="linear layers of both. plain: transformers' own, equal to the bit; packed: laid out for the CPU,"
        " twice as fast, equal but for rounding; int8: weights of 8 bits; auto: packed on the CPU, else plain",
    )
    activation_bytes: int = Field(
        2 * 2**30, ge=1, description="bytes that encoding may take beside the weights; bounds batches and single items"
    )


class GenerateConfig(ScaledConfig):
    """The language stage."""

    tensor_parallel_size: int = Field(
        1, ge=1, description="ranks per replica that the model is divided among, each a process"
    )
    num_cpus: float = Field(1.0, ge=0, description="CPUs reserved per rank, and its threads")
    num_gpus: float = Field(
        0.0, ge=0, description="GPUs per rank, may be a fraction (of several ranks above 0.5: none shares one); 0: CPU"
    )
    resources: Resources = {}
    engine: EngineSettings = Field(EngineSettings(), description="the engine of each replica")
    adapters_folder: str | None = Field(
        None,
        description="folder on the replicas' nodes whose folders are LoRA adapters, as PEFT saves them, each a model by"
        " its folder's name; engine.max_loras of them are in memory at once; null: none",
    )

    @property
    def gpu_share(self) -> float:
        """Returns the part of a GPU's memory that a rank may use: its share, if replicas share a card."""
        return min(1.0, self.num_gpus) or 1.0

    @model_validator(mode="after")
    def _adapters_have_places(self) -> Self:
        if self.adapters_folder is not None and self.engine.max_loras == 0:
            raise ValueError("adapters_folder: no adapter can be loaded, for engine.max_loras is 0")
        if self.adapters_folder is None and self.engine.max_loras > 0:
            raise ValueError(f"engine.max_loras is {self.engine.max_loras}, but adapters_folder names no adapters")
        return self

    @model_validator(mode="after")
    def _quantization_suits_the_device(self) -> Self:
        if self.engine.quantization == "int8" and self.num_gpus:
            raise ValueError(f"engine.quantization: {NO_INT8_ON_GPU}")
        return self

    @model_validator(mode="after")
    def _ranks_have_places(self) -> "GenerateConfig":
        if self.tensor_parallel_size == 1:
            return self
        if self.engine.quantization is not None:
            raise ValueError("engine.quantization: weights divided among ranks cannot be quantized")
        if self.engine.max_loras > 0:
            raise ValueError("engine.max_loras: a model divided among ranks serves no adapters")
        if self.engine.async_scheduling:
            raise ValueError(f"engine.async_scheduling: {NO_ASYNC_WITH_RANKS}")
        if not self.num_cpus and not self.num_gpus:
            raise ValueError("ranks are placed by what they reserve: num_cpus or num_gpus must be above 0")
        if 0 < self.num_gpus <= 0.5:
            raise ValueError(f"two ranks cannot share a GPU: num_gpus ({self.num_gpus}) must be above 0.5, or 0")
        return self


class VisionPluginConfig(Settings):
    """A vision encoder for a text model without one. `encode.tower` and `encode.projector` set the device and precision
    of its two parts; `encode.linear: int8` selects 8 bits."""

    name: str | None = Field(
        None,
        description="the vision plug-in of a text model; auto: the one for the model's name; null: the model has a"
        " vision half",
    )
    folder: str | None = Field(
        None, description="folder of Python modules with further plug-ins, whose code is run; null: none is run"
    )
    add_all_images_to_prompt: bool = Field(
        True, description="whether a prompt gets all pictures of its conversation; else the last one alone"
    )
    options: dict[str, Any] = Field({}, description="what the plug-in itself takes, such as where its weights are")


class TracingConfig(Settings):
    """Traces of requests, sent to an OpenTelemetry collector."""

    endpoint: str | None = Field(
        None,
        description="collector that gets them by OTLP over gRPC, e.g. http://10.0.0.5:4317; null: the one that"
        " OTEL_EXPORTER_OTLP_ENDPOINT names on each node, or none",
    )
    sample_ratio: float | None = Field(
        None,
        ge=0,
        le=1,
        description="share of requests that are traced, of those whose client has not decided it (`traceparent`); null:"
        " as OTEL_TRACES_SAMPLER says, or 0.1",
    )


class UpdateConfig(Settings):
    """How replicas are replaced when settings change, and stopped when a stage scales down."""

    drain_seconds: float = Field(
        600.0, gt=0, description="how long a replica that stops goes on with the answers that it has begun"
    )
    max_surge_percent: int = Field(
        100,
        ge=0,
        le=100,
        description="replicas of a stage that an update may start before old ones stop, in % of all; they need room"
        " beside the old ones; 0: old ones stop first, and requests wait",
    )


class ScalingConfig(Settings):
    """Autoscaling. New replicas start about two seconds after they are needed."""

    target_load: float = Field(
        1.0,
        gt=0,
        description="load per replica that scaling aims at, as a multiple of the default; 0.5: twice as many replicas",
    )
    downscale_delay_s: float = Field(
        60.0, ge=0, description="seconds that a stage must need fewer replicas before one of them stops"
    )


class ModelConfig(Settings):
    """One model and its stages."""

    model: ModelSource
    revision: str | None = Field(None, description="revision of a hub id")
    served_model_name: str | None = Field(None, description="name in the API; default: the last part of `model`")
    dtype: Literal["auto", DtypeName] = Field(
        "auto", description="weights and activations; auto: float32 on the CPU, bfloat16 on a GPU"
    )
    max_model_len: int | None = Field(None, ge=1, description="tokens of prompt and answer; default: the model's")
    allow_longer_context: bool = Field(
        False, description="accept a max_model_len above the model's own, with worse answers; rotary models only"
    )
    num_threads: int | None = Field(
        None,
        ge=1,
        description="threads of Raylens' CPU kernels, in each process of Encode and Generate; a step that only decodes"
        " takes fewer where that is faster; null: one per core, at most 16",
    )
    step_timeout_s: float = Field(
        120.0, gt=0, description="seconds that a batch of Encode or a step of Generate takes before its replica is ill"
    )
    vision_plugin: VisionPluginConfig = VisionPluginConfig()
    preprocess: PreprocessConfig = PreprocessConfig()
    encode: EncodeConfig = EncodeConfig()
    generate: GenerateConfig = GenerateConfig()

    @model_validator(mode="after")
    def _encoders_are_alike(self) -> Self:
        if self.encode.placement == "auto" and bool(self.encode.num_gpus) != bool(self.generate.num_gpus):
            raise ValueError(
                "encode.placement: auto takes the same kind of device for both stages: encode.num_gpus is"
                f" {self.encode.num_gpus}, but generate.num_gpus {self.generate.num_gpus}"
            )
        return self

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.model.rstrip("/").rsplit("/", 1)[-1]

    def dtype_name(self, device: str) -> DtypeName:
        if self.dtype != "auto":
            return self.dtype
        return "float32" if device == "cpu" else "bfloat16"

    @property
    def generate_device(self) -> str:
        return "cuda" if self.generate.num_gpus else "cpu"

    @property
    def encoder_device(self) -> str:
        """Returns the device of the vision half; a part may override it."""
        if self.encode.placement == "inline":
            return self.generate_device
        return "cuda" if self.encode.num_gpus else "cpu"

    def part_device(self, part: VisionPartConfig) -> str:
        return self.encoder_device if part.device == "auto" else part.device

    def part_dtype_name(self, part: VisionPartConfig) -> DtypeName:
        return self.dtype_name(self.part_device(part)) if part.dtype == "auto" else part.dtype

    def part_bits(self, part: VisionPartConfig) -> int:
        """Returns the bits per weight of the part, for a vision plug-in."""
        if self.encode.linear == "int8":
            return 8
        return 32 if self.part_dtype_name(part) == "float32" else 16

    @property
    def num_stage_cpus(self) -> float:
        """Returns the CPUs reserved by the model's stages at their maximum scale."""
        encode = 0.0 if self.encode.placement == "inline" else self.encode.max_replicas * self.encode.num_cpus
        return (
            self.preprocess.max_replicas * self.preprocess.num_cpus
            + encode
            + self.generate.max_replicas * self.generate.tensor_parallel_size * self.generate.num_cpus
        )


class AppConfig(ModelConfig):
    """One endpoint, its model, and further models behind it."""

    model: ModelSource = "checkpoints/shapes"
    further_models: tuple[ModelConfig, ...] = Field(
        (), description="models behind the same endpoint, each with stages of its own"
    )
    media: MediaConfig = MediaConfig()
    auth: AuthConfig = AuthConfig()
    admission: AdmissionConfig = AdmissionConfig()
    uploads: UploadConfig = UploadConfig()
    tracing: TracingConfig = TracingConfig()
    metrics: MetricsConfig = MetricsConfig()
    updates: UpdateConfig = UpdateConfig()
    scaling: ScalingConfig = ScalingConfig()
    ingress: IngressConfig = IngressConfig()
    shared: SharedConfig = SharedConfig()

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        self.check_names()
        return self

    def check_names(self) -> None:
        """Raises ValueError if two models have the same name."""
        names = [model.model_name for model in self.models]
        if doubled := [name for number, name in enumerate(names) if name in names[:number]]:
            raise ValueError(f"two models have the name {doubled[0]!r}: give one another served_model_name")

    @property
    def models(self) -> tuple[ModelConfig, ...]:
        """Returns all models. The first one answers requests without a model name."""
        return self, *self.further_models

    def of(self, model: ModelConfig) -> "AppConfig":
        """Returns the settings for the stages of `model`: its own and the endpoint's, as if it were the only model."""
        own = {name: getattr(model, name) for name in ModelConfig.model_fields}
        return self.model_copy(update={**own, "further_models": ()})

    def by_suffix(self) -> "dict[str, AppConfig]":
        """Returns each model's settings by the suffix of its deployments' names: empty for the first model, so its
        stages are called Generate and so on, and `-NAME` for a further one.

        Ray Serve forbids `#` in names, and its log files forbid `/`. Such characters become %23 and the like. Long
        names end in a hash, so suffixes stay unique."""
        return {"": self.of(self), **{_suffix(model.model_name): self.of(model) for model in self.further_models}}

    @property
    def num_reserved_cpus(self) -> float:
        """Returns the CPUs reserved by all replicas at their maximum scale."""
        return (
            self.ingress.max_replicas * self.ingress.num_cpus
            + self.shared.shards * self.shared.num_cpus
            + sum(model.num_stage_cpus for model in self.models)
        )


def _suffix(name: str) -> str:
    quoted = quote(name, safe="")
    if len(quoted) > _MOST_SUFFIX_CHARS:
        quoted = f"{quoted[:_MOST_SUFFIX_CHARS]}+{sha256(name.encode()).hexdigest()[:16]}"  # quoted names contain no +
    return f"-{quoted}"
