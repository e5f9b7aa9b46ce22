"""A call of Generate."""

from dataclasses import dataclass

from raylens.deployments.ray_internals.references import PackedReference
from raylens.deployments.request_context import RequestContext
from raylens.deployments.stages.hand_over import ItemEmbeddings
from raylens.deployments.wire.piece_connection import PieceAddress
from raylens.deployments.wire.stage_messages import UnrenderedPrompt
from raylens.llm.sampling.params import SamplingParams
from raylens.preprocess.schema import ProcessedPrompt


@dataclass(frozen=True, slots=True)
class GenerateJob:
    """`prompt`: Generate renders an unrendered one. A reference is to a prompt that Preprocess renders meanwhile.
    `items`: references to the embeddings of the request's items, in its order. `address`: destination of the answers.
    Jobs of different `cache_salt` (the tenant) or `prompt_salt` share no prefix. Jobs of a lower `priority` run first.
    `adapter`: a LoRA's name. `pools`: the answer is the prompt's embeddings or scores."""

    request_id: str
    prompt: UnrenderedPrompt | ProcessedPrompt | PackedReference
    params: SamplingParams
    items: list[ItemEmbeddings]
    address: PieceAddress
    context: RequestContext
    cache_salt: str
    prompt_salt: str
    priority: int
    adapter: str | None = None
    pools: bool = False
