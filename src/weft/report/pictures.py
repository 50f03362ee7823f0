"""Small grey images as one picture inside the page: rows of them, each row with its name.

noisy      ▦ ▦ ▦ ▦          PNG by hand (RFC 2083: signature, IHDR, IDAT, IEND), since this needs
restored   ▣ ▣ ▣ ▣          twenty lines and no image library; the page carries it as a data URI
"""

import struct
import zlib
from base64 import b64encode
from collections.abc import Mapping

from torch import Tensor

from weft.core.errors import SpecError
from weft.core.markup import Markup, chart, tag

_LEFT, _TILE, _GAP, _LINE = 78.0, 64.0, 6.0, 72.0


def gallery(rows: Mapping[str, Tensor], *, title: str) -> Markup:
    """Draw rows of grey images: each N x H x W, from 0 (black) to 1 (white); what lies outside is clipped.

    Raises SpecError if a row has another number of axes.
    """
    wrong = [f"{name!r} has shape {tuple(images.shape)}" for name, images in rows.items() if images.dim() != 3]
    if wrong:
        raise SpecError(f"a gallery shows images of shape N x H x W, but {'; '.join(wrong)}")
    parts: list[str] = []
    for line, (name, images) in enumerate(rows.items()):
        top = line * _LINE
        parts.append(tag("text", name, x=_LEFT - 10, y=top + _TILE / 2 + 4, class_="tick end"))
        for column, image in enumerate(images):
            uri = f"data:image/png;base64,{b64encode(png(image)).decode()}"
            left = _LEFT + column * (_TILE + _GAP)
            parts.append(tag("image", href=uri, x=left, y=top, width=_TILE, height=_TILE, class_="pixels"))
    columns = max((len(images) for images in rows.values()), default=0)
    return chart(title, _LEFT + columns * (_TILE + _GAP), len(rows) * _LINE, *parts)


def png(image: Tensor) -> bytes:
    """A grey PNG file of an H x W image with values from 0 to 1."""
    height, width = image.shape
    grey = [int(value) for value in (image.detach().clamp(0, 1) * 255).round().flatten()]
    lines = b"".join(b"\0" + bytes(grey[i * width : (i + 1) * width]) for i in range(height))  # 0: no filter
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
