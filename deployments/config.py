"""The settings of one application, the `args` in `serve.yaml`: every field typed and with its unit."""

from collections.abc import Iterable
from hashlib import sha256
from typing import Annotated, Any, Literal, Self, TypeAlias
from urllib.parse import quote

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from raylens.llm.config import NO_ASYNC_WITH_RANKS, NO_QUANTIZATION_ON_GPU, DtypeName, EngineSettings
from raylens.preprocess import thought_formats as thoughts
from raylens.preprocess.media import DEFAULT_VIDEO_FRAMES, MediaLimits
from raylens.preprocess.media_fetch import FetchPolicy
from raylens.preprocess.tool_calls import formats as tool_calls


class Settings(BaseModel):
    """A group of settings. A misspelt field is an error, so it never falls back to its default."""

    model_config = ConfigDict(extra="forbid", frozen=True)


Resources = Annotated[
    dict[str, Annotated[float, Field(ge=0)]],
    Field(description="Ray's custom resources, reserved per replica; they select its nodes, e.g. {cpu_node: 1}"),
]
ModelSource = Annotated[str, Field(description="folder or hub id of the checkpoint")]
_MOST_SUFFIX_CHARS = 100
"""A replica's log file is named after its deployment, and file systems limit names to 255 bytes."""


class MediaConfig(Settings):
    """The media of one request, and the sources that the server may fetch or read."""

    limits: MediaLimits = Field(MediaLimits(), description="what one request may bring")
    fetch: FetchPolicy = Field(FetchPolicy(), description="which http(s) URLs the server fetches")
    local_root: str | None = Field(None, description="folder on the ingress's node for `file:` URLs; null: none")


class AuthConfig(Settings):
    """API keys. Without a file and without RAYLENS_API_KEYS in the environment, everybody may call."""

    keys_file: str | None = Field(None, description="YAML file of API keys' hashes, made with `raylens key`")


class Budget(Settings):
    """Limits of all concurrent requests together."""

    requests: int = Field(ge=1, description="in work")
    bytes: int = Field(ge=1, description="of bodies and fetched media, waiting requests included")
    pixels: int = Field(ge=1, description="of pictures, by their headers; an estimate for videos and sounds")
    tokens: int = Field(ge=1, description="characters / 4 + answers x max_tokens (or 1024), 1/4 more per top logprob")


class AdmissionConfig(Settings):
    """Limits of concurrent requests. Each running ingress replica admits an equal share of both budgets. Excess
    requests wait for room; after `max_queue_seconds` they are refused with 429 and Retry-After."""

    total: Budget = Field(Budget(requests=256, bytes=2**30, pixels=2**31, tokens=2**22), description="of all requests")
    per_key: Budget = Field(
        Budget(requests=64, bytes=2**28, pixels=2**29, tokens=2**20), description="of the requests of one API key"
    )
    max_queued_requests: int = Field(256, ge=0, description="requests that wait for room")
    max_queued_requests_per_key: int = Field(64, ge=0, description="of these with one API key")
    max_queue_seconds: float = Field(30.0, gt=0, description="longest wait for room, in seconds")
    max_body_bytes: int = Field(96 * 2**20, ge=1, description="bytes of one request's body")
    body_timeout_s: float = Field(60.0, gt=0, description="seconds in which a client must send the body")

    @field_validator("total", "per_key", mode="before")
    @classmethod
    def _other_fields_keep_their_defaults(cls, given: Any, info: ValidationInfo) -> Any:
        """Fills in a budget's missing fields. The two budgets have different defaults, so their class has none."""
        default: Budget = cls.model_fields[info.field_name or ""].default
        return default.model_dump() | given if isinstance(given, dict) else given


class KeptFilesConfig(Settings):
    """What the server keeps on disk for clients."""

    folder: str | None = Field(None, description="on a file system of all nodes; null: one node's disk, until shutdown")
    max_bytes: int = Field(2**30, ge=0, description="bytes of all together")
    max_age_s: float = Field(86400.0, gt=0, description="seconds until each is deleted")


class UploadConfig(KeptFilesConfig):
    """Files that clients upload once and name in later requests (`/v1/files`), and batches with their answers."""


class ResponsesConfig(KeptFilesConfig):
    """Answers of `/v1/responses`, with their input, from which later requests go on. If there is no room, the oldest
    ones make it. With `max_bytes` 0 the server keeps none."""


