"""`cohere`: documents by their relevance for a query."""

import cohere
from features import KEY, MODEL, QUESTION, THINK, URL, is_equal, report

client = cohere.ClientV2(api_key=KEY, base_url=URL)


def rerank():
    answer = client.rerank(model=MODEL, query=QUESTION, documents=[THINK, QUESTION, "red"], top_n=2)
    is_equal(len(answer.results), 2)
    is_equal((answer.results[0].index, round(answer.results[0].relevance_score, 4)), (1, 1.0))


report(rerank)
