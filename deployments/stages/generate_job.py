"""A call of Generate, but for its prompt."""

from dataclasses import dataclass

from raylens.deployments.request_context import RequestContext
from raylens.deployments.stages.hand_over import ItemEmbeddings
from raylens.deployments.wire.piece_connection import PieceAddress
from raylens.llm.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class GenerateJob:
    """One object, because Ray serializes each argument of a call for itself. The prompt is an argument of its own: Ray
    waits for a pending one.

    `items`: references to the embeddings of the request's items, in its order. `address`: destination of the answers.
    Jobs of different `cache_salt` share no prefix. Jobs of a lower `priority` run first. `adapter`: a LoRA's name."""

    request_id: str
    params: SamplingParams
    items: list[ItemEmbeddings]
    address: PieceAddress
    context: RequestContext
    cache_salt: str
    priority: int
    adapter: str | None = None