class MetricsConfig(Settings):
    """The application's metrics for Prometheus. The endpoint's `/metrics` covers all nodes."""

    port: int = Field(8081, ge=0, le=65535, description="metrics port of every node; 0: any free port, one node only")
    slo_time_to_first_token_s: float = Field(2.5, gt=0, description="promised seconds to the first token")
    slo_time_per_output_token_s: float = Field(0.1, gt=0, description="promised mean seconds between tokens")


class ScaledConfig(Settings):
    """A deployment that Ray Serve scales by its work, see `deployments/routing/work_scaling.py`."""

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
    allowed_hosts: tuple[str, ...] = Field((), description="public DNS names of a server without API keys")
    first_token_timeout_s: float = Field(300.0, gt=0, description="seconds after which a request without a token fails")
    away_timeout_s: float = Field(5.0, gt=0, description="seconds that requests wait for a stage that is down")


class SharedConfig(Settings):
    """The state that all ingress replicas share: both item caches, clients' names of items, and uploaded files."""

    shards: int = Field(1, ge=1, description="processes that divide the state; on a cluster about one per node")
    num_cpus: float = Field(0.25, ge=0, description="CPUs reserved per shard")
    resources: Resources = {}
    processor_cache_bytes: int = Field(512 * 2**20, ge=0, description="bytes of processed items kept, by all shards")
    embedding_cache_bytes: int = Field(512 * 2**20, ge=0, description="bytes of embeddings kept, by all shards")


class PreprocessConfig(ScaledConfig):
    """The CPU stage."""

    max_replicas: int = Field(2, ge=1, description="replicas under load")
    num_cpus: float = Field(1.0, ge=0, description="CPUs reserved per replica, and its threads")
    resources: Resources = {}
    image_backend: Literal["auto", "pil", "torchvision"] = Field("auto", description="auto: torchvision if installed")
    video_frames: int = Field(DEFAULT_VIDEO_FRAMES, ge=1, description="most frames of a video by default")


def _one_of(names: Iterable[str]) -> AfterValidator:
    known = [*names]

    def check(name: str) -> str:
        if name not in known:
            raise ValueError(f"must be one of {', '.join(known)}, got {name[:100]!r}")
        return name

    return AfterValidator(check)


_ToolCallFormat = Annotated[str, _one_of(form.name for form in tool_calls.FORMATS)]
_ThoughtFormat = Annotated[str, _one_of(thoughts.FORMATS)]


class ChatConfig(Settings):
    """How conversations become prompts, and how thoughts and tool calls are found in answers."""

    template: str | None = Field(None, description="file of a Jinja chat template; null: the model's")
    tool_call_parser: _ToolCallFormat | None = Field(None, description="format of tool calls; null: the template's")
    reasoning_parser: _ThoughtFormat | None = Field(None, description="tags of thoughts; null: the template's")
    trust_request_template: bool = Field(False, description="whether requests may bring a chat_template, as in vLLM")


_Answer = Annotated[
    str, BeforeValidator(lambda value: {False: "no", True: "yes"}[value] if isinstance(value, bool) else value)
]
"""A token. YAML reads `no` and `yes` as false and true."""


class PoolingConfig(Settings):
    """What `/v1/embeddings`, `/v1/rerank`, `/v1/score` and `/classify` answer with, for a checkpoint whose files do not
    tell."""

    type: Literal["last", "mean"] | None = Field(None, description="embed by the last token or the mean; null: its own")
    normalize: bool = Field(True, description="with type: embeddings get the length 1")
    score_tokens: tuple[_Answer, _Answer] | None = Field(
        None, description="a reranker's answers, e.g. [no, yes]; null: its own"
    )

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Self:
        if self.type is not None and self.score_tokens is not None:
            raise ValueError("type and score_tokens cannot both be set: a model embeds or scores")
        return self


class VisionPartConfig(Settings):
    """One part of the vision half: the tower or the projector."""

    dtype: Literal["auto", DtypeName] = Field("auto", description="auto: the application's")
    device: str = Field("auto", description="auto: the stage's GPU if it has one, else the CPU")


class EncodeConfig(ScaledConfig):
    """The vision stage. With `placement: inline`, the settings apply to the vision half inside Generate."""

    placement: Literal["separate", "inline", "auto"] = Field(
        "separate",
        description="replicas that encode: Encode's; inline: Generate's, for few pictures; auto: the sooner ones",
    )
    min_replicas: int = Field(1, ge=0, description="replicas at rest; 0: the first picture after a rest starts one")
    num_cpus: float = Field(1.0, ge=0, description="CPUs reserved per replica, and its threads")
    num_gpus: float = Field(0.0, ge=0, description="GPUs per replica, may be a fraction; 0: CPU")
    resources: Resources = {}
    tower: VisionPartConfig = VisionPartConfig()
    projector: VisionPartConfig = VisionPartConfig()
    linear: Literal["auto", "plain", "packed", "int8"] = Field(
        "auto", description="plain: bit-identical to transformers; packed: twice as fast on the CPU; int8: 8 bits"
    )
    activation_bytes: int = Field(2 * 2**30, ge=1, description="encoder memory beside weights, bounds batches")


