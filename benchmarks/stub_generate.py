"""Stands for Generate where a benchmark measures what is around it: each answer is one token, at once."""

from typing import Any

from raylens.deployments.config import AppConfig
from raylens.deployments.wire.piece_connection import PieceAddress, PieceConnections
from raylens.deployments.wire.stage_messages import GeneratedText, Heartbeat


class Generate:
    """As much of Generate as the ingress and Ray Serve call."""

    def __init__(self, config: AppConfig) -> None:
        self._connections = PieceConnections()

    async def generate(
        self, request_id: str, prompt: Any, params: Any, items: Any, address: PieceAddress, context: Any, **options: Any
    ) -> None:
        connection = await self._connections.to(address.ingress)
        piece = GeneratedText("x", [1], 1, 0, 1, "length", [])
        connection.send(address.number, [piece], is_last=True)

    async def heartbeat(self) -> Heartbeat:
        return Heartbeat()
