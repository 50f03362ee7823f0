"""The hand-made PNG holds the image, and a gallery every image of every row."""

import struct
import zlib
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.core.errors import SpecError
from weft.report.pictures import gallery, png


def chunks(file: bytes) -> dict[bytes, bytes]:
    """The chunks of a PNG file; checks their checksums."""
    assert file[:8] == b"\x89PNG\r\n\x1a\n"
    found: dict[bytes, bytes] = {}
    at = 8
    while at < len(file):
        (size,) = struct.unpack(">I", file[at : at + 4])
        kind, data = file[at + 4 : at + 8], file[at + 8 : at + 8 + size]
        assert struct.unpack(">I", file[at + 8 + size : at + 12 + size])[0] == zlib.crc32(kind + data)
        found[kind] = data
        at += 12 + size
    return found


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 99))
def test_a_png_holds_the_grey_values_line_by_line(height: int, width: int, seed: int) -> None:
    image = torch.rand(height, width, generator=torch.Generator().manual_seed(seed))
    parts = chunks(png(image))
    assert list(parts) == [b"IHDR", b"IDAT", b"IEND"]
    assert struct.unpack(">IIBBBBB", parts[b"IHDR"]) == (width, height, 8, 0, 0, 0, 0)
    rows = torch.tensor(list(zlib.decompress(parts[b"IDAT"]))).reshape(height, width + 1)
    assert rows[:, 0].eq(0).all()
    torch.testing.assert_close(rows[:, 1:] / 255, image, atol=0.5 / 255 + 1e-6, rtol=0)


def test_what_lies_outside_black_and_white_is_clipped() -> None:
    assert zlib.decompress(chunks(png(torch.tensor([[-3.0, 7.0]])))[b"IDAT"]) == b"\x00\x00\xff"


def test_a_gallery_shows_every_image_of_every_named_row() -> None:
    picture = ElementTree.fromstring(gallery({"a": torch.rand(3, 4, 4), "b": torch.rand(2, 4, 4)}, title="t"))
    assert len(list(picture.iter("image"))) == 5
    assert [element.text for element in picture.iter("text")] == ["a", "b"]


def test_a_row_with_wrong_axes_is_refused_by_name() -> None:
    with pytest.raises(SpecError, match=r"'a' has shape \(4, 4\); 'c' has shape \(1, 2, 3, 4\)"):
        gallery({"a": torch.rand(4, 4), "b": torch.rand(1, 4, 4), "c": torch.rand(1, 2, 3, 4)}, title="t")
