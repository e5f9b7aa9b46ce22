"""`/v1/batches`: files of requests that the server answers below live traffic."""

from typing import Literal, get_args

from pydantic import BaseModel, Field

from raylens.deployments.api.wire import Metadata, Name, RequestBody, WireModel

BatchPath = Literal[
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/score",
    "/classify",
]
PATHS: tuple[str, ...] = get_args(BatchPath)
"""The routes that the requests of a batch may name. Each takes a JSON body and answers with one."""


class OutputExpiry(WireModel):
    """`seconds`: from the end of the batch. The server's settings bound it."""

    anchor: Literal["created_at"] = "created_at"
    seconds: int = Field(ge=1)


class BatchRequestBody(RequestBody):
    """`input_file_id`: of a file that was uploaded with the purpose `batch`."""

    input_file_id: Name
    endpoint: BatchPath = Field(description="the url of every request in the file")
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: OutputExpiry | None = None


class BatchError(BaseModel):
    """What is wrong with a line of the file. `line`: from 1; null for the whole file."""

    code: str
    line: int | None
    message: str
    param: str | None


class BatchErrors(BaseModel):
    object: Literal["list"] = "list"
    data: list[BatchError]


class RequestCounts(BaseModel):
    """`completed` and `failed` have an answer, `failed` one with an error."""

    total: int
    completed: int
    failed: int


class Batch(BaseModel):
    """OpenAI's object. Times are in seconds since 1970. The ids of the files of answers are there at the end."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: Literal["24h"] = "24h"
    status: Literal[
        "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
    ]
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts
    metadata: dict[str, str] | None = None


class BatchList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool
