"""`openai` and `langchain-openai`: embeddings, which both get in base64."""

from features import KEY, MODEL, QUESTION, THINK, URL, is_equal, report
from langchain_openai import OpenAIEmbeddings
from openai import OpenAI

openai = OpenAI(base_url=f"{URL}/v1", api_key=KEY)
# Else it sends the ids of OpenAI's own tokens.
langchain = OpenAIEmbeddings(base_url=f"{URL}/v1", api_key=KEY, model=MODEL, check_embedding_ctx_length=False)
TEXTS = [QUESTION, THINK]


def vectors_of(texts):
    return [one.embedding for one in openai.embeddings.create(model=MODEL, input=texts).data]


def embeddings():
    first, second = vectors_of(TEXTS)
    is_equal(round(sum(one * one for one in first), 4), 1.0)
    assert first != second
    plain = openai.embeddings.create(model=MODEL, input=QUESTION, encoding_format="float").data[0].embedding
    is_equal([round(one, 4) for one in plain], [round(one, 4) for one in first])


def embeddings_by_langchain():
    is_equal(
        [[round(one, 4) for one in vector] for vector in langchain.embed_documents(TEXTS)],
        [[round(one, 4) for one in vector] for vector in vectors_of(TEXTS)],
    )


report(embeddings, embeddings_by_langchain)
