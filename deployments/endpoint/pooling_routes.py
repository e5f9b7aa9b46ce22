"""The routes that embed, rank, score and classify: `/v1/embeddings`, `/v1/rerank`, `/v1/score` and `/classify`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import pybase64
from fastapi import FastAPI
from fastapi.responses import Response
from pydantic import BaseModel

from raylens.deployments.api import pooling as api_types
from raylens.deployments.api.prompt_fields import PromptAndMedia
from raylens.deployments.endpoint import pooled_answer
from raylens.deployments.endpoint.accounting import RequestAccount
from raylens.deployments.endpoint.call import HttpCall
from raylens.deployments.endpoint.errors import ERROR_RESPONSES
from raylens.deployments.endpoint.generation import Generation, Generations
from raylens.deployments.endpoint.pooled_answer import PooledAnswer, Rows
from raylens.llm.sampling.params import SamplingParams
from raylens.modeling.pooling import Pooling
from raylens.preprocess.schema import InvalidRequestError

_EMBED, _RANK, _SCORE, _CLASSIFY = "/v1/embeddings", "/v1/rerank", "/v1/score", "/classify"

Form = Callable[[Sequence[Rows]], BaseModel]
"""Makes an API's answer of each prompt's vectors or scores."""


@dataclass(frozen=True, slots=True)
class PoolingRoutes:
    generations: Generations

    def add_to(self, api: FastAPI) -> None:
        post = partial(api.add_api_route, methods=["POST"], responses=ERROR_RESPONSES)
        post(_EMBED, self.embeddings, response_model=api_types.Embeddings)
        post(_RANK, self.rerank, response_model=api_types.Ranking)
        post(_SCORE, self.score, response_model=api_types.Scores)
        post(_CLASSIFY, self.classify, response_model=api_types.Classifications)
        # The same under Cohere's path, and under vLLM's.
        post("/v2/rerank", self.rerank, response_model=api_types.Ranking, include_in_schema=False)
        post("/rerank", self.rerank, response_model=api_types.Ranking, include_in_schema=False)
        post("/score", self.score, response_model=api_types.Scores, include_in_schema=False)

    async def embeddings(self, body: api_types.EmbeddingsRequest, call: HttpCall) -> Response:
        """Returns a vector for each text or picture, or one for each of its tokens, as the model does."""
        async with self.generations.begin(body, call, "embd-") as generation:
            pooling = _pooling_of(generation, _EMBED)
            if body.normalize and not pooling.normalizes:
                raise InvalidRequestError("this model's vectors keep their length", field="normalize")
            form = partial(_embeddings, body, generation.account, pooling)
            return await _respond(generation, body.prompts_and_media(), form)

    async def rerank(self, body: api_types.RerankRequest, call: HttpCall) -> Response:
        """Returns documents, texts or pictures, by their relevance for a query. A model of embeddings ranks them by
        their similarity with it."""
        async with self.generations.begin(body, call, "rerank-") as generation:
            prompts, scores_of = _scoring(generation, body, _RANK)
            form = partial(_ranking, body, generation.account, scores_of)
            return await _respond(generation, prompts, form)

    async def score(self, body: api_types.ScoreRequest, call: HttpCall) -> Response:
        """Returns the relevance of each document for its query, or for the one query."""
        async with self.generations.begin(body, call, "score-") as generation:
            prompts, scores_of = _scoring(generation, body, _SCORE)
            form = partial(_scores, generation.account, scores_of)
            return await _respond(generation, prompts, form)

    async def classify(self, body: api_types.ClassifyRequest, call: HttpCall) -> Response:
        """Returns the class of each text or picture, and the probabilities of all classes."""
        async with self.generations.begin(body, call, "classify-") as generation:
            pooling = _pooling_of(generation, _CLASSIFY)
            form = partial(_classifications, generation.account, pooling.labels)
            return await _respond(generation, body.prompts_and_media(), form)


def _pooling_of(generation: Generation, path: str) -> Pooling:
    """Returns the model's pooling. Raises InvalidRequestError if it is not what this route answers with."""
    pooling = generation.model.pooling
    if pooling is None:
        reason = "this model writes text only; the setting `pooling` lets it embed or score"
        raise InvalidRequestError(reason, field="model")
    routes = [_EMBED, _RANK, _SCORE] if pooling.embeds else []
    routes += [_RANK, _SCORE] if pooling.scores_pairs else []
    routes += [_CLASSIFY] if pooling.labels else []
    if path not in routes:
        raise InvalidRequestError(f"this model answers {', '.join(routes)}, not {path}", field="model")
    return pooling


