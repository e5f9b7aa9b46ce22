"""Documents in prompts are replaced by their pages, wherever they stand."""

from raylens.deployments.pipeline.documents import with_pages
from raylens.deployments.pipeline.media_source import MediaSource
from raylens.preprocess.data_url import data_url
from raylens.preprocess.schema import ChatPrompt, PooledPrompt

IMAGE, DOCUMENT = {"type": "image"}, {"type": "document"}
TEXT = {"type": "text", "text": "What?"}


async def pages_of(source: MediaSource) -> list[bytes]:
    return [f"{source.field} {number}".encode() for number in range(int(source.field[-1]))]


def document(num_pages: int) -> MediaSource:
    return MediaSource("data:,", f"pages{num_pages}", "document", uuid="mine")


def page(num_pages: int, number: int) -> MediaSource:
    return MediaSource(data_url(f"pages{num_pages} {number}".encode()), f"pages{num_pages}", "image")


async def test_pages_come_in_the_place_of_each_document() -> None:
    picture = MediaSource("data:,picture", "a picture", uuid="another")
    prompt = ChatPrompt(
        [
            {"role": "system", "content": "plain"},
            {"role": "user", "content": [DOCUMENT, TEXT, IMAGE]},
            {"role": "assistant", "tool_calls": []},
            {"role": "user", "content": [DOCUMENT, DOCUMENT, TEXT]},
        ]
    )
    opened, media = await with_pages(prompt, [document(2), picture, document(0), document(1)], pages_of)
    assert isinstance(opened, ChatPrompt)
    assert [message.get("content") for message in opened.messages] == [
        "plain",
        [IMAGE, IMAGE, TEXT, IMAGE],
        None,
        [IMAGE, TEXT],
    ]
    assert media == [page(2, 0), page(2, 1), picture, page(1, 0)]


async def test_pages_of_a_query_come_before_those_of_its_document() -> None:
    opened, media = await with_pages(PooledPrompt([DOCUMENT], [TEXT, DOCUMENT]), [document(1), document(2)], pages_of)
    assert opened == PooledPrompt([IMAGE, IMAGE], [TEXT, IMAGE])
    assert media == [page(1, 0), page(2, 0), page(2, 1)]