class GenerateConfig(ScaledConfig):
    """The language stage."""

    tensor_parallel_size: int = Field(1, ge=1, description="ranks (processes) that divide each replica's model")
    num_cpus: float = Field(1.0, ge=0, description="CPUs reserved per rank, and its threads")
    num_gpus: float = Field(0.0, ge=0, description="GPUs per rank, may be a fraction (of several ranks above 0.5)")
    resources: Resources = {}
    engine: EngineSettings = Field(EngineSettings(), description="the engine of each replica")
    adapters_folder: str | None = Field(None, description="folder with a subfolder per LoRA adapter; null: none")

    @property
    def gpu_share(self) -> float:
        """Returns the share of a GPU's memory that a rank may use."""
        return min(1.0, self.num_gpus) or 1.0

    @model_validator(mode="after")
    def _settings_agree(self) -> Self:
        engine, ranks = self.engine, self.tensor_parallel_size > 1
        has_adapters = self.adapters_folder is not None
        conflicts = {
            "adapters_folder: no adapter can be loaded: engine.max_loras is 0": has_adapters and not engine.max_loras,
            "engine.max_loras is above 0, but adapters_folder is null": engine.max_loras and not has_adapters,
            f"engine.quantization: {NO_QUANTIZATION_ON_GPU}": engine.quantization and self.num_gpus,
            "engine.quantization: weights divided among ranks cannot be quantized": ranks and engine.quantization,
            "engine.max_loras: a model divided among ranks serves no adapters": ranks and engine.max_loras,
            f"engine.async_scheduling: {NO_ASYNC_WITH_RANKS}": ranks and engine.async_scheduling,
            "num_cpus and num_gpus are 0, but ranks need a reservation": ranks and not self.num_cpus + self.num_gpus,
            "num_gpus must be 0 or above 0.5: two ranks cannot share a GPU": ranks and 0 < self.num_gpus <= 0.5,
        }
        for message, is_wrong in conflicts.items():
            if is_wrong:
                raise ValueError(message)
        return self


StageConfig: TypeAlias = PreprocessConfig | EncodeConfig | GenerateConfig
ProcessConfig: TypeAlias = IngressConfig | SharedConfig | StageConfig


class VisionPluginConfig(Settings):
    """A vision encoder for a text model. `encode.tower` and `encode.projector` set its parts' device and precision."""

    name: str | None = Field(None, description="plug-in; auto: by the model's name; null: the model has a vision half")
    folder: str | None = Field(None, description="folder of plug-in modules, whose code is run; null: none")
    add_all_images_to_prompt: bool = Field(True, description="all pictures of a conversation; false: the last one only")
    options: dict[str, Any] = Field({}, description="the plug-in's own options, such as the path of its weights")


class TracingConfig(Settings):
    """Traces of requests, sent to an OpenTelemetry collector."""

    endpoint: str | None = Field(
        None, description="OTLP collector (gRPC), e.g. http://10.0.0.5:4317; null: OTEL_EXPORTER_OTLP_ENDPOINT"
    )
    sample_ratio: float | None = Field(None, ge=0, le=1, description="traced share; null: OTEL_TRACES_SAMPLER, or 0.1")


class UpdateConfig(Settings):
    """How replicas are replaced when settings change, and stopped when a stage scales down."""

    drain_seconds: float = Field(600.0, gt=0, description="seconds in which a stopping replica finishes its answers")
    max_surge_percent: int = Field(
        100, ge=0, le=100, description="% of a stage's replicas that start before old ones stop; 0: requests wait"
    )


class ScalingConfig(Settings):
    """Autoscaling. New replicas start about two seconds after they are needed."""

    target_load: float = Field(1.0, gt=0, description="target load per replica; 0.5: twice as many replicas")
    downscale_delay_s: float = Field(60.0, ge=0, description="seconds of excess before a stage stops a replica")