def _scoring(
    generation: Generation, body: api_types.RelevanceFields, path: str
) -> tuple[list[PromptAndMedia], Callable[[Sequence[Rows]], list[float]]]:
    """Returns the prompts to pool, and what makes the relevance of each document of their results."""
    if _pooling_of(generation, path).scores_pairs:
        if body.truncate_prompt_tokens is not None:
            reason = "this model reads query and document together, so a cut would remove the query"
            raise InvalidRequestError(reason, field="truncate_prompt_tokens")
        return body.pairs(), lambda rows: [*map(pooled_answer.probability, rows)]

    def compared(rows: Sequence[Rows]) -> list[float]:
        num_queries = len(body.query_contents)
        queries, documents = rows[:num_queries], rows[num_queries:]
        queries = [*queries] * (len(documents) if len(queries) == 1 else 1)
        return [*map(pooled_answer.similarity, queries, documents)]

    return body.singles(), compared


async def _respond(generation: Generation, prompts: Sequence[PromptAndMedia], form: Form) -> Response:
    await generation.enter(SamplingParams(max_tokens=0), prompts, pools=True)
    whole = await generation.complete(lambda: PooledAnswer(form))
    generation.account.finish()
    return Response(whole.model_dump_json(), media_type="application/json")


def _embeddings(
    body: api_types.EmbeddingsRequest, account: RequestAccount, pooling: Pooling, rows: Sequence[Rows]
) -> BaseModel:
    if body.dimensions is not None:
        size = rows[0].shape[1]
        if body.dimensions > size:
            reason = f"{body.dimensions}, and the vectors of this model have {size}"
            raise InvalidRequestError(reason, field="dimensions")
        shorten = partial(pooled_answer.shortened, dimensions=body.dimensions, normalizes=pooling.normalizes)
        rows = [*map(shorten, rows)]
    has_many = pooling.rows == "all"
    data = [
        api_types.Embedding(
            index=index, embedding=_encoded(body, one, has_many), shape=[*one.shape] if has_many else None
        )
        for index, one in enumerate(rows)
    ]
    return api_types.Embeddings(
        id=account.request_id, created=account.created, model=account.model, data=data, usage=_usage(account)
    )


def _encoded(body: api_types.EmbeddingsRequest, rows: Rows, has_many: bool) -> list[float] | list[list[float]] | str:
    if body.encoding_format == "base64":
        return pybase64.b64encode(rows.astype("<f4").tobytes()).decode()
    numbers: list[list[float]] = rows.tolist()
    return numbers if has_many else numbers[0]


def _ranking(
    body: api_types.RerankRequest,
    account: RequestAccount,
    scores_of: Callable[[Sequence[Rows]], list[float]],
    rows: Sequence[Rows],
) -> BaseModel:
    scores, contents = scores_of(rows), body.contents
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    results = [
        api_types.RankedResult(index=index, relevance_score=scores[index], document=_told(body, contents[index]))
        for index in order[: body.top_n or len(order)]
    ]
    return api_types.Ranking(id=account.request_id, model=account.model, results=results, usage=_usage(account))


def _told(body: api_types.RerankRequest, content: api_types.Content) -> api_types.RankedDocument | None:
    text = api_types.document_text(content) if body.return_documents else None
    return None if text is None else api_types.RankedDocument(text=text)


def _scores(
    account: RequestAccount, scores_of: Callable[[Sequence[Rows]], list[float]], rows: Sequence[Rows]
) -> BaseModel:
    data = [api_types.Score(index=index, score=score) for index, score in enumerate(scores_of(rows))]
    return api_types.Scores(
        id=account.request_id, created=account.created, model=account.model, data=data, usage=_usage(account)
    )


def _classifications(account: RequestAccount, labels: Sequence[str], rows: Sequence[Rows]) -> BaseModel:
    data = []
    for index, logits in enumerate(rows):
        probs = pooled_answer.probabilities(logits)
        label = labels[max(range(len(probs)), key=probs.__getitem__)]
        data.append(api_types.Classification(index=index, label=label, probs=probs, num_classes=len(probs)))
    return api_types.Classifications(
        id=account.request_id, created=account.created, model=account.model, data=data, usage=_usage(account)
    )


def _usage(account: RequestAccount) -> api_types.PooledUsage:
    number = account.usage.prompt_tokens
    return api_types.PooledUsage(prompt_tokens=number, total_tokens=number)
