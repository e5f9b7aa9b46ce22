"""Run in a network namespace of its own by test_media_fetch_network.py: a small internet, attacked through the fetcher.

Every address is this machine's, so that any of them would answer; the name server is where /etc/resolv.conf says. What
each URL given came to and which addresses were asked for anything is printed as JSON.
"""

import asyncio
import json
import sys
from pathlib import Path

from aiohttp import web

from raylens.preprocess.media import MediaLimits
from raylens.preprocess.media_fetch import FetchPolicy, MediaFetcher
from raylens.preprocess.schema import InvalidRequestError
from tests.preprocess.lying_dns import LyingDns


async def outcome(fetcher: MediaFetcher, url: str) -> str:
    try:
        return (await fetcher.fetch(url)).decode()
    except InvalidRequestError as error:
        return error.code


async def main(scenario: dict[str, list[str]], names: dict[str, list[list[str]]]) -> None:
    asked: list[str] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        asked.append(request.transport.get_extra_info("sockname")[0])
        headers = {"Connection": "close"}
        if url := request.query.get("to"):
            return web.Response(status=302, headers={"Location": url, **headers})
        return web.Response(text="picture", headers=headers)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "0.0.0.0", 80).start()
    await web.TCPSite(runner, "::", 80, reuse_port=True).start()
    dns = LyingDns(names)
    await dns.start(53)
    found = {}
    for title, urls in scenario.items():
        asked.clear()
        async with MediaFetcher(MediaLimits(), FetchPolicy(total_timeout_s=10)) as fetcher:
            outcomes = [await outcome(fetcher, url) for url in urls]
        found[title] = {"outcomes": outcomes, "asked": list(asked)}
    print(json.dumps(found))
    dns.stop()
    await runner.cleanup()


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text())
    asyncio.run(main(given["scenario"], given["names"]))
