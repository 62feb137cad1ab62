"""A tool server of verifiers: it starts this file as a program."""

import verifiers.v1 as vf


class ShelfToolset(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "shelf"

    @vf.tool
    def price(self, name: str) -> str:
        """The price of a thing on the shelf."""
        return {"tea": "4.20"}[name]


if __name__ == "__main__":
    ShelfToolset.run()