class ModelConfig(Settings):
    """One model and its stages."""

    model: ModelSource
    revision: str | None = Field(None, description="revision of a hub id")
    served_model_name: str | None = Field(None, description="name in the API; default: the last part of `model`")
    dtype: Literal["auto", DtypeName] = Field(
        "auto", description="auto: bfloat16 on a GPU; on the CPU float32, or with AMX the file's own"
    )
    max_model_len: int | None = Field(None, ge=1, description="tokens of prompt and answer; default: the model's")
    allow_longer_context: bool = Field(False, description="max_model_len above the model's; rotary models only")
    num_threads: int | None = Field(None, ge=1, description="of CPU kernels per process; null: all cores, up to 16")
    step_timeout_s: float = Field(120.0, gt=0, description="longest batch of Encode or step of Generate, in seconds")
    vision_plugin: VisionPluginConfig = VisionPluginConfig()
    chat: ChatConfig = ChatConfig()
    pooling: PoolingConfig = PoolingConfig()
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

    @model_validator(mode="after")
    def _packed_layers_are_on_the_cpu(self) -> Self:
        devices = {self.part_device(self.encode.tower), self.part_device(self.encode.projector)}
        is_packed = self.encode.linear in ("packed", "int8") and self.vision_plugin.name is None
        if is_packed and devices != {"cpu"}:
            raise ValueError(f"encode.linear: {self.encode.linear} is for the CPU only, and Encode is on a GPU")
        return self

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.model.rstrip("/").rsplit("/", 1)[-1]

    def dtype_name(self, device: str) -> DtypeName:
        if self.dtype != "auto":
            return self.dtype
        return "float32" if device == "cpu" else "bfloat16"

    def is_exact(self, part_dtype: str = "auto") -> bool:
        """Returns whether float32 means float32; otherwise AMX may compute in the dtype of the model's file."""
        return (self.dtype if part_dtype == "auto" else part_dtype) == "float32"

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
        num_encoders = 0 if self.encode.placement == "inline" else self.encode.max_replicas
        num_ranks = self.generate.max_replicas * self.generate.tensor_parallel_size
        preprocess = self.preprocess.max_replicas * self.preprocess.num_cpus
        return preprocess + num_encoders * self.encode.num_cpus + num_ranks * self.generate.num_cpus


class AppConfig(ModelConfig):
    """One endpoint, its model, and further models behind it."""

    model: ModelSource = "checkpoints/shapes"
    further_models: tuple[ModelConfig, ...] = Field((), description="models behind the same endpoint with own stages")
    media: MediaConfig = MediaConfig()
    auth: AuthConfig = AuthConfig()
    admission: AdmissionConfig = AdmissionConfig()
    uploads: UploadConfig = UploadConfig()
    responses: ResponsesConfig = ResponsesConfig()
    tracing: TracingConfig = TracingConfig()
    metrics: MetricsConfig = MetricsConfig()
    updates: UpdateConfig = UpdateConfig()
    scaling: ScalingConfig = ScalingConfig()
    ingress: IngressConfig = IngressConfig()
    shared: SharedConfig = SharedConfig()

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        return self.with_own_names()

    def with_own_names(self) -> Self:
        """Returns the settings. Raises ValueError if two models have the same name."""
        names = [model.model_name for model in self.models]
        if doubled := [name for number, name in enumerate(names) if name in names[:number]]:
            raise ValueError(f"two models have the name {doubled[0]!r}: give one another served_model_name")
        return self

    @property
    def models(self) -> tuple[ModelConfig, ...]:
        """Returns all models. The first one answers requests without a model name."""
        return self, *self.further_models

    def of(self, model: ModelConfig) -> "AppConfig":
        """Returns the settings for the stages of `model`: its own and the endpoint's, as if it were the only model."""
        own = {name: getattr(model, name) for name in ModelConfig.model_fields}
        return self.model_copy(update={**own, "further_models": ()})

    def by_suffix(self) -> "dict[str, AppConfig]":
        """Returns each model's settings by the suffix of its deployments' names: empty for the first model, else
        `-NAME`. `#`, which Ray Serve forbids, and `/`, which its log files forbid, become %23 and %2F. Long names end
        in a hash."""
        return {"": self.of(self), **{_suffix(model.model_name): self.of(model) for model in self.further_models}}

    @property
    def num_reserved_cpus(self) -> float:
        """Returns the CPUs reserved by all replicas at their maximum scale."""
        endpoint = self.ingress.max_replicas * self.ingress.num_cpus + self.shared.shards * self.shared.num_cpus
        return endpoint + sum(model.num_stage_cpus for model in self.models)


def _suffix(name: str) -> str:
    quoted = quote(name, safe="")
    if len(quoted) > _MOST_SUFFIX_CHARS:
        quoted = f"{quoted[:_MOST_SUFFIX_CHARS]}+{sha256(name.encode()).hexdigest()[:16]}"  # quoted names contain no +
    return f"-{quoted}"
