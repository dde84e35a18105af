"""A running Jupyter kernel, used as a front end uses it, and what its cells returned."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jupyter_client.blocking import BlockingKernelClient

from tests.support.waiting import HANGS_S


@dataclass
class Cell:
    """A cell's reply and its outputs, in order: message type and content."""

    reply: dict[str, Any]
    outputs: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    @property
    def shown(self) -> list[dict[str, Any]]:
        """Data of every display and of the cell's value."""
        kinds = ("display_data", "execute_result")
        return [content["data"] for kind, content in self.outputs if kind in kinds]

    @property
    def text(self) -> str:
        return "".join(content["text"] for kind, content in self.outputs if kind == "stream")


class Kernel:
    def __init__(self, client: BlockingKernelClient) -> None:
        self.client = client

    def run(self, code: str) -> Cell:
        outputs: list[tuple[str, dict[str, Any]]] = []
        reply = self.client.execute_interactive(
            code,
            timeout=HANGS_S,
            store_history=True,
            output_hook=lambda message: outputs.append((message["msg_type"], message["content"])),
        )
        return Cell(reply["content"], outputs)

    def __call__(self, code: str) -> Cell:
        cell = self.run(code)
        assert cell.reply["status"] == "ok", cell
        return cell

    def complete(self, code: str) -> list[str]:
        answer = self.client.complete(code, len(code), reply=True, timeout=HANGS_S)
        content: dict[str, Any] = answer["content"]
        assert content["cursor_end"] == len(code)
        matches: list[str] = content["matches"]
        return [code[: content["cursor_start"]] + match for match in matches]
